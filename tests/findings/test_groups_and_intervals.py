"""Findings with one fix count a loss once, come before others again, and have an interval around what is expected."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from device_cases import Program

from stepscope.analysis.time.replay import Change
from stepscope.document.findings import findings_part
from stepscope.findings.diagnose import diagnose
from stepscope.findings.finding import Finding, saving_texts
from stepscope.findings.groups import Group, merged, ranked
from stepscope.findings.saving_interval import FACTORS, GPU, HOST, fitted


def finding(id: str, saving_ns: float, group: str | None = None) -> Finding:
    return Finding(id=id, sentence="", fix="", evidence=(), falsified_by="", saving_ns=saving_ns, group=group)


def stretches(*rows: tuple[int, int, float]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "factor": pl.Float64}, orient="row")


def test_changes_become_one_that_shrinks_each_moment_once():
    first = Change({1: 5.0}, frozenset({2, 3}), stretches((0, 10, 0.0), (20, 30, 0.5)))
    second = Change({3: 7.0, 1: 4.0}, frozenset({4}), stretches((5, 25, 0.2)), frozenset({9}))

    both = merged([first, second])

    assert both.duration_ns == {1: 4.0, 3: 7.0}
    assert both.gone == {2, 4}, "what one of them keeps in a shorter form stays"
    assert both.unwaited == {9}
    assert both.host.rows() == [(0, 5, 0.0), (5, 10, 0.0), (10, 20, 0.2), (20, 25, 0.2), (25, 30, 0.5)]


def test_each_fix_comes_once_before_any_comes_again():
    found = [finding("a", 9, "compile"), finding("b", 8, "compile"), finding("c", 5), finding("rest", 50)]
    groups = [Group("compile", "torch.compile", ("a", "b"), 12, 9, 20)]

    assert [one.id for one in ranked(found, groups, last=["rest"])] == ["a", "c", "b", "rest"]


def test_a_group_ranks_by_what_it_saves_in_total():
    found = [finding("c", 10), finding("a", 9, "compile"), finding("b", 8, "compile")]
    groups = [Group("compile", "torch.compile", ("a", "b"), 12, 9, 20)]

    assert [one.id for one in ranked(found, groups, last=[])] == ["a", "c", "b"]


def test_what_frees_most_of_the_peak_ranks_by_that():
    found = [finding("a", 10), finding("b", 0), finding("c", 0)]
    found = [replace(one, saving_bytes=num) for one, num in zip(found, (None, 80, 140))]

    def ids(peak: int) -> list[str]:
        return [one.id for one in ranked(found, [], "", average_ns=100.0, peak_bytes=peak)]

    assert ids(100) == ["b", "a", "c"], "30 of 100 above a half; 140 of 100 is not this process's"
    assert ids(140) == ["c", "a", "b"], "80 of 140 is 7 of 100 above a half"


def late_host() -> Program:
    """Elementwise ops of 5 µs on a host that takes 100 µs for each: compiled they are one kernel."""
    program = Program(pace=100)
    for name in ("neg", "exp") * 10:
        program.op(f"aten::{name}", [[64, 64], []], 5)
    return program


def test_what_torch_compile_saves_is_counted_once():
    diagnosis = diagnose(late_host().case())

    (group,) = diagnosis.groups
    savings = [one.saving_ns for one in diagnosis.findings if one.id in group.findings]
    assert set(group.findings) == {"launch_bound", "unfused_elementwise"}
    assert max(savings) <= group.saving_ns < sum(savings)
    assert group.saving_ns <= diagnosis.step_ns
    cards = {card.id: card for card in findings_part(diagnosis).cards}
    assert group.findings[1] in cards[group.findings[0]].shared
    assert "do not add" in cards[group.findings[1]].shared
    assert diagnosis.to_json()["groups"][0]["findings"] == list(group.findings)


def test_an_interval_is_as_wide_as_the_kind_of_step_asks_for():
    host = diagnose(late_host().case())
    program = Program()
    for name in ("neg", "exp") * 10:
        program.op(f"aten::{name}", [[4096, 4096], []], 500)
    gpu = diagnose(program.case())

    for diagnosis, (low, _) in ((host, FACTORS[HOST]), (gpu, FACTORS[GPU])):
        one = diagnosis.findings[0]
        assert one.saving_low_ns == pytest.approx(low * one.saving_ns)
        assert one.saving_ns <= one.saving_high_ns <= diagnosis.step_ns
    assert saving_texts(gpu.findings[0], gpu.step_ns)[0].count(" to ") == 1


def test_factors_leave_out_a_tenth_of_the_cases():
    assert fitted([1.0] * 4) == (0.0, float("inf")), "four cases say nothing"
    low, high = fitted([0.1, *[1.0] * 18, 9.0])
    assert 0.1 < low <= 1.0 <= high < 9.0
