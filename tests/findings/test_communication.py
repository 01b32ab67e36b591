"""Communication that nothing hides, and ranks that come late to it."""

from __future__ import annotations

import pytest

from stepscope.errors import Unavailable
from stepscope.findings.rules.ranks import communication, stragglers
from stepscope.session import open_session
from trace_builder import PUBLIC, TraceBuilder, needs_traces

SAYS = {"Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20,
        "Group size": 2, "Process Group Name": "0"}  # fmt: skip


def rank_trace(rank=0, late_us=0.0, beside_us=0.0, num_steps=6, is_idle=False, meets=True, late_steps=None):
    """Steps of 10 ms: 4 ms of computing and, in `late_steps`, `late_us` more; then an all-reduce that ends when all
    have come and moved 2 ms, and `beside_us` of computing on another stream while it runs."""
    trace = TraceBuilder(distributedInfo={"backend": "nccl", "rank": rank, "world_size": 2})
    latest = 2000 if meets else 0
    for step in range(num_steps):
        begin = 10_000 * step
        late = late_us if late_steps is None or step in late_steps else 0
        trace.step(step + 1, begin, 10_000)
        trace.op("aten::mm", begin + 5, 10, id=10 * step + 1)
        trace.launch("gemm", begin + 6, runs=(begin + 10, 4000 if is_idle else 4000 + late), id=10 * step + 1)
        start, end = begin + 4020 + late, begin + 4020 + latest + 2000
        at = start - 5 if is_idle else begin + 30
        trace.launch("ncclDevKernel_AllReduce", at, runs=(start, end - start), id=10 * step + 2, stream=20, **SAYS)
        if beside_us:
            trace.op("aten::mm", at + 3, 2, id=10 * step + 3)
            trace.launch("gemm", at + 4, runs=(start + 5, beside_us), id=10 * step + 3)
        trace.op("aten::add_", at + 10, 20, id=10 * step + 4)
        trace.call("cudaStreamSynchronize", at + 40, end - at - 40)
        trace.launch("add", end + 5, runs=(end + 10, 100), id=10 * step + 4)
    return trace


def case_of(folder, **traces):
    for name, trace in traces.items():
        trace.write(folder / f"{name}.json")
    return open_session(folder if len(traces) > 1 else folder / f"{next(iter(traces))}.json", use_cache=False).case


def test_an_all_reduce_beside_which_nothing_computes(tmp_path):
    (finding,) = communication(case_of(tmp_path, rank0=rank_trace(meets=False)))

    assert finding.saving_ns == pytest.approx(2e6, rel=0.02)
    assert finding.upper_bound
    assert finding.confidence == "low"
    assert "2.00 ms per step" in finding.sentence
    assert "1 all_reduce call per step, most of the time for 2.00 MiB" in finding.sentence
    assert "bucket_cap_mb" in finding.fix


def test_an_all_reduce_behind_computing(tmp_path):
    assert communication(case_of(tmp_path, rank0=rank_trace(meets=False, beside_us=1990))) == []


def test_what_a_rank_waits_for_others_is_not_its_communication(tmp_path):
    ranks = {"rank0": rank_trace(0), "rank1": rank_trace(1, late_us=2000)}

    (finding,) = communication(case_of(tmp_path, **ranks))

    assert finding.saving_ns == pytest.approx(2e6, rel=0.02)
    assert finding.confidence == "medium"


@pytest.mark.parametrize(
    ("is_idle", "why"),
    [(False, "computes for 36.6 ms (median of the others: 24.6 ms)"), (True, "its host is slow")],
)
def test_a_rank_that_comes_late(tmp_path, is_idle, why):
    ranks = {"rank0": rank_trace(0), "rank1": rank_trace(1, late_us=2000, is_idle=is_idle)}

    (finding,) = stragglers(case_of(tmp_path, **ranks))

    assert finding.sentence.startswith("Rank 1 arrives last at 6 of 6 collectives and causes 100 %")
    assert "waits 2.00 ms per step" in finding.sentence
    assert why in finding.sentence
    assert finding.saving_ns == pytest.approx(2e6, rel=0.02)
    assert finding.confidence == "high"
    # Where it is seen on this rank: in the collectives in which it waits, the first of them in full.
    assert len(finding.places) == 6 and all(end - start >= 2_000_000 for start, end in finding.places)
    if is_idle:
        assert finding.fix.startswith(f"stepscope diagnose {tmp_path} --rank 1  #")


def test_the_late_rank_looked_at_by_itself_saves_as_much(tmp_path):
    for rank, late in ((0, 2000.0), (1, 0.0)):
        rank_trace(rank, late_us=late).write(tmp_path / f"rank{rank}.json")

    (finding,) = stragglers(open_session(tmp_path, use_cache=False).case)

    assert finding.sentence.startswith("Rank 0 arrives last")
    assert finding.saving_ns == pytest.approx(2e6, rel=0.02)


def test_ranks_that_come_together(tmp_path):
    assert stragglers(case_of(tmp_path, rank0=rank_trace(0), rank1=rank_trace(1))) == []


def test_a_rank_that_is_seldom_last_is_no_straggler(tmp_path):
    """It causes 4 ms of waiting in two steps of six, the other one 2 ms in four."""
    ranks = {"rank0": rank_trace(0, 500, late_steps={0, 1, 2, 3}), "rank1": rank_trace(1, 2000, late_steps={4, 5})}

    assert stragglers(case_of(tmp_path, **ranks)) == []


def test_two_calls_say_too_little_of_the_clocks(tmp_path):
    ranks = {"rank0": rank_trace(0, num_steps=2), "rank1": rank_trace(1, late_us=2000, num_steps=2)}

    assert stragglers(case_of(tmp_path, **ranks)) == []


@needs_traces
def test_eight_ranks_of_one_real_step():
    """Rank 7 is last to five of eight calls, by 505, 509.5, 162.5, 124 and 9 µs; the others wait for it."""
    (finding,) = stragglers(open_session(PUBLIC / "dlrm_8ranks_v100", use_cache=False).case)

    assert finding.sentence.startswith("Rank 7 arrives last at 5 of 8 collectives and causes 76 %")
    assert finding.confidence == "low"
    assert 0 < finding.saving_ns < 1.31e6


def test_what_cannot_be_seen(tmp_path):
    with pytest.raises(Unavailable, match="one rank"):
        stragglers(case_of(tmp_path, rank0=rank_trace(0)))
    with pytest.raises(Unavailable, match="no trace of GPU work"):
        communication(case_of(tmp_path, host=TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20)))


def test_a_gpu_that_does_not_communicate(tmp_path):
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20, id=1).launch("gemm", 12, runs=(30, 40), id=1)

    assert communication(case_of(tmp_path, rank0=trace)) == []
