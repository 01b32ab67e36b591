"""Where a finding says to look, there it is: in planted traces, and exactly in small ones."""

from __future__ import annotations

from functools import cache

import polars as pl
import pytest
from host_cases import case_of, recorded, steps
from test_pageable_copies import batch_first
from test_planted_causes import H200, PLANTED, needs_h200
from test_synchronization import read_in_the_middle

from stepscope.analysis.structure.intervals import intersect, length_ns, spans, union
from stepscope.findings.diagnose import Diagnosis, diagnose
from stepscope.findings.rules.waits import pageable_copies, synchronization
from stepscope.session import open_session
from stepscope.session.case import Case
from stepscope.session.places import MOST_PLACES, places_of_stretches, places_of_work, places_without_work

MS = 1_000_000
OF_WORK = {
    "fp32_matmul": pl.col("class").is_in(["gemm", "convolution"]),
    "misaligned_gemm": pl.col("class").is_in(["gemm", "convolution"]),
    "attention_mask": pl.col("class").cast(pl.String).str.starts_with("attention"),
    "attention_backend": pl.col("root_op").cast(pl.String) == "aten::scaled_dot_product_attention",
    "needless_copies": pl.col("class").is_in(["copy_cast", "memset_memcpy"]),
    "unfused_optimizer": pl.col("phase") == "optimizer",
    "autocast_cost": pl.col("class").is_in(["copy_cast", "memset_memcpy"]),
}
"""What the GPU does there: that, and nothing else."""
IDLE = {"waiting_for_data": 0.01, "recompiles": 0.05, "launch_bound": 0.5}
"""How much of the time it may be at work there."""


@cache
def diagnosed(name: str) -> tuple[Case, Diagnosis]:
    case = open_session(H200 / f"{name}.json.gz", use_cache=False).case
    return case, diagnose(case)


@pytest.mark.long
@needs_h200
@pytest.mark.parametrize("name", PLANTED)
def test_every_finding_of_a_planted_trace_has_places_of_its_kind(name):
    case, diagnosis = diagnosed(name)
    work = case.all_work
    first = min(case.linked.host["start_ns"].min(), work["start_ns"].min())
    last = max(case.linked.host["end_ns"].max(), (work["start_ns"] + work["duration_ns"]).max())
    assert {finding.id for finding in diagnosis.findings[:2]} & (OF_WORK.keys() | IDLE.keys())

    for finding in diagnosis.findings:
        assert 0 < len(finding.places) <= MOST_PLACES, finding.id
        assert all(first <= start < end <= last for start, end in finding.places), finding.id
        there = pl.DataFrame(finding.places, schema=["start_ns", "end_ns"], orient="row")
        busy_ns = length_ns(intersect(there, spans(work)))
        if finding.id in OF_WORK:
            meant_ns = length_ns(intersect(there, spans(work.filter(OF_WORK[finding.id]))))
            assert meant_ns > 0.97 * busy_ns > 0, finding.id
        elif finding.id in IDLE:
            assert busy_ns < IDLE[finding.id] * length_ns(union(there)), finding.id


@needs_h200
def test_the_longest_of_the_loaders_waits_comes_first():
    _, diagnosis = diagnosed("data_stall")

    assert [60 * MS < end - start < 62 * MS for start, end in diagnosis.findings[0].places] == [True, True]
    assert diagnosis.to_json()["findings"][0]["places"][0] == dict(
        zip(("start_ns", "end_ns"), diagnosis.findings[0].places[0])
    )


@pytest.mark.long
@needs_h200
def test_the_optimizers_kernels_are_one_stretch_of_a_step():
    case, diagnosis = diagnosed("loop_optimizer")
    (finding,) = (one for one in diagnosis.findings if one.id == "unfused_optimizer")
    start, end = finding.places[0]

    assert len(finding.places) <= 2 * case.num_steps
    inside = case.work.filter(pl.col("start_ns") >= start, pl.col("start_ns") < end)
    assert inside.height > 1000  # kernels
    assert set(inside["phase"]) == {"optimizer"}


def test_waits_and_copies_are_shown_where_they_are():
    (copied,) = pageable_copies(case_of(steps(batch_first)))
    (waited,) = synchronization(case_of(steps(read_in_the_middle)))

    assert copied.places == ((10_000, 5_010_000), (8_160_000, 13_160_000))
    # From the call to the next work: the host stands, then the GPU.
    assert waited.places == ((1_010_000, 5_010_000), (10_110_000, 14_110_000))


def test_a_recording_alone_has_no_place(tmp_path):

    found = diagnose(case_of(None, recorded(tmp_path))).findings
    assert all(finding.places == () for finding in found)


WORK = pl.DataFrame(
    {
        "start_ns": [0, 10, 30, 50, 3 * MS, 3 * MS + 9],
        "duration_ns": [10, 15, 10, 10, 8, 5],
        "device": [0] * 6,
        "stream": [7] * 6,
        "step": [1, 1, 1, 1, 1, 2],
    }
)


def test_neighbors_are_one_stretch_and_other_work_divides():
    is_meant = pl.Series([True, True, False, True, True, True])

    # The first two with nothing between; then one behind other work; one after a long pause; one of the next step.
    assert places_of_work(WORK, is_meant) == ((0, 25), (50, 60), (3 * MS, 3 * MS + 8), (3 * MS + 9, 3 * MS + 14))


def test_work_of_another_stream_does_not_divide():
    beside = WORK.with_columns(pl.Series("stream", [7, 7, 8, 7, 7, 7]))

    assert places_of_work(beside, pl.Series([True, True, False, True, False, False])) == ((0, 60),)


def test_stretches_that_overlap_are_one_and_no_more_than_twenty():
    many = pl.DataFrame({"start_ns": [*range(0, 1000, 10), 5], "end_ns": [*range(2, 1000, 10), 21]})
    places = places_of_stretches(many)

    assert places[0] == (5, 22) and len(places) == MOST_PLACES


def test_short_work_between_long_gaps_divides_nothing():
    idle = pl.DataFrame({"start_ns": [0, 120, 900], "end_ns": [100, 200, 950]})

    assert places_without_work(idle) == ((0, 200), (900, 950))


def test_nothing_is_nowhere():
    none = pl.DataFrame(schema={"start_ns": pl.Int64, "end_ns": pl.Int64})

    assert places_of_stretches(none) == places_without_work(none) == ()
    assert places_of_work(WORK, pl.Series([False] * 6)) == ()
