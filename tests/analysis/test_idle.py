"""Why the GPU was idle: one small trace a cause, and on any trace every nanosecond as the definitions have it."""

from __future__ import annotations

import re
from collections import Counter

import polars as pl
import pytest
from hypothesis import given

from any_trace import any_trace
from call_count import num_calls
from parametrized import parametrized
from stepscope.analysis.ranks.rank_account import Analysis
from stepscope.analysis.structure.links import Linked, link
from stepscope.analysis.time.gpu_time import gpu_time
from stepscope.analysis.time.idle_causes import CAUSES, idle_causes, idle_gaps
from stepscope.trace.reader import read_trace
from trace_builder import AUTOGRAD, PUBLIC, TraceBuilder, needs_traces

DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def causes_of(trace: TraceBuilder | Linked) -> dict[str, int]:
    """Nanoseconds by cause, those without any left out."""
    linked = trace if isinstance(trace, Linked) else trace.linked()
    table = idle_causes(idle_gaps(linked))
    assert table["cause"].to_list() == list(CAUSES)
    assert int(table["total_ns"].sum()) == gpu_time(linked.device).idle_ns
    return {cause: ns for cause, ns in zip(table["cause"], table["total_ns"]) if ns}


def gap() -> TraceBuilder:
    """The GPU works up to 110 µs and again from 205 on; the second kernel is launched at 200."""
    trace = TraceBuilder().step(0, 0, 1000).op("aten::mm", 85, 20).launch("first", 90, (100, 10))
    return trace.launch("second", 200, (205, 5))


def test_from_the_launch_on_it_is_launch_and_before_it_python_when_no_op_is_open():
    assert causes_of(gap()) == {"launch": 5_000, "python": 90_000}


def test_a_gpu_that_never_waits_has_no_cause():
    assert causes_of(TraceBuilder().launch("a", 0, (10, 5)).launch("b", 1, (15, 5))) == {}
    assert causes_of(TraceBuilder().op("aten::mm", 0, 5)) == {}


@parametrized(
    "name",
    [
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "hipDeviceSynchronize",
        "hipStreamSynchronize",
        "cudaMemcpy",
        "hipMemcpyWithStream",
    ],
    quick=5,
)
def test_a_call_that_waits_for_the_gpu_is_synchronization(name):
    assert causes_of(gap().call(name, 120, 30)) == {"synchronization": 30_000, "launch": 5_000, "python": 60_000}


@parametrized(
    "name",
    ["cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocAsync", "hipMalloc", "hipFree", "cuMemCreate"],
    quick=4,
)
def test_the_drivers_allocator_is_allocator(name):
    assert causes_of(gap().call(name, 120, 30)) == {"allocator": 30_000, "launch": 5_000, "python": 60_000}


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuLibraryLoadData", "hipModuleLoad", "cudaGraphInstantiate"])
def test_loading_code_is_compile(name):
    assert causes_of(gap().call(name, 120, 30)) == {"compile": 30_000, "launch": 5_000, "python": 60_000}


@pytest.mark.parametrize(
    "name",
    ["torch/_dynamo/convert_frame.py(1): f", "torch/_inductor/compile_fx.py(1): f", "triton/compiler/x.py(1): f"],
)
def test_python_that_compiles_is_compile_with_all_it_does(name):
    trace = gap().python(name, 120, 30).op("aten::empty", 125, 10)

    assert causes_of(trace) == {"compile": 30_000, "launch": 5_000, "python": 60_000}


@pytest.mark.parametrize("name", ["c10d::allreduce_", "gloo:all_reduce", "c10d::barrier"])
def test_a_collective_of_the_host_is_other_ranks(name):
    assert causes_of(gap().op(name, 120, 30)) == {"other_ranks": 30_000, "launch": 5_000, "python": 60_000}


def test_the_dataloader_is_data():
    assert causes_of(gap().annotation(DATA, 120, 30)) == {"data": 30_000, "launch": 5_000, "python": 60_000}


def test_an_op_or_a_call_is_launch():
    trace = gap().op("aten::linear", 120, 30).op("aten::t", 130, 5).call("cudaEventRecord", 160, 10)

    assert causes_of(trace) == {"launch": 45_000, "python": 50_000}


