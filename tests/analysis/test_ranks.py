"""Several ranks: calls matched, clocks set, stragglers named; with known skew, and on a real set of eight."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from stepscope.analysis.ranks import side_by_side as analysis
from stepscope.analysis.ranks.collectives import SCHEMA, collectives
from stepscope.analysis.ranks.side_by_side import REASONS, clock_alignment, match_collectives, rank_table, stragglers
from stepscope.analysis.structure.links import link
from stepscope.analysis.time.gpu_time import GpuTime, gpu_time
from stepscope.trace.reader import read_trace

PUBLIC = Path(os.environ.get("STEPSCOPE_TRACES", Path(__file__).parents[2].parent / "shared" / "traces")) / "public"
DLRM = PUBLIC / "dlrm_8ranks_v100"
needs_traces = pytest.mark.skipif(not DLRM.is_dir(), reason=f"the real traces are not here ({DLRM})")
Frames = dict[int, pl.DataFrame]


def frame(*calls: tuple[int, int], collective: str = "all_reduce", **columns: Any) -> pl.DataFrame:
    """A table of collectives: (start, end) of each."""
    rows = [
        {"event": place, "device": 0, "start_ns": start, "end_ns": end, "duration_ns": end - start, "step": 1,
         "collective": collective, "num_elements": 1000, "bytes": 4000, "group": "0", "group_size": 8, **columns}
        for place, (start, end) in enumerate(calls)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=SCHEMA)


def moved(table: pl.DataFrame, by_ns: int) -> pl.DataFrame:
    return table.with_columns(pl.col("start_ns", "end_ns") + by_ns)


def offsets_of(matched: analysis.Matched, **options: Any) -> dict[int, dict[str, Any]]:
    return {row["rank"]: row for row in clock_alignment(matched, **options).to_dicts()}


def stragglers_of(per_rank: Mapping[int, pl.DataFrame]) -> analysis.Stragglers:
    matched = match_collectives(per_rank)
    return stragglers(matched, clock_alignment(matched))


def written_trace(folder: Path, rank: int, starts: list[int], ends: list[int], skew_ns: int) -> Path:
    """A trace of one step with an all-reduce of 4,000 bytes between each start and end."""
    said = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
            "Group size": 3, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]"}  # fmt: skip
    host = {"ph": "X", "pid": 9, "tid": 9}
    step = {**host, "cat": "user_annotation", "name": "ProfilerStep#4", "ts": skew_ns / 1000, "dur": 900}
    events: list[dict[str, Any]] = [step]
    for number, (start, end) in enumerate(zip(starts, ends), 1):
        issued = (skew_ns + number) / 1000
        events += [
            {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": issued, "dur": 0.001,
             "args": {"correlation": number}},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_Generic(x)", "pid": rank, "tid": 20,
             "ts": (start + skew_ns) / 1000, "dur": (end - start) / 1000,
             "args": {"device": rank, "stream": 20, "correlation": number, **said}},
        ]  # fmt: skip
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 3}}))
    return path


# Rank 2 comes last to the first two, rank 0 to the third, rank 1 to the last two; ends lie up to 40 ns apart.
STARTS = {
    0: [1_001, 20_000, 42_000, 60_000, 80_000],
    1: [2_000, 21_000, 40_000, 61_500, 81_000],
    2: [5_000, 22_500, 41_000, 60_500, 80_500],
}
ENDS = {
    0: [7_000, 24_000, 44_000, 63_000, 83_000],
    1: [6_990, 24_005, 44_020, 63_000, 83_010],
    2: [7_030, 23_980, 44_010, 62_990, 83_020],
}
SKEW = {0: 0, 1: 123_457, 2: -50_001}


@pytest.fixture
def three(tmp_path: Path) -> Frames:
    paths = {rank: written_trace(tmp_path, rank, STARTS[rank], ENDS[rank], SKEW[rank] + 100_000) for rank in STARTS}
    return {rank: collectives(link(read_trace(path))) for rank, path in paths.items()}


def test_known_skew_is_found_within_its_uncertainty(three):
    matched = match_collectives(three)
    offsets = offsets_of(matched)

    assert (matched.calls.height, matched.unlinked.num, matched.unlinked.num_all) == (15, 0, 15)
    assert all(abs(offsets[rank]["offset_ns"] - SKEW[rank]) <= offsets[rank]["uncertainty_ns"] for rank in SKEW)
    # Ends of rank 1 differ by -10, 0, 5, 10, 20: median 5, quartiles 0 and 10.
    assert (offsets[1]["offset_ns"], offsets[1]["uncertainty_ns"]) == (SKEW[1] + 5, 5)
    assert (offsets[2]["offset_ns"], offsets[2]["uncertainty_ns"]) == (SKEW[2] + 10, 15)
    assert (offsets[1]["earliest_ns"], offsets[1]["latest_ns"]) == (SKEW[1] - 1_500 - 2, SKEW[1] + 2_020 + 2)
    assert [offsets[rank]["num_calls"] for rank in (0, 1, 2)] == [0, 5, 5]
    assert not any(row["is_contradicted"] for row in offsets.values())


def test_stragglers_are_named_with_what_they_cost(three):
    found = stragglers_of(three)

    assert found.calls["last_rank"].to_list() == [2, 2, 0, 1, 1]
    # On aligned clocks rank 1 starts 5 ns sooner than in truth, rank 2 10 ns.
    assert found.arrivals.filter(pl.col("call") == 0)["wait_ns"].to_list() == [3_989, 2_995, 0]
    assert found.calls["transfer_ns"].to_list() == [2_030, 1_480, 2_000, 1_500, 2_010]
    assert found.calls["lead_ns"].to_list() == [2_995, 1_495, 1_010, 1_005, 505]
    assert found.calls["is_certain"].all()
    # (n - 1) / n of both ways for three ranks: 4,000 bytes * 4 / 3 in 2,000 ns.
    assert found.calls["bus_bandwidth_bytes_per_s"][2] == 2_666_666_667
    assert found.ranks["num_last"].to_list() == [1, 2, 2]
    caused = [2_005 + 1_010, 1_495 + 1_005 + 995 + 505, 3_989 + 2_995 + 2_490 + 1_495]
    assert found.ranks["caused_wait_ns"].to_list() == caused
    assert found.pairs.row(0) == (0, 2, 3_989 + 2_490, 2)


def test_a_lead_that_the_clocks_cannot_tell_is_not_certain():
    calls = [(start, start + 1_000) for start in range(0, 50_000, 10_000)]
    jittered = [(start + 2, end + jitter) for (start, end), jitter in zip(calls, (-300, 300, 0, -300, 300))]
    found = stragglers_of({0: frame(*calls), 1: frame(*jittered)})

    assert found.calls["lead_ns"].to_list() == [2] * 5
    assert found.ranks.select("num_last", "num_last_certain").rows() == [(0, 0), (5, 0)]


def test_two_calls_leave_open_what_causality_does():
    zero, one = frame((0, 1_000), (5_000, 6_100)), frame((50, 1_001), (5_200, 6_100))
    offsets = offsets_of(match_collectives({0: zero, 1: one}))

    # Between start - end and end - start of every call, and two nanoseconds for the clock's own grain.
    assert (offsets[1]["earliest_ns"], offsets[1]["latest_ns"]) == (5_200 - 6_100 - 2, 1_001 + 2)
    assert (offsets[1]["offset_ns"], offsets[1]["uncertainty_ns"]) == (0, 1_003)


def test_what_causality_forbids_is_not_the_offset():
    zero, one = frame((0, 50), (100, 150), (200, 250), (300, 310)), frame((0, 99), (100, 199), (200, 299), (300, 310))
    offset = offsets_of(match_collectives({0: zero, 1: one}))[1]

    assert (offset["latest_ns"], offset["offset_ns"]) == (12, 12)  # ends differ by 49 three times out of four


def test_times_in_microseconds_are_not_known_to_less():
    calls = [(start * 1000, start * 1000 + 7_000) for start in range(0, 100, 10)]

    assert offsets_of(match_collectives({0: frame(*calls), 3: frame(*calls)}))[3]["uncertainty_ns"] == 2000


def test_bounds_that_contradict_are_said_and_counted():
    matched = match_collectives({0: frame((0, 10), (200, 210)), 1: frame((100, 110), (200, 210))})
    offsets = offsets_of(matched)

    assert offsets[1]["is_contradicted"]
    assert (offsets[1]["earliest_ns"], offsets[1]["latest_ns"], offsets[1]["uncertainty_ns"]) == (88, 12, 76)
    found = stragglers(matched, clock_alignment(matched))
    assert found.num_clamped == 2
    assert (found.arrivals["wait_ns"] + found.arrivals["transfer_ns"]).to_list() == [10] * 4


def test_base_times_are_no_skew():
    matched = match_collectives({0: frame((0, 9)), 1: frame((1_000, 1_009))})
    offsets = offsets_of(matched, base_times_ns={0: 5_000, 1: 4_100})

    assert (offsets[1]["offset_ns"], offsets[1]["skew_ns"]) == (1_000, 100)


def test_ranks_that_never_meet_are_measured_through_others():
    pairs = {0: ["a"], 1: ["b"], 2: ["a", "b"], 5: ["c"], 6: ["c"], 9: []}
    skew = {0: 0, 1: 100, 2: 5_000, 5: 7, 6: 77, 9: 1}
    at = {"a": 0, "b": 1_000, "c": 2_000}
    calls = {rank: [moved(frame((at[g], at[g] + 9), group=g), skew[rank]) for g in pairs[rank]] for rank in pairs}
    offsets = offsets_of(match_collectives({rank: pl.concat([frame(), *tables]) for rank, tables in calls.items()}))

    assert {rank: row["reference"] for rank, row in offsets.items()} == {0: 0, 1: 0, 2: 0, 5: 5, 6: 5, 9: 9}
    assert {rank: row["offset_ns"] for rank, row in offsets.items()} == {0: 0, 1: 100, 2: 5_000, 5: 0, 6: 70, 9: 0}
    assert offsets[1]["uncertainty_ns"] == 2 * offsets[2]["uncertainty_ns"] == 22


SOME = frame((0, 10), (20, 30))
OTHERS = {
    "numbers_differ": (frame((0, 10)), 3),
    "sizes_differ": (frame((0, 10), (20, 30), num_elements=7), 4),
    "alone": (frame((0, 10), (20, 30), step=2), 4),
    "unknown": (frame((0, 10), (20, 30), collective="unknown"), 4),
    "point_to_point": (frame((0, 10), (20, 30), collective="send_recv"), 4),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_what_cannot_be_matched_is_not(reason):
    other, num = OTHERS[reason]
    columns = {"collective": other["collective"][0]} if reason in ("unknown", "point_to_point") else {}
    matched = match_collectives({0: SOME.with_columns(**{k: pl.lit(v) for k, v in columns.items()}), 1: other})

    assert matched.calls.is_empty()
    assert (matched.unlinked.num, matched.unlinked.num_all) == (num, num)
    assert set(matched.unmatched["reason"]) == {reason} <= REASONS.keys()
    assert stragglers(matched, clock_alignment(matched)).wait_share == 0.0


def test_one_step_that_lacks_a_call_leaves_the_others_matched():
    first, last = frame((0, 10), (20, 30)), frame((40, 50), (60, 70), step=2)
    matched = match_collectives({0: pl.concat([first, last]), 1: pl.concat([first.head(1), last])})

    assert matched.calls.select("call", "rank", "start_ns").rows() == [(0, 0, 40), (0, 1, 40), (1, 0, 60), (1, 1, 60)]
    assert matched.unmatched.rows() == [(0, "numbers_differ", 2), (1, "numbers_differ", 1)]


def test_an_all_to_all_has_sizes_of_its_own_on_each_rank():
    less = {"num_elements": 3, "bytes": 12}
    tables = [frame((0, 10), collective="all_to_all", **columns) for columns in ({}, less)]
    matched = match_collectives(dict(enumerate(tables)))

    assert matched.calls.height == 2
    assert stragglers(matched, clock_alignment(matched)).calls["bytes"].to_list() == [4000]


def test_groups_of_one_name_and_other_ranks_are_different_groups():
    per_rank = {rank: frame((rank, 10), group_ranks="[0, 2]" if rank % 2 == 0 else "[1, 3]") for rank in range(4)}

    calls = match_collectives(per_rank).calls

    assert calls.select("call", "rank").rows() == [(0, 0), (0, 2), (1, 1), (1, 3)]


def test_kernels_of_another_device_of_the_process_are_left_out():
    both = pl.concat([frame((0, 10), (20, 30)), frame((15, 18), device=1)])
    matched = match_collectives({0: both, 1: SOME})

    assert matched.calls.height == 4
    assert matched.unmatched.rows() == [(0, "other_device", 1)]


def test_broadcasts_are_matched_and_set_no_clock():
    table = frame((0, 10), (20, 30), collective="broadcast")
    matched = match_collectives({0: table, 1: moved(table, 500)})

    assert matched.calls.height == 4
    assert offsets_of(matched)[1]["reference"] == 1
    assert stragglers(matched, clock_alignment(matched)).calls.is_empty()


@pytest.mark.parametrize("per_rank", [{}, {0: frame((0, 10))}, {0: frame().clear(), 1: frame().clear()}])
def test_with_nothing_to_compare_there_is_nothing_to_say(per_rank):
    found = stragglers_of(per_rank)

    assert found.calls.is_empty()
    assert found.ranks["rank"].to_list() == sorted(per_rank)
    assert found.wait_share == 0.0


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, list[tuple[int, int]]], dict[int, int]]:
    """Calls of two to five ranks in true time, no rank leaving before the last has come; and clocks' skews."""
    ranks = range(draw(st.integers(2, 5)))
    calls: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    now = 0
    for _ in range(draw(st.integers(1, 7))):
        starts = [now + draw(st.integers(0, 5_000)) for _ in ranks]
        end = max(starts) + draw(st.integers(1, 3_000))
        for rank in ranks:
            calls[rank].append((starts[rank], end))
        now = end
    return calls, {rank: draw(st.integers(-(10**12), 10**12)) for rank in ranks}


