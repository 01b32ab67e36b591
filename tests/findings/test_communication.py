"""Communication that nothing hides, and ranks that come late to it."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from recorded_cases import recorded

from parametrized import parametrized
from stepscope import analyze
from stepscope.analysis.ranks.network import transfers
from stepscope.analysis.time.cpu_ledger import cpu_ledger
from stepscope.document.trace_facts import rank_facts
from stepscope.errors import Unavailable
from stepscope.findings.rules.ranks import communication, repeated_all_reduce, stragglers
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


def member_trace(rank, members, transfers_us):
    """Steps of 10 ms: 4 ms of computing, and an all-reduce among `members`, which come in turns 20 µs apart."""
    trace = TraceBuilder(distributedInfo={"backend": "nccl", "rank": rank, "world_size": 4})
    said = {**SAYS, "Process Group Name": str(members[0]), "Process Group Ranks": str(members)}
    for step, transfer in enumerate(transfers_us):
        begin = 10_000 * step + 7_000_000 * rank  # and each on a clock of its own
        trace.step(step + 1, begin, 10_000)
        trace.op("aten::mm", begin + 5, 10, id=10 * step + 1)
        trace.launch("gemm", begin + 6, runs=(begin + 10, 4000), id=10 * step + 1)
        start = begin + 4020 + (20 if rank % 2 == step % 2 else 0)
        end = begin + 4040 + transfer
        trace.launch("ncclDevKernel_AllReduce", begin + 30, runs=(start, end - start), id=10 * step + 2, **said)
        trace.op("aten::add_", begin + 40, 20, id=10 * step + 4)
        trace.call("cudaStreamSynchronize", begin + 70, end - begin - 70)
        trace.launch("add", end + 5, runs=(end + 10, 100), id=10 * step + 4)
    return trace


def two_groups():
    """Ranks 0 and 1 move 2 MiB in 1 ms, ranks 2 and 3 in 3 ms."""
    return {f"rank{rank}": member_trace(rank, [0, 1] if rank < 2 else [2, 3], [1000 if rank < 2 else 3000] * 6)
            for rank in range(4)}  # fmt: skip


@parametrized(("rank", "confidence"), [(None, "low"), (2, "medium")], quick=1)
def test_a_group_whose_network_is_slow(tmp_path, rank, confidence):
    for name, trace in two_groups().items():
        trace.write(tmp_path / f"{name}.json")
    case = open_session(tmp_path, use_cache=False).case
    if rank is not None:  # as if its trace were the first
        whole = case
        case = replace(open_session(tmp_path, rank=rank, use_cache=False).case, _ranks=vars(whole)["_ranks"])

    (finding,) = stragglers(case)

    assert "6 of 6 calls of all_reduce of 2.00 MiB among ranks 2, 3 take 3.00 ms after the last" in finding.sentence
    assert "(median of the other groups: 1.00 ms)" in finding.sentence and "but the network, or" in finding.sentence
    assert finding.saving_ns == pytest.approx(2e6, rel=0.02) and finding.confidence == confidence
    assert len(finding.places) == (0 if rank is None else 6)


def test_a_network_that_is_slow_at_times(tmp_path):
    took_us = [1000, 1000, 1100, 4000, 900, 1000, 4200, 1000]
    ranks = {f"rank{rank}": member_trace(rank, [0, 1], took_us) for rank in range(2)}

    (finding,) = stragglers(case_of(tmp_path, **ranks))

    assert "2 of 8 calls of all_reduce of 2.00 MiB among ranks 0, 1 take 4.10 ms" in finding.sentence
    assert "(median of its other calls: 1.00 ms)" in finding.sentence and "the network at times" in finding.sentence
    assert finding.saving_ns == pytest.approx(6.2e6 / 8, rel=0.03) and finding.confidence == "low"
    (fact,) = [fact.value for fact in rank_facts(analyze(tmp_path).across) if fact.title == "network"]
    assert fact.startswith("2 of 8 all_reduce calls of 2.00 MiB among ranks 0, 1 take 1.5 times their usual 1.00 ms")


def test_a_rank_without_a_trace_may_be_the_late_one(tmp_path):
    ranks = two_groups()
    del ranks["rank3"]
    for name, trace in ranks.items():
        trace.write(tmp_path / f"{name}.json")
    across = open_session(tmp_path, use_cache=False).case.across

    assert transfers(across.stragglers)["members"].to_list() == ["0, 1"]


@pytest.fixture(scope="module")
def eight_ranks():
    return open_session(PUBLIC / "dlrm_8ranks_v100", use_cache=False).case


@needs_traces
def test_eight_real_ranks_have_too_few_equal_calls_to_judge_the_network(eight_ranks):
    assert transfers(eight_ranks.across.stragglers)["num_slow"].sum() == 0


@needs_traces
def test_eight_ranks_of_one_real_step(eight_ranks):
    """Rank 7 is last to five of eight calls, by 505, 509.5, 162.5, 124 and 9 µs; the others wait for it."""
    (finding,) = stragglers(eight_ranks)

    assert finding.sentence.startswith("Rank 7 arrives last at 5 of 8 collectives and causes 76 %")
    assert finding.confidence == "low"
    assert 0 < finding.saving_ns < 1.31e6


def test_what_cannot_be_seen(tmp_path):
    with pytest.raises(Unavailable, match="one rank"):
        stragglers(case_of(tmp_path, rank0=rank_trace(0)))
    with pytest.raises(Unavailable, match="nor a collective of gloo"):
        communication(case_of(tmp_path, host=TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20)))


def test_ranks_on_a_cpu_that_do_not_communicate(tmp_path):
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20)
    case = case_of(tmp_path, rank0=trace, rank1=trace)
    case._recording = recorded(tmp_path / "run", [10.0] * 8).recording
    with pytest.raises(Unavailable, match="No collective was found on several ranks"):
        stragglers(case)


def test_a_gpu_that_does_not_communicate(tmp_path):
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20, id=1).launch("gemm", 12, runs=(30, 40), id=1)

    assert communication(case_of(tmp_path, rank0=trace)) == []


def gloo_trace(rank, late_us=0, transfer_us=100, num_steps=4):
    """A rank on a CPU: work from 1 to 5 ms, `late_us` later; then two buckets on gloo's threads until 7.1 ms."""
    trace = TraceBuilder(distributedInfo={"backend": "gloo", "rank": rank, "world_size": 2})
    for step in range(num_steps):
        start = 10_000 * step
        trace.step(step + 1, start, 10_000).op("aten::mm", start + 1000 + late_us, 4000)
        trace.annotation("stepscope.phase/backward", start + 1000, 8000)
        for thread in (2, 3):
            begin = start + 5000 + late_us
            trace.annotation("gloo:all_reduce", begin, 2000 + transfer_us - late_us, thread)
    return trace