@pytest.mark.parametrize("name", ["cudaMemcpyAsync", "cudaMemsetAsync", "hipMemcpyAsync", "cudaLaunchKernel"])
def test_a_call_that_does_not_wait_is_launch(name):
    assert causes_of(gap().call(name, 120, 30)) == {"launch": 35_000, "python": 60_000}


def test_python_with_no_op_open_is_python():
    assert causes_of(gap().python("train.py(3): log", 120, 30).annotation("my label", 150, 30)) == {
        "launch": 5_000,
        "python": 90_000,
    }


def test_work_that_was_launched_before_the_gap_is_queued():
    trace = TraceBuilder().launch("first", 90, (100, 10)).launch("second", 105, (205, 5))

    assert causes_of(trace.call("cudaDeviceSynchronize", 120, 30)) == {"queued": 95_000}


def test_work_whose_launch_is_not_in_the_trace_is_unknown():
    trace = TraceBuilder().launch("first", 90, (100, 10)).kernel("second", 205, 5, correlation=77)

    assert causes_of(trace.call("cudaDeviceSynchronize", 120, 30)) == {"unknown": 95_000}


def test_of_two_that_end_a_gap_together_the_one_with_a_launch_tells():
    assert causes_of(gap().kernel("at once", 205, 3, stream=8)) == {"launch": 5_000, "python": 90_000}


def test_a_kernel_before_its_launch_makes_the_whole_gap_launch():
    # GIVEN clocks that do not agree: the kernel starts 5 µs before the call that launched it
    trace = TraceBuilder().launch("first", 90, (100, 10)).launch("second", 210, (205, 10))

    assert causes_of(trace.python("train.py(3): log", 112, 50)) == {"launch": 95_000}


def test_only_the_thread_that_launches_counts():
    # GIVEN a backward thread inside an op, while the main thread waits
    trace = TraceBuilder().step(0, 0, 1000).launch("first", 90, (100, 10)).call("cudaStreamSynchronize", 95, 500)
    trace.op("MmBackward0", 130, 80, AUTOGRAD).launch("second", 200, (205, 5), thread=AUTOGRAD)

    assert causes_of(trace) == {"launch": 75_000, "python": 20_000}


def test_data_is_a_matter_of_the_main_thread():
    trace = TraceBuilder().step(0, 0, 1000).annotation(DATA, 100, 500).op("aten::mm", 85, 10)
    trace.launch("first", 90, (100, 10))
    trace.op("MmBackward0", 130, 80, AUTOGRAD).launch("second", 200, (205, 5), thread=AUTOGRAD)

    assert causes_of(trace) == {"launch": 75_000, "python": 20_000}


@parametrized(
    ("outer", "inner", "cause"),
    [
        ("aten::item", "cudaStreamSynchronize", "synchronization"),
        ("aten::empty", "cudaMalloc", "allocator"),
        ("cudaMalloc", "cudaDeviceSynchronize", "synchronization"),
        (DATA, "cudaStreamSynchronize", "synchronization"),
        (DATA, "cudaHostAlloc", "allocator"),
        (DATA, "c10d::barrier", "other_ranks"),
        (DATA, "aten::stack", "data"),
        ("c10d::allreduce_", "cuModuleLoadData", "compile"),
        ("torch/_dynamo/convert_frame.py(1): f", "cudaMalloc", "allocator"),
    ],
    quick=5,
)
def test_where_two_apply_the_more_particular_has_it(outer, inner, cause):
    trace = gap()
    for name, start, length in ((outer, 120, 50), (inner, 130, 30)):
        kind = "annotation" if name == DATA else "python_function" if ".py" in name else "op"
        kind = "call" if re.match("cu", name) else kind
        if kind == "call":
            trace.call(name, start, length)
        else:
            trace.slice({"op": "cpu_op", "annotation": "user_annotation"}.get(kind, kind), name, start, length)
    found = causes_of(trace)

    outer_cause = {"aten": "launch", "cuda": "allocator", "enum": "data", "c10d": "other_ranks", "torc": "compile"}[
        outer[:4]
    ]
    expected = Counter({"launch": 5_000, "python": 40_000})
    expected[cause] += 30_000
    expected[outer_cause] += 20_000
    assert found == dict(expected)