def frames(calls: Mapping[int, list[tuple[int, int]]], skew: Mapping[int, int]) -> Frames:
    return {rank: moved(frame(*calls[rank]), skew[rank]) for rank in calls}


@given(jobs())
def test_time_is_waiting_or_transfer_and_every_wait_has_its_reason(job):
    calls, skew = job
    per_rank = frames(calls, skew)
    found = stragglers_of(per_rank)

    assert offsets_of(match_collectives(per_rank))[1]["offset_ns"] == skew[1] - skew[0]
    assert found.num_clamped == 0
    for row in found.arrivals.to_dicts():
        starts = [calls[rank][row["call"]][0] for rank in calls]
        assert row["wait_ns"] == max(starts) - calls[row["rank"]][row["call"]][0] >= 0
        assert row["wait_ns"] + row["transfer_ns"] == row["duration_ns"]
    sums = [table["wait_ns"].sum() for table in (found.calls, found.arrivals, found.ranks, found.pairs)]
    assert sums == [found.ranks["caused_wait_ns"].sum()] * 4
    assert found.ranks["num_last"].sum() == found.calls.height


@given(jobs(), st.randoms())
def test_the_order_and_the_numbers_of_ranks_change_nothing(job, random):
    calls, skew = job
    per_rank = frames(calls, skew)
    order = list(per_rank)
    random.shuffle(order)
    matched, shuffled = match_collectives(per_rank), match_collectives({rank: per_rank[rank] for rank in order})
    found = stragglers_of(per_rank)
    renamed = stragglers_of({new: per_rank[old] for new, old in enumerate(order)})

    assert_frame_equal(shuffled.calls, matched.calls)
    waits = dict(found.ranks.select("rank", "wait_ns").rows())
    assert [waits[old] for old in order] == renamed.ranks["wait_ns"].to_list()
    assert found.calls["transfer_ns"].to_list() == renamed.calls["transfer_ns"].to_list()


