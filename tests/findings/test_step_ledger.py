"""The ledger of a step adds up, findings claim no more than it holds, and nothing large is left unsaid."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from device_cases import FP32, Program
from host_cases import recorded
from hypothesis import HealthCheck, given, settings

from any_trace import any_trace
from parametrized import parametrized
from stepscope.analysis.time.ledger import LIMIT, LOSS, RATES, ROWS, UNKNOWN
from stepscope.cli.main import main
from stepscope.document.card import Card
from stepscope.errors import Unavailable
from stepscope.findings.diagnose import Diagnosis, diagnose
from stepscope.session import open_session
from trace_builder import PUBLIC, needs_traces

H200 = PUBLIC.parent / "h200"
FIELD = PUBLIC.parents[1] / "field"
GPU_TRACES = [*sorted(H200.glob("*.json.gz")), *sorted((FIELD / "traces").glob("*.json.gz")),
              *(sorted(path for path in (FIELD / "recordings").glob("*") if path.is_dir()))]  # fmt: skip
SHAPE = [8192, 3060]


@cache
def diagnosed(path: Path) -> Diagnosis:
    return diagnose(open_session(path, use_cache=False).case)


def holds(diagnosis: Diagnosis) -> None:
    """What must be true of any ledger and its findings."""
    ledger = diagnosis.ledger
    assert ledger is not None
    assert sum(ledger.parts.values()) == ledger.total_ns, "integers without a remainder"
    assert all(ns >= 0 for row, ns in ledger.parts.items() if row != "disagreement")
    assert set(ledger.parts) <= set(ROWS)
    for finding in diagnosis.findings:
        if finding.saving_ns is None:
            continue
        assert finding.saving_ns <= sum(finding.claims.values()) + 1 * len(finding.claims) + 1
        for row, ns in finding.claims.items():
            assert ns <= ledger.parts[row] / ledger.num_steps + 1, (finding.id, row)


QUICK = ("contiguous_copies", "compiled_with_prints", "resnet_layout", "types_embedding")


def paths(found: list[Path], quick: tuple[str, ...]) -> list:
    names = {path: path.name.partition(".")[0] for path in found}
    marks = {path: () if name in quick else pytest.mark.long for path, name in names.items()}
    return [pytest.param(path, id=name, marks=marks[path]) for path, name in names.items()]


@needs_traces
@parametrized("path", paths(GPU_TRACES, QUICK), quick=2)
def test_every_step_adds_up_and_little_of_it_is_unexplained(path):
    diagnosis = diagnosed(path)
    holds(diagnosis)
    busy_ns = diagnosis.ledger.events["ns"].sum()
    assert diagnosis.ledger.parts.get("unknown_work", 0) < 0.1 * busy_ns


@needs_traces
@pytest.mark.parametrize("path", paths(sorted(PUBLIC.glob("*.json.gz")), ()))
def test_every_public_trace_adds_up(path):
    case = open_session(path, use_cache=False).case
    try:
        ledger = case.ledger
    except Unavailable:
        assert not case.has_gpu_work
        return
    assert sum(ledger.parts.values()) == ledger.total_ns


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(builder=any_trace())
def test_any_trace_adds_up(builder, tmp_path):
    case = open_session(builder.write(tmp_path / "trace.json"), use_cache=False).case
    diagnosis = diagnose(case)
    if diagnosis.ledger is not None:
        holds(diagnosis)


@needs_traces
@pytest.mark.long
def test_compiled_steps_draw_no_false_finding():
    for path in (FIELD / "recordings" / "nanogpt_compiled", H200 / "llama_compiled.json.gz"):
        told = [finding.id for finding in diagnosed(path).findings if finding.id != "attention_mask"]
        assert told == [], path.name


@needs_traces
def test_no_one_waits_for_data_while_the_gpu_is_busy():
    for name in ("types_embedding", "resnet_layout"):
        assert "waiting_for_data" not in [finding.id for finding in diagnosed(FIELD / "recordings" / name).findings]


def test_a_slow_kernel_that_no_rule_knows_is_named():
    """A cumulative sum over rows, a hundred times as long as its bytes take."""
    program = Program()
    program.op("aten::mm", [[4096, 4096], [4096, 4096]], 200, FP32)
    program.op("aten::cumsum", [SHAPE, [], []], 9000, FP32)

    diagnosis = diagnose(program.case())

    unclaimed = [finding for finding in diagnosis.findings if finding.id == "unclaimed_time"]
    (finding,) = (finding for finding in unclaimed if "aten::cumsum" in finding.sentence)
    assert finding.saving_ns == pytest.approx(9_000_000, rel=0.05)
    assert finding.upper_bound and finding.confidence == "low"


def test_limit_and_losses_are_told_apart():
    program = Program()
    for _ in range(40):
        program.op("aten::mm", [[8192, 8192], [8192, 8192]], 20_000, "c10::BFloat16")

    ledger = diagnose(program.case()).ledger

    # 2 × 8192³ FLOPs at 989 TFLOP/s: 1.11 ms of 20 ms; a good kernel takes 1.85 ms.
    assert ledger.parts["products"] == pytest.approx(40 * 1_111_700, rel=0.01)
    assert ledger.parts["slow_products"] == pytest.approx(40 * 18_147_000, rel=0.01)
    assert ledger.per_step_ns(LIMIT, RATES, LOSS, UNKNOWN) == pytest.approx(ledger.step_ns)


@needs_traces
@pytest.mark.parametrize(
    ("name", "step"),
    [("types_embedding", "5.77 ms"), pytest.param("nanogpt_eager", "127 ms", marks=pytest.mark.long)],
)
def test_the_card_has_the_same_ledger(capsys, name, step):
    recording = FIELD / "recordings" / name
    ledger = diagnosed(recording).ledger

    card = Card.of(open_session(recording, use_cache=False), with_ledger=True)

    assert card.to_json()["ledger"] == ledger.to_json()
    assert main(["show", str(recording)]) == 0
    assert f"A step's {step}, down to what its work needs" in capsys.readouterr().out


def test_a_card_without_a_readable_trace_says_so(tmp_path):
    folder = recorded(tmp_path / "run", trace={"file": "trace/gone.json"})

    card = Card.of(open_session(folder), with_ledger=True)

    assert card.ledger is None
    assert [fact.value for fact in card.measurement if fact.title == "ledger"] == ["not computed"]
