"""Recompiles: from stretches of the host, with the guard that failed where a recording knows it; giving up too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from host_cases import case_of, steps

from handmade import MS, gpu_facts, sample, write_recording
from stepscope.errors import Unavailable
from stepscope.findings.rules.compiler import recompiles
from trace_builder import TraceBuilder

GUARD = "0/0: tensor 'x' size mismatch at index 1. expected 640, actual 648"


def planned(trace: TraceBuilder, at: float, length: int = 640) -> float:
    """An attention whose kernel is planned for 4 ms before it is launched."""
    number = len(trace.events)
    trace.op("aten::_cudnn_attention_forward", at, 4020, id=number, **{"Input Dims": [[8, 12, length, 64]]})
    trace.launch("attention", at + 4000, runs=(at + 4010, 1000), took=10, id=number)
    trace.call("cudaDeviceSynchronize", at + 4050, 970)
    return 5050


def report(**fields: Any) -> dict[str, Any]:
    return {
        "num_compiles": 3,
        "compile_seconds": 1.0,
        "recompiles": [{"frame": "f", "failed_guards": [GUARD]}],
        **fields,
    }


def recorded(folder: Path, compiles: list[int], compiler: dict[str, Any] | None) -> Path:
    """Clean steps of 10 ms, of 50 ms where something was compiled."""
    lines = [
        sample(step, num_compiles=count, host_ns={"forward": (50 if count else 10) * MS})
        for step, count in enumerate(compiles)
    ]
    return write_recording(folder, gpu_facts(), lines, compiler=compiler)


def test_planning_for_shapes_that_change():
    lengths = iter([640, 648])

    (finding,) = recompiles(case_of(steps(lambda trace, at: planned(trace, at, next(lengths)))))

    assert finding.saving_ns == (4_000_000 + 4_030_000) / 2  # the second begins at the end of the step before
    assert "[8, 12, 640, 64], [8, 12, 648, 64]" in finding.sentence and finding.confidence == "high"


def test_without_a_recording_nobody_knows_the_guard():
    (finding,) = recompiles(case_of(steps(planned)))

    assert "planned for again" in finding.sentence and finding.confidence == "medium"
    assert finding.fix.startswith("TORCH_LOGS=recompiles")


def test_the_guard_comes_from_the_recording(tmp_path):
    case = case_of(steps(planned), recorded(tmp_path / "run", [0, 0], report()))
    case.__dict__["clean_ns"] = None

    (finding,) = recompiles(case)

    assert GUARD in finding.sentence and "dynamic=True" in finding.fix
    assert finding.evidence[1].rows[0]["failed_guards"] == [GUARD]


def test_clean_steps_that_compiled_again(tmp_path):
    (finding,) = recompiles(case_of(None, recorded(tmp_path / "run", [0, 1, 0, 1, 0, 0, 0, 0], report())))

    assert finding.saving_ns == 2 * 40 * MS / 8
    assert finding.sentence.startswith("2 of 8 clean steps recompiled something and took 50.0 ms")


def test_once_is_first_call_cost(tmp_path):
    assert recompiles(case_of(None, recorded(tmp_path / "run", [1, 0, 0, 0], report()))) == []


def test_giving_up_is_told(tmp_path):
    given_up = report(recompile_limit_hits=[{"frame": "'forward' (model.py:3)", "count": 1}])

    (finding,) = recompiles(case_of(None, recorded(tmp_path / "run", [0, 0, 0], given_up)))

    assert finding.sentence.startswith("torch.compile reached its recompile limit for 'forward' (model.py:3)")
    assert finding.saving_ns is None


def test_without_trace_and_without_a_report_it_cannot_be_checked(tmp_path):
    with pytest.raises(Unavailable, match="no trace"):
        recompiles(case_of(None, recorded(tmp_path / "run", [0, 0], None)))