def test_a_call_that_outlasts_its_op_is_launch_to_its_own_end():
    trace = gap().op("aten::mm", 120, 20).call("cudaEventRecord", 130, 30)

    assert causes_of(trace) == {"launch": 45_000, "python": 50_000}


# -- capture and planning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "compile_ns"), [(120, 40_000), (105, 50_000), (80, 50_000)])
def test_a_graph_that_is_being_captured_is_compile_whenever_the_capture_began(begin, compile_ns):
    # GIVEN a capture that begins in the gap, or while the GPU still works, or before it does, and ends at 160
    trace = gap().call("cudaStreamBeginCapture", begin, 2).op("aten::mm", 125, 20).call("cudaLaunchKernel", 130, 2)
    trace.call("cudaStreamEndCapture", 160, 3)

    # THEN all between is compile, and the end of it a call like others
    assert causes_of(trace) == {
        "compile": compile_ns,
        "launch": 8_000,
        "python": 95_000 - compile_ns - 8_000,
    }


def test_a_capture_on_another_thread_is_not_this_ones_cause():
    trace = gap().call("cudaStreamBeginCapture", 120, 2, AUTOGRAD).call("cudaStreamEndCapture", 160, 3, AUTOGRAD)

    assert causes_of(trace) == {"launch": 5_000, "python": 90_000}


def planning(self_us: float, *, launches: bool = True) -> TraceBuilder:
    """An op that keeps the host for so long by itself, and a kernel after it."""
    trace = TraceBuilder().launch("first", 90, (100, 10)).op("aten::mm", 120, self_us + 2, id=5)
    start = 120 + self_us
    trace.launch("second", start, (start + 10, 5), id=5 if launches else None, took=2)
    return trace if launches else trace.op("aten::inner", start - 1, 3)


def test_an_op_that_keeps_the_host_for_a_millisecond_is_planning():
    assert causes_of(planning(2_000)) == {"compile": 2_000_000, "launch": 10_000, "python": 10_000}


def test_an_op_that_is_faster_is_launch():
    assert causes_of(planning(900)) == {"launch": 910_000, "python": 10_000}


def test_an_op_that_launches_nothing_by_itself_does_not_plan():
    assert causes_of(planning(2_000, launches=False)) == {"launch": 2_010_000, "python": 10_000}


def test_a_synchronization_inside_a_long_op_is_none_of_its_planning():
    trace = TraceBuilder().launch("first", 90, (100, 10)).op("aten::nonzero", 120, 2_002, id=5)
    trace.call("cudaStreamSynchronize", 130, 1_900).launch("second", 2_120, (2_130, 5), id=5)

    assert causes_of(trace) == {"synchronization": 1_900_000, "launch": 110_000, "python": 10_000}


def long_launch(took: float, *, call: str = "cudaLaunchKernel", at: float = 120) -> TraceBuilder:
    """An op whose launch takes so long, and its kernel 10 µs after it returned."""
    trace = TraceBuilder().launch("first", 90, (100, 10)).op("aten::mm", at - 2, took + 4, id=5)
    return trace.launch("second", at, (at + took + 10, 5), id=5, took=took, call=call)


def test_a_launch_that_takes_a_millisecond_loads_code():
    assert causes_of(long_launch(2_000)) == {"compile": 2_000_000, "launch": 12_000, "python": 8_000}
    assert causes_of(long_launch(900)) == {"launch": 912_000, "python": 8_000}


def test_a_long_launch_that_begins_while_the_gpu_works_loads_code_too():
    # GIVEN a launch from 105 to 2105 µs while the first kernel runs until 110
    assert causes_of(long_launch(2_000, at=105)) == {"compile": 1_995_000, "queued": 10_000}


def test_a_long_launch_of_another_kernel_before_the_gap_ends_loads_code_too():
    trace = TraceBuilder().launch("first", 90, (100, 10)).launch("slow", 120, (2_900, 5), took=2_000)

    assert causes_of(trace.launch("second", 2_200, (2_210, 5)))["compile"] == 2_000_000