@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 9_000), st.integers(0, 900)), min_size=1, max_size=9))
def test_any_times_at_all_give_waits_that_add_up(raw):
    zero = frame(*((first, first + length) for first, _, length in raw))
    one = frame(*((second, second + length // 2) for _, second, length in raw))
    found = stragglers_of({0: zero, 1: one})

    assert (found.arrivals["wait_ns"] >= 0).all()
    assert (found.arrivals["transfer_ns"] >= 0).all()
    assert (found.arrivals["wait_ns"] + found.arrivals["transfer_ns"] == found.arrivals["duration_ns"]).all()
    assert found.num_clamped == found.arrivals["is_clamped"].sum()


def test_the_table_of_ranks_has_what_each_hid():
    table = rank_table({1: GpuTime(window_ns=10, idle_ns=4), 0: GpuTime(10, 9, 1, 5, 8, 0, 2, 0, 6)})

    assert table["rank"].to_list() == [0, 1]
    assert table["overlapped_communication_share"].to_list() == [0.75, None]
    assert table["idle_share"].to_list() == [0.1, 0.4]
    assert table["exposed_communication_share"].to_list() == [0.2, 0.0]
    assert rank_table({}).is_empty()


@pytest.fixture(scope="module")
def dlrm() -> tuple[Frames, dict[int, GpuTime]]:
    linked = [link(read_trace(path)) for path in sorted(DLRM.glob("*.json.gz"))]
    by_rank = {trace.trace.facts.rank or 0: trace for trace in linked}
    tables = {rank: collectives(trace) for rank, trace in by_rank.items()}
    return tables, {rank: gpu_time(trace.device) for rank, trace in by_rank.items()}


@needs_traces
def test_eight_real_ranks_of_one_machine_have_one_clock(dlrm):
    matched = match_collectives(dlrm[0])
    offsets = clock_alignment(matched)

    assert (matched.unlinked.num, matched.unlinked.num_all) == (0, 64)
    assert offsets["rank"].to_list() == list(range(8))
    assert offsets["offset_ns"].abs().max() <= 1_500  # recorded in microseconds
    assert offsets["uncertainty_ns"].to_list() == [0] + [2_000] * 7
    assert not offsets["is_contradicted"].any()


@needs_traces
def test_who_the_eight_real_ranks_wait_for(dlrm):
    found = stragglers_of(dlrm[0])

    assert found.calls["last_rank"].to_list() == [7, 7, 7, 7, 7, 5, 5, 4]
    assert found.calls["is_certain"].all() and not found.num_clamped
    assert round(found.wait_share, 3) == 0.965
    assert found.ranks["communication_ns"].to_list() == [dlrm[1][rank].communication_ns for rank in range(8)]


@needs_traces
def test_the_table_of_real_ranks_has_the_exact_figures(dlrm):
    exact = {Path(row["file"]).name: row for row in json.loads((PUBLIC / "exact_gpu_time.json").read_text())}
    table = rank_table(dlrm[1])

    for row, path in zip(table.to_dicts(), sorted(DLRM.glob("*.json.gz"))):
        assert row["communication_ns"] == round(exact[path.name]["comm_ms"] * 1e6)
        assert row["exposed_communication_ns"] == round(exact[path.name]["exposed_comm_ms"] * 1e6)
        assert round(100 * row["overlapped_communication_share"], 3) == exact[path.name]["overlap_pct"]


@needs_traces
@given(st.integers(-(10**15), 10**15), st.integers(1, 7))
def test_skew_put_into_real_ranks_is_found(dlrm, skew, rank):
    tables, _ = dlrm
    before = offsets_of(match_collectives(tables))[rank]
    found = offsets_of(match_collectives({**tables, rank: moved(tables[rank], skew)}))[rank]

    assert abs(found["offset_ns"] - skew) <= found["uncertainty_ns"]
    assert found["offset_ns"] - before["offset_ns"] == skew
    assert found["latest_ns"] - before["latest_ns"] == found["earliest_ns"] - before["earliest_ns"] == skew


@needs_traces
def test_skew_put_into_a_real_file_is_found_and_changes_nobody_elses_wait(dlrm, tmp_path):
    tables, _ = dlrm
    with gzip.open(sorted(DLRM.glob("*.json.gz"))[5], "rt", encoding="utf-8") as file:
        trace = json.load(file)
    for event in trace["traceEvents"]:
        if "ts" in event:
            event["ts"] += 7_654_321  # microseconds
    path = tmp_path / "rank5.json"
    path.write_text(json.dumps(trace))
    late = {**tables, 5: collectives(link(read_trace(path)))}

    offset = offsets_of(match_collectives(late))[5]
    assert abs(offset["offset_ns"] - 7_654_321_000) <= offset["uncertainty_ns"]
    assert_frame_equal(stragglers_of(late).arrivals, stragglers_of(tables).arrivals)
