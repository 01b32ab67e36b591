"""The screen of `stepscope analyze`: what it says of small traces, and that it says it in line at any width."""

from __future__ import annotations

import pytest

from parametrized import parametrized
from stepscope.analysis.ranks.rank_account import Analysis, account
from stepscope.document.sections.time import analysis_document
from stepscope.document.verdict import trace_verdict
from stepscope.render.terminal import terminal_text
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces

WIDTHS = (60, 80, 100, 120)


def screen(trace: TraceBuilder | Analysis, width: int = 100, most: int = 8) -> str:
    analysis = trace if isinstance(trace, Analysis) else Analysis.of([trace.account()])
    return terminal_text(analysis_document(analysis, most), width)


def as_one(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


def line_of(text: str, title: str) -> str:
    """A fact with what is wrapped below it."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"  {title}  "))
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].startswith("    ")), len(lines))
    return as_one(" ".join(lines[start:end]))


def real(name: str) -> Analysis:
    return Analysis.of([account(read_trace(TRACES / f"{name}.json.gz"), 0)])


# -- the head and the verdict -----------------------------------------------------------------------------------


def test_a_gpu_that_the_trace_does_not_name_is_a_gpu():
    assert "unnamed GPU" in screen(TraceBuilder().launch("a", 0, (10, 5)))
    assert "no GPU" in screen(TraceBuilder().op("aten::mm", 0, 5))


def test_one_event_is_one_event():
    assert "1 event\n" in screen(TraceBuilder().kernel("a", 0, 5))


def test_one_step_is_no_average():
    one = line_of(screen(TraceBuilder().step(1, 0, 100).op("aten::mm", 1, 2)), "steps")
    assert "1 step of 100.0 µs" in one and "average" not in one
    found = TraceBuilder().op("aten::mm", 0, 5).annotation("Optimizer.step#SGD.step", 5, 5)
    line = line_of(screen(found), "steps")
    assert "1 step of 10.00 µs" in line and "it ends with an optimizer step" in line


def test_steps_of_several_ranks_are_said_to_be_the_first_ones():
    ranks = [account(TraceBuilder().step(1, 0, 100).kernel("a", 5, 5).read(), rank) for rank in (3, 4)]

    text = screen(Analysis.of(ranks))
    assert "1 step of 100.0 µs" in line_of(text, "steps") and " 3 " in line_of(text, "rank")


@pytest.mark.parametrize(
    ("softmax_us", "words"),
    [
        (60, "most of its work is in softmax kernels (60.0 %)"),
        (50, "the largest part of its work is in gemm kernels (50.0 %)"),
    ],
)
def test_most_is_more_than_half(softmax_us, words):
    trace = TraceBuilder().kernel("gemm", 0, 100 - softmax_us).kernel("softmax", 100, softmax_us)

    assert words in as_one(trace_verdict(trace.account()))


def test_a_stall_before_the_first_kernel_is_idle_time_of_the_steps():
    # GIVEN a step of 100 µs in which the GPU works from 80 to 90
    trace = TraceBuilder().step(1, 0, 100).launch("gemm", 75, (80, 10))
    verdict = trace_verdict(trace.account())

    assert "busy 10.0 % of the steps (100.0 µs)" in verdict
    assert "(10.00 µs) it was busy 100.0 %" in verdict


def test_a_window_as_long_as_the_steps_is_said_alone():
    trace = TraceBuilder().step(1, 0, 100).launch("gemm", 1, (2, 10)).launch("gemm", 80, (90, 10))

    assert "steps" not in trace_verdict(trace.account())


@needs_traces
def test_the_planted_stall_is_in_the_verdict():
    assert "idle 56.0 % of the steps (242.1 ms)" in trace_verdict(real("h200/data_stall").ranks[0])


def test_a_file_that_is_cut_off_may_have_lost_its_gpu_work(tmp_path):
    # GIVEN a trace whose GPU events come last, and a file that ends before them
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 5).op("aten::mm", 20, 5).launch("gemm", 30, (40, 5))
    path = trace.write(tmp_path / "trace.json")
    text = path.read_bytes()
    path.write_bytes(text[: text.index(b'"cat": "kernel"') - 30])
    cut = account(read_trace(path), 0)

    assert cut.is_cut_off and "GPU work may be missing" in trace_verdict(cut)
    assert not trace.account().is_cut_off
    whole = TraceBuilder().op("aten::mm", 10, 5).account()
    assert "The trace has no GPU work" in trace_verdict(whole)


# -- facts ------------------------------------------------------------------------------------------------------


def test_waits_for_the_gpu_are_those_of_the_host():
    # GIVEN a wait of the host, a wait of a stream, and a copy that waits for nobody
    trace = TraceBuilder().step(1, 0, 100).launch("a", 1, (5, 10)).call("cudaDeviceSynchronize", 10, 8)
    trace.call("cudaStreamWaitEvent", 20, 1).call("cudaStreamWaitEvent", 22, 1).launch("b", 60, (70, 5))
    line = line_of(screen(trace), "synchronization")

    assert "the GPU 1 time" in line and "idle for 55.00 µs" in line and "longest after cudaDeviceSynchronize" in line


def test_kernels_without_a_launch_are_said_apart():
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 5, 50).launch("a", 10, (20, 5)).kernel("early", 12, 5)
    text = screen(trace.launch("after", 200, (210, 5)))

    assert "1 kernel per step" in line_of(text, "launches")
    assert "1 more without a launch in the trace" in line_of(text, "launches")
    assert line_of(text, "unattributed").split()[-1] == "2"


def test_traces_with_nothing_in_common_are_not_aligned_and_wait_for_nobody():
    ranks = [account(TraceBuilder().launch("gemm", 0, (10 + rank, 5)).read(), rank) for rank in (0, 1)]
    text = screen(Analysis.of(ranks))

    assert "not aligned" in line_of(text, "clocks")
    assert "waiting" not in text and "±" not in text and "last in" not in text


def test_ranks_that_share_a_collective_are_aligned():
    def rank(number: int) -> TraceBuilder:
        trace = TraceBuilder().step(1, 0, 300)
        for call in range(5):
            at = 10 + 40 * call
            trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at, (at + 5 + number, 20 - number))
        return trace

    together = [account(rank(number).read(), number) for number in (0, 1)]
    alone = account(TraceBuilder().launch("gemm", 0, (10, 5)).read(), 2)

    assert "aligned on collectives to ±" in screen(Analysis.of(together))
    assert "is waiting for the last rank; rank 1 is last" in as_one(screen(Analysis.of(together)))
    assert "except rank 2" in line_of(screen(Analysis.of([*together, alone])), "clocks")


def test_what_is_limited_says_of_what():
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    trace.op("aten::mm", 0, 9, id=1, **{"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]})
    trace.launch("gemm", 1, (20, 30), id=1).kernel("ncclDevKernel_AllReduce", 60, 40).memcpy(110, 5)

    assert "of 30.00 µs GPU work without communication and host copies" in line_of(screen(trace), "limited by")


def test_a_copy_has_one_share_on_the_whole_screen():
    # GIVEN a copy beside a kernel, so that the sum of durations is twice the busy time
    trace = TraceBuilder().kernel("gemm", 0, 100).memcpy(0, 100, stream=8)
    text = screen(trace)

    assert "50.0 % of GPU work: host to device 50.0 %" in text
    assert next(line for line in text.splitlines() if "Memcpy HtoD" in line).endswith("50.0 %")


def test_warnings_say_their_rank_where_there_are_several(tmp_path):
    trace = TraceBuilder().step(10, 0, 100).kernel("a", 0, 5).kernel("negative", 50, -5).kernel("negative", 60, -5)
    other = TraceBuilder().step(10, 0, 100).kernel("a", 0, 5).kernel("negative", 50, -5)
    one, same = (Analysis.of([account(trace.read(), rank) for rank in ranks]) for ranks in ((0,), (0, 1)))
    both = Analysis.of([account(trace.read(), 0), account(other.read(), 1)])

    assert one.to_json()["trace"]["warnings"][0].startswith("2 events with a negative duration (the first at byte ")
    assert [text[:8] for text in both.to_json()["trace"]["warnings"]] == ["rank 0: ", "rank 1: "]
    assert "2 events" in line_of(screen(one), "warning")
    assert "rank 0: 2 events" in line_of(screen(both), "warning") and "rank 1: 1 event" in as_one(screen(both))
    assert [text[:23] for text in same.to_json()["trace"]["warnings"]] == ["every rank: 2 events wi"]


def test_entries_that_are_no_events_are_called_that(tmp_path):
    path = TraceBuilder().kernel("a", 0, 5).write(tmp_path / "trace.json")
    text = path.read_text()
    path.write_text(text.replace('"traceEvents": [', '"traceEvents": [1, 2, '))

    assert account(read_trace(path), 0).warnings[0].startswith("2 entries that are not events (the first at byte")


# -- tables -----------------------------------------------------------------------------------------------------


def host_only() -> TraceBuilder:
    trace = TraceBuilder().step(1, 0, 100).python("nn.Module: Net_0", 5, 60).python("nn.Module: Linear_0", 10, 40)
    return trace.op("aten::mm", 15, 30)


def test_without_a_gpu_modules_have_host_times_and_there_are_no_columns_of_nothing():
    text = screen(host_only())

    assert text.count("GPU") == 2 and "kernels" not in text and "device " in text  # "no GPU", "has no GPU work"
    net = next(line for line in text.splitlines() if line.startswith("  Net_* "))
    assert net.split()[-2:] == ["100.0", "%"] and "60.0 µs" in net
    inner = next(line for line in text.splitlines() if line.startswith("  Net_*.Linear_* "))
    assert "40.0 µs" in inner and "66.7 %" in inner


def test_shares_say_of_what():
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 5, id=1).launch("gemm", 11, (20, 30), id=1)
    text = screen(trace)

    assert "share: of the sum of all durations" in text and "share: of GPU work" in text
    headers = [line.split() for line in text.splitlines() if line.startswith(("  kernel ", "  op ", "  part "))]
    assert [header[-1] for header in headers] == ["kernels", "share", "share"]


def test_nothing_is_said_to_be_unclassified_twice():
    text = screen(TraceBuilder().kernel("what is this", 0, 5))

    assert text.count("100.0 %") == text.replace("other", "").count("100.0 %")
    assert "other 100.0 %" not in text and "unclassified 100.0 %" in text


def many_names() -> TraceBuilder:
    trace = TraceBuilder().step(1, 0, 5000)
    for number, tile in enumerate(("128x128_tn", "256x128_nn", "128x256_nt")):
        name = f"void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_{tile}_align1>(Params)"
        trace.op(f"a_rather_long_namespace::with_a_long_operator_{number}_backward", 1000 * number, 9, id=number + 1)
        trace.launch(name, 1000 * number + 1, (1000 * number + 50, 100.5), id=number + 1)
        trace.launch(f"void f<MulFunctor<float>, {number}>(int)", 1000 * number + 200, (1000 * number + 300, 7))
    return trace


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_can_be_told_apart_and_stay_in_line(width):
    text = screen(many_names(), width, most=20)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width

    for title, num_rows in (("kernel", 6), ("op", 4)):
        start = next(place for place, line in enumerate(lines) if line.startswith(f"  {title} "))
        rows = lines[start + 1 : start + 1 + num_rows]
        # THEN no row is wrapped, all end where the header does, and no two have one name
        assert {len(row) for row in rows} == {len(lines[start])}
        assert len({row[2:].split("  ")[0] for row in rows}) == num_rows
        assert lines[start + 1 + num_rows].startswith("  s")  # the note


@needs_traces
@parametrized("width", WIDTHS, quick=2)
@pytest.mark.parametrize("name", ["public/qwen0.5b_mi300_stacks", "public/cpu_only_gloo", "h200/data_stall"])
def test_real_screens_fit(name, width):
    lines = screen(real(name), width).splitlines()

    assert max(map(len, lines)) <= width
    kernels = [line for line in lines if line.startswith("  Kernel2[")]
    assert len({line.split("  ")[1] for line in kernels}) == len(kernels)


def test_times_are_in_units_that_suit_them():
    # GIVEN a copy of 760 ns beside a kernel of 13.34 s
    trace = TraceBuilder().kernel("gemm", 0, 13_340_000).memcpy(13_340_000, 0.76)
    text = screen(trace)

    assert "760 ns" in text and "13.34 s" in text
    assert "0.0007600" not in text and "13,340 ms" not in text


def test_counts_a_step_are_whole_or_have_one_decimal():
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 100).step(3, 200, 100).launch("a", 1, (5, 1))
    assert "0.3 kernels per step" in screen(trace)
    assert "1 kernel per step" in screen(trace.launch("a", 101, (105, 1)).launch("a", 201, (205, 1)))


def test_json_has_every_row():
    trace = TraceBuilder()
    for number in range(12):
        trace.kernel(f"kernel_{number}", 10 * number, 5)

    found = Analysis.of([trace.account()]).to_json()["ranks"][0]
    assert (len(found["top_kernels"]), len(found["longest_gaps"])) == (12, 11)