@pytest.mark.parametrize(
    ("call", "causes"),
    [
        ("cudaGraphLaunch", {"launch": 2_012_000, "python": 8_000}),
        ("cudaDeviceSynchronize", {"synchronization": 2_000_000, "launch": 12_000, "python": 8_000}),
        ("cudaMallocAsync", {"allocator": 2_000_000, "launch": 12_000, "python": 8_000}),
    ],
)
def test_a_long_call_that_is_something_else_loads_no_code(call, causes):
    assert causes_of(long_launch(2_000, call=call)) == causes


def test_a_copy_is_as_long_as_it_is_large():
    trace = TraceBuilder().launch("first", 90, (100, 10)).call("cudaMemcpyAsync", 120, 2_000, correlation=9)

    assert causes_of(trace.memcpy(2_130, 5, correlation=9)) == {"launch": 2_010_000, "python": 10_000}


@needs_traces
def test_the_first_use_of_a_kernel_on_an_mi250_is_not_launch_bound():
    causes = causes_of(link(read_trace(PUBLIC / "mi250_minitoy_train_ROCm6_2_kineto.json.gz")))

    assert causes["compile"] > 6_000_000 > causes["launch"]


# -- longest gaps -----------------------------------------------------------------------------------------------


def test_the_longest_gaps_say_what_the_host_was_in_and_what_came_next():
    trace = gap().python("train.py(3): main", 0, 900).op("aten::linear", 115, 60).op("aten::addmm", 118, 55)
    gaps = trace.launch("third", 211, (214, 5)).account().longest_gaps

    assert gaps.rows() == [
        (110_000, 95_000, "launch", 0, "ProfilerStep#0 > train.py(3): main > aten::linear > aten::addmm", "second"),
        (210_000, 4_000, "launch", 0, "ProfilerStep#0 > train.py(3): main", "third"),
    ]


def test_every_gap_can_be_asked_for():
    trace = TraceBuilder()
    for number in range(25):
        trace.op(f"op_{number}", 100 * number, 10).launch("a", 100 * number + 5, (100 * number + 20, 10 + number))
    gaps = trace.account().longest_gaps

    assert gaps.height == 24 and gaps["duration_ns"].is_sorted(descending=True)
    assert len(Analysis.of([trace.account()]).to_json(20)["ranks"][0]["longest_gaps"]) == 20


def test_what_the_host_was_in_is_what_was_open_and_counts():
    # GIVEN an op that is over, one that is open, and the profiler's own overhead in it
    trace = gap().op("aten::over", 112, 5).op("aten::linear", 115, 80).slice("overhead", "Buffer Flush", 130, 50)

    assert trace.account().longest_gaps["host"][0] == "ProfilerStep#0 > aten::linear"


# -- any trace --------------------------------------------------------------------------------------------------

SYNC, ALLOCATE, COMPILE, RANKS = "cudaDeviceSynchronize", "cudaMalloc", ("cuModule", "torch/_dynamo"), "c10d::"


Event = tuple[str, str, int, int]


def cause_at(events: list[Event], time: int, is_data: bool) -> str:
    """The cause of a moment before a launch, from the launching thread's events: docs/accounting.md, read aloud."""
    names = [name for name, _, start, end in events if start <= time < end]
    kinds = {kind for _, kind, start, end in events if start <= time < end}
    begins = [start for name, _, start, _ in events if name == "cudaStreamBeginCapture" and start <= time]
    ends = [start for name, _, start, _ in events if name == "cudaStreamEndCapture"]
    is_captured = max(ends, default=0) > time and any(not any(b <= end <= time for end in ends) for b in begins)
    for cause, applies in (
        ("synchronization", SYNC in names),
        ("allocator", ALLOCATE in names),
        ("compile", is_captured or any(name.startswith(COMPILE) for name in names)),
        ("other_ranks", any(name.startswith(RANKS) for name in names)),
        ("data", is_data),
        ("launch", kinds & {"op", "runtime", "driver"}),
    ):
        if applies:
            return cause
    return "python"


