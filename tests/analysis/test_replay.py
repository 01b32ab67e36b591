"""A trace played again: as it was, with faster kernels, without launches, without waits."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings

from any_trace import any_trace
from stepscope.analysis.structure.cpu_work import with_cpu_work
from stepscope.analysis.structure.links import link
from stepscope.analysis.structure.work import work
from stepscope.analysis.time.overhead import Overhead, recorded_ns
from stepscope.analysis.time.replay import Change, Replay, typical_steps
from stepscope.analysis.time.what_if import choose, stretches, without
from stepscope.errors import UsageError
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces


def host_bound() -> TraceBuilder:
    """Three launches 100 µs apart of kernels of 10 µs, each 5 µs after its launch; a wait at the end of 400 µs."""
    trace = TraceBuilder().step(1, 0, 400)
    for at in (0, 100, 200):
        trace.launch("gemm", at, runs=(at + 5, 10))
    return trace.call("cudaDeviceSynchronize", 390, 10)


def device_bound() -> TraceBuilder:
    """Three launches at once of kernels of 100 µs with pauses of 2 µs; the wait ends 1 µs after the last."""
    trace = TraceBuilder().step(1, 0, 320)
    for number, at in enumerate((0, 10, 20)):
        trace.launch("gemm", at, runs=(5 + 102 * number, 100))
    return trace.call("cudaDeviceSynchronize", 30, 280)


def events(replay: Replay) -> dict[int, float]:
    return dict.fromkeys(replay.events, 0.0)


@pytest.mark.parametrize("trace", [host_bound(), device_bound()])
def test_unchanged_it_is_what_it_was(trace):
    replay = Replay(trace.linked())

    assert replay.play(Change()) == replay.recorded


def test_a_host_bound_step_gains_nothing_by_faster_kernels():
    replay = Replay(host_bound().linked())

    assert replay.play(Change(duration_ns=events(replay))).done_ns == 400_000


def test_a_device_bound_step_gains_what_its_kernels_do():
    replay = Replay(device_bound().linked())

    halved = replay.play(Change(duration_ns=dict.fromkeys(replay.events, 50_000.0)))

    # 150 µs less of kernels; 309 µs was the last one's end, 1 µs later the wait ended, 10 µs later the step.
    assert halved.done_ns == 320_000 - 150_000


def test_a_device_bound_step_gains_nothing_by_a_faster_host():
    replay = Replay(device_bound().linked())

    quick = replay.play(Change(host=stretches(replay.host_stretches().filter(pl.col("end_ns") < 30_000))))

    assert quick.done_ns == 320_000


def test_a_host_bound_step_gains_by_a_faster_host():
    replay = Replay(host_bound().linked())
    before_wait = replay.host_stretches().filter(pl.col("end_ns") <= 390_000)

    # All launched at once: latency, three kernels with the typical pause of 1.5 µs between them, 10 µs of waiting
    # and going on that were the host's own.
    quick = replay.play(Change(host=stretches(before_wait)))

    assert quick.done_ns == pytest.approx(5_000 + 3 * 10_000 + 2 * 1_500 + 10_000)


def test_the_host_goes_on_when_a_wait_is_gone():
    trace = TraceBuilder().step(1, 0, 300)
    trace.launch("one", 0, runs=(5, 100)).call("cudaStreamSynchronize", 10, 95.5, id=3)
    trace.launch("two", 200, runs=(205, 50))
    linked = trace.linked()
    replay = Replay(linked)

    assert replay.play(Change()) == replay.recorded
    # The second launch comes 95 µs sooner, but for half a microsecond that the call took beside its waiting: its
    # kernel starts at 110 µs, and the host's step ends 94.5 µs after that.
    assert replay.play(Change(unwaited=frozenset(replay.waits))).done_ns == pytest.approx(300_000 - 95_000)


def test_the_launcher_of_a_compiled_kernel_costs_as_much_as_ten_events():
    trace = TraceBuilder().op("aten::mm", 10, 20, id=1).op("triton_poi_fused_add_0", 40, 20, id=2)

    assert recorded_ns(link(trace.read()).host).to_list() == [10_000] + 10 * [40_000]


def test_a_clean_step_that_the_usual_overhead_does_not_explain_had_a_faster_host():
    replay = Replay(link(host_bound().read()))
    usual = replay.usual_overhead
    usual_ns = replay.play(Change(overhead=usual)).done_ns
    traced_ns = replay.play(Change()).done_ns

    for clean_ns in (0.8 * usual_ns, (usual_ns + traced_ns) / 2):
        overhead = replay.overhead_at(clean_ns)
        assert replay.play(Change(overhead=overhead)).done_ns == pytest.approx(clean_ns, rel=1e-3)
        assert (overhead.factor < 1) == (clean_ns < usual_ns)
        assert overhead.ns_per_event <= usual.ns_per_event
    assert replay.overhead_at(0.1 * usual_ns) == Overhead(usual.ns_per_event, 0.5)


def queued_before() -> TraceBuilder:
    """Two kernels of 100 µs that the trace has no launch of, and two that it has, launched at 10 and 20 µs."""
    trace = TraceBuilder()
    for start in (0, 102):
        trace.kernel("earlier", start, 100)
    trace.step(1, 0, 50)
    for number, at in enumerate((10, 20)):
        trace.launch("gemm", at, runs=(204 + 102 * number, 100))
    return trace


def test_what_was_queued_before_the_trace_is_not_this_steps():
    replay = Replay(queued_before().linked())

    assert replay.play(Change()) == replay.recorded
    assert (len(replay.events), replay.recorded.device_ns) == (2, 200_000)
    assert replay.recorded.done_ns == 406_000 - 202_000  # from the end of what was queued


def test_what_was_queued_before_the_trace_moves_what_comes_after():
    replay = Replay(queued_before().linked())
    halved = replay.play(Change(duration_ns=dict.fromkeys(replay.events, 50_000.0)))

    assert halved.done_ns == replay.recorded.done_ns - 100_000
    assert replay.play(Change(duration_ns=events(replay))).done_ns == 50_000  # what the host needs


def test_work_whose_launches_the_trace_never_has_stays_where_it_is():
    trace = TraceBuilder().step(1, 0, 500)
    for start in (100, 300):
        trace.kernel("graph", start, 50, stream=9)
    trace.launch("gemm", 10, runs=(20, 10))
    replay = Replay(trace.linked())

    assert len(replay.events) == 3
    assert replay.play(Change()) == replay.recorded


def test_what_another_stream_held_goes_with_it():
    trace = TraceBuilder().step(1, 0, 400)
    trace.launch("long", 0, runs=(5, 200), stream=7)
    trace.launch("held", 10, runs=(206, 50), stream=9)  # could have run from 15 µs on
    trace.call("cudaDeviceSynchronize", 20, 237)
    replay = Replay(trace.linked())
    long = replay.events[0]

    assert replay.play(Change()).done_ns == 400_000
    assert replay.play(Change(duration_ns={long: 100_000.0})).done_ns == 300_000


def test_a_full_queue_holds_the_host():
    """1,100 kernels of 100 µs, launched every 2 µs: when 1,024 wait, a launch returns when there is room."""
    trace = TraceBuilder()
    starts = [10 + 100 * number for number in range(1100)]
    at = 0.0
    for number, start in enumerate(starts):
        returns = at + 1 if number < 1024 else max(at + 1, starts[number - 1024] + 0.5)
        trace.launch("gemm", at, runs=(start, 100), took=returns - at)
        at = returns + 1
    trace.step(1, 0, starts[-1] + 100)
    replay = Replay(trace.linked())

    assert replay.play(Change()) == replay.recorded
    halved = replay.play(Change(duration_ns=dict.fromkeys(replay.events, 50_000.0)))
    # The launches end with the start of the 76th kernel, and the step is as long after them as it was.
    assert halved.step_ns == pytest.approx(replay.recorded.step_ns - 75 * 50_000)


def test_work_that_is_gone_takes_the_ops_that_did_nothing_else():
    trace = TraceBuilder().step(1, 0, 300)
    trace.op("aten::contiguous", 10, 60, id=1).op("aten::copy_", 20, 40, id=2).launch("copy", 30, runs=(40, 20), id=2)
    trace.op("aten::linear", 100, 60, id=3)
    trace.op("aten::to", 105, 20, id=4).launch("cast", 110, runs=(118, 5), id=4)
    trace.op("aten::mm", 130, 20, id=5).launch("gemm", 135, runs=(145, 20), id=5)
    linked = trace.linked()
    table = work(linked)
    copies = table.filter(pl.col("name").is_in(["copy", "cast"]))["event"]

    change = without(linked, copies)

    # All of contiguous; of linear only the cast.
    assert change.host is not None
    assert change.host.select("start_ns", "end_ns").rows() == [(10_000, 70_000), (105_000, 125_000)]
    assert Replay(linked).play(change).done_ns == 300_000 - 80_000


def test_a_loop_that_is_gone_leaves_what_stays_inside_of_its_ops():
    """On a CPU, an op is its own launch and contains others: the norm is gone, the sum in it stays."""
    trace = TraceBuilder().step(1, 0, 400)
    for name, at, took in (("mul", 10, 20), ("native_layer_norm", 50, 200), ("sum", 60, 180), ("add", 300, 20)):
        trace.op(f"aten::{name}", at, took)
    linked = with_cpu_work(trace.linked(), 1.0)
    gone = [row["event"] for row in linked.device.iter_rows(named=True) if row["name"] != "aten::sum"]

    change = without(linked, gone, is_loop=True)

    assert change.host is not None
    assert change.host.select("start_ns", "end_ns").rows() == [(10_000, 60_000), (300_000, 320_000)]


def test_steps_that_are_alike():
    trace = TraceBuilder()
    for number, (at, length) in enumerate([(0, 150), (150, 100), (250, 110), (360, 500), (860, 100)]):
        trace.step(number, at, length)
        trace.op("aten::mm", at + 1, 2)
    assert typical_steps(trace.linked())["step"].to_list() == [1, 2]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(any_trace())
def test_faster_work_never_makes_a_step_longer(builder):
    replay = Replay(builder.linked())
    before = replay.play(Change())

    faster = replay.play(Change(duration_ns=dict.fromkeys(replay.events, 0.0)))
    idle = replay.play(Change(host=stretches(replay.host_stretches())))

    assert before.host_ns >= 0
    assert faster.done_ns <= before.done_ns + 1e-6
    assert idle.done_ns <= before.done_ns + 1e-6


@pytest.mark.long
@needs_traces
@pytest.mark.parametrize(
    "path", sorted(TRACES.rglob("*.json.gz")), ids=lambda path: path.name.removesuffix(".json.gz")
)
def test_real_traces_come_out_as_they_are(path):
    linked = link(read_trace(path))
    for replay in (Replay(linked), Replay(linked, typical_steps(linked))):
        replayed, recorded = replay.play(Change()), replay.recorded

        assert replayed.step_ns == pytest.approx(recorded.step_ns, rel=0.002)
        assert replayed.done_ns == pytest.approx(recorded.done_ns, rel=0.002)
        # With nothing left to compute, a step takes what its host needs, but for the way to the GPU and back.
        nothing = replay.play(Change(duration_ns=events(replay)))
        assert nothing.done_ns == pytest.approx(nothing.host_ns, rel=0.05)


def test_work_is_chosen_by_words():
    trace = TraceBuilder().step(1, 0, 300)
    trace.op("aten::mm", 0, 20, id=1).launch("sgemm_128x64", 5, runs=(30, 20), id=1)
    trace.op("aten::softmax", 50, 20, id=2).launch("softmax_forward", 55, runs=(60, 20), id=2)
    table = work(trace.linked())

    assert choose(table, "class=gemm")["name"].to_list() == ["sgemm_128x64"]
    assert choose(table, "kernel=*_forward,op=aten::*")["name"].to_list() == ["softmax_forward"]
    with pytest.raises(UsageError, match="matches no GPU work; there is aten::"):
        choose(table, "op=aten::bmm")
    with pytest.raises(UsageError, match="FIELD=PATTERN"):
        choose(table, "ops=aten::bmm")
