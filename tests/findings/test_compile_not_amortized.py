"""Compiling that a run cannot win back is told, and only where the whole run is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from host_cases import case_of, recorded

from handmade import cpu_facts
from stepscope.errors import Unavailable
from stepscope.findings.rules.compiler import compile_not_amortized
from trace_builder import TraceBuilder


def compiling(folder: Path, seconds: float, **facts: Any) -> Path:
    """12 steps of 10 ms, and so many seconds of compiling."""
    return recorded(folder, {"num_compiles": 2, "compile_seconds": seconds}, **facts)


def test_seconds_for_a_run_of_a_tenth_of_one(tmp_path):
    (finding,) = compile_not_amortized(case_of(None, compiling(tmp_path / "run", 30.0)))

    for figure in ("took 30 s", "12 steps", "0.1 s (10.0 ms each)", "after 3,000 steps"):
        assert figure in finding.sentence
    assert finding.saving_ns is None and finding.confidence == "high"


def test_a_run_long_enough_is_clean(tmp_path):
    assert compile_not_amortized(case_of(None, compiling(tmp_path / "run", 0.1))) == []


def test_a_run_that_was_cut_short_cannot_say(tmp_path):
    command = {**cpu_facts()["command"], "exit_after": True}
    for name, facts in (("cut", {"command": command}), ("killed", {"status": "interrupted"})):
        with pytest.raises(Unavailable, match="cut short"):
            compile_not_amortized(case_of(None, compiling(tmp_path / name, 30.0, **facts)))


def test_a_run_that_compiled_nothing_is_clean(tmp_path):
    assert compile_not_amortized(case_of(None, recorded(tmp_path / "run"))) == []


def test_a_trace_alone_cannot_say():
    with pytest.raises(Unavailable, match="a recording"):
        compile_not_amortized(case_of(TraceBuilder().step(1, 0, 100)))