def expected_causes(linked: Linked) -> Counter[str]:
    """Every idle nanosecond by its cause."""
    found: Counter[str] = Counter()
    device = linked.device.select("start_ns", "end_ns", "launch", "launch_start_ns").rows()
    host = linked.host.select(pl.col("name", "kind").cast(pl.String), "start_ns", "end_ns").rows()
    threads = linked.host["thread"].to_list()
    data = {ns for start, end, phase in linked.steps.phases.rows() if phase == "data" for ns in range(start, end)}
    busy = {ns for start, end, _, _ in device for ns in range(start, end)}
    first, last = min((d[0] for d in device), default=0), max((d[1] for d in device), default=0)
    for time in sorted(set(range(first, last)) - busy):
        begin = max((ns + 1 for ns in busy if ns < time), default=first)
        end = min((ns for ns in busy if ns > time), default=last)
        ending = [d for d in device if d[0] == end]
        at, launch = min(((d[3], d[2]) for d in ending if d[2] is not None), default=(None, None))
        if launch is None:
            found["unknown"] += 1
        elif at < begin:
            found["queued"] += 1
        elif at > end or time >= at:
            found["launch"] += 1
        else:
            thread = threads[launch]
            mine = [event for event, other in zip(host, threads) if other == thread]
            found[cause_at(mine, time, time in data and thread == linked.steps.main_thread)] += 1
    return found


@given(any_trace())
def test_each_idle_nanosecond_has_the_cause_that_the_definitions_give_it(trace):
    linked = trace.linked()

    assert causes_of(linked) == dict(expected_causes(linked))


@given(any_trace())
def test_the_pieces_of_gaps_tile_the_idle_time(trace):
    linked = trace.linked()
    gaps = idle_gaps(linked)
    pieces = [ns for start, end in gaps.select("start_ns", "end_ns").rows() for ns in range(start, end)]
    busy = {ns for start, end in linked.device.select("start_ns", "end_ns").rows() for ns in range(start, end)}

    assert len(pieces) == len(set(pieces)) == gpu_time(linked.device).idle_ns
    assert not busy & set(pieces)
    for _, piece in gaps.group_by("gap"):
        ordered = piece.sort("start_ns")
        assert ordered["end_ns"].to_list()[:-1] == ordered["start_ns"].to_list()[1:]


@needs_traces
@pytest.mark.parametrize("name", ["gpu_user_annotation_gp100", "mi250_minitoy_train_ROCm6_2_kineto", "triton_mi300"])
def test_causes_of_real_traces_add_up(name):
    assert causes_of(link(read_trace(PUBLIC / f"{name}.json.gz")))


def one_after_the_other(num_threads: int) -> Linked:
    """Each thread launches a kernel on a stream of its own, 4 µs after the GPU was done: half of them from an op."""
    trace = TraceBuilder()
    for number in range(num_threads):
        at, thread = 20.0 * number, 100 + number
        if number % 2:
            trace.op("aten::mm", at - 15, 20, thread)
        trace.launch("gemm", at, (at + 1, 15), thread=thread, stream=number)
    return trace.linked()


def test_each_gap_is_looked_at_on_the_thread_that_ended_it():
    # Of each gap the last microsecond is the launch's; three before it are the op's on every second thread.
    assert causes_of(one_after_the_other(9)) == {"launch": 8 * 1_000 + 4 * 4_000, "python": 4 * 4_000}


@pytest.mark.long
def test_many_threads_are_looked_at_in_one_pass():
    few, many = one_after_the_other(10), one_after_the_other(200)
    idle_gaps(one_after_the_other(10))

    assert num_calls(lambda: idle_gaps(many)) == pytest.approx(num_calls(lambda: idle_gaps(few)), rel=0.1)


def test_a_trace_of_centuries_is_looked_at_thread_by_thread():
    trace = TraceBuilder()
    year_us = 365 * 86_400 * 1e6
    for number in range(4):
        at = 40 * year_us * number
        trace.op("aten::mm", at, 30, 100 + number).launch("gemm", at + 10, (at + 20, 5), thread=100 + number)

    # But for 10 µs of the op and as many of the launch it is Python, three times.
    found = causes_of(trace)
    assert found["launch"] == 3 * 20_000
    assert found["python"] > 3 * 39 * year_us * 1000