def test_ranks_of_gloo_wait_for_the_late_one(tmp_path):
    """Rank 1 comes 2 ms late to both buckets, which wait at the same time."""
    case = case_of(tmp_path, rank0=gloo_trace(0), rank1=gloo_trace(1, late_us=2000))

    (finding,) = stragglers(case)

    assert finding.sentence.startswith("Rank 1 arrives last at 8 of 8 collectives and causes 100 % of all waiting")
    assert "each other rank waits 2.00 ms per step" in finding.sentence
    assert finding.saving_ns == 2e6 and finding.rows == ("cpu_ranks",)
    assert "--rank 1" in finding.fix
    assert communication(case) == []  # what remains are 0.1 ms of transfer


def test_gloo_takes_its_time_though_no_rank_is_late(tmp_path):
    case = case_of(tmp_path, rank0=gloo_trace(0), rank1=gloo_trace(1))

    (finding,) = communication(case)

    assert stragglers(case) == []
    assert finding.saving_ns == 2.1e6 and finding.rows == ("cpu_ranks",) and "all_reduce" in finding.sentence


def accumulating(no_sync=(), sizes=((7, 3), (7, 3), (7, 3)), updates=(False, False, True)):
    """Two steps of three forwards and backwards; each backward reduces buckets of these sizes on gloo's thread."""
    trace = TraceBuilder(distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    for step in range(2):
        start = 100_000 * step
        trace.step(step + 1, start, 100_000)
        for number, has_update in enumerate(updates):
            at = start + 30_000 * number
            trace.annotation("stepscope.phase/forward", at, 9_000).op("aten::mm", at + 100, 8_000)
            trace.annotation("stepscope.phase/backward", at + 9_000, 15_000).op("aten::mul", at + 9_100, 8_000)
            for place, _ in enumerate(() if number in no_sync else sizes[number]):
                begin = at + 17_200 + 3_000 * place
                trace.annotation("gloo:all_reduce", begin, 2_000, 2)
            if has_update:
                trace.annotation("stepscope.phase/optimizer", at + 24_000, 5_000).op("aten::add_", at + 24_100, 4_000)
    return trace


@pytest.mark.parametrize(
    ("how", "num"),
    [
        ({}, 4),
        ({"no_sync": (0, 1)}, 0),
        ({"updates": (True, True, True)}, 0),  # a critic's steps
        ({"sizes": ((1, 2, 3), (7, 3), (4,))}, 0),  # networks of their own
        ({"sizes": ((7, 3), (7, 3), (4,))}, 2),
    ],
)
def test_gradients_are_reduced_once_before_an_update(tmp_path, how, num):
    case = case_of(tmp_path, rank0=accumulating(**how))

    found = repeated_all_reduce(case)

    assert [one.saving_ns for one in found] == [num * 2_000_000] * bool(num)
    assert not found or f"{num} all_reduce calls per step could be left out" in found[0].sentence


def test_waiting_for_ranks_has_a_row_of_a_cpus_ledger():
    linked = gloo_trace(0).linked()
    phases = {"forward": 1e6, "backward": 8e6, "optimizer": 1e6}
    work = pl.DataFrame(schema={"event": pl.UInt32, "step": pl.Int64, "phase": pl.String, "op": pl.String,
                                "duration_ns": pl.Int64})  # fmt: skip

    ledger = cpu_ledger(linked, work, phases, 10e6, 0, 0)

    assert sum(row.ns for row in ledger.rows) == 10_000_000
    assert {row.id: row.ns for row in ledger.rows}["cpu_ranks"] == 2_100_000
