"""All rules over a case: order, what is clean, what cannot be checked, what is suppressed; any trace at all."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from polars.exceptions import PanicException
from recorded_cases import recorded

import stepscope.findings
from any_trace import any_trace
from call_count import num_calls
from parametrized import parametrized
from stepscope.document.findings import diagnosis_document
from stepscope.errors import UsageError
from stepscope.findings.diagnose import Diagnosis, Unchecked, all_rules, diagnose
from stepscope.findings.finding import Evidence, Finding, saving_texts
from stepscope.findings.rule import RULES as REGISTERED
from stepscope.findings.unclaimed import UNCLAIMED
from stepscope.render.page.page import page_of
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.case import Case
from trace_builder import PUBLIC, TraceBuilder, needs_traces

DOCS = Path(__file__).parents[2] / "docs" / "findings"
RULES = {rule.id: rule for rule in all_rules()}


def case_of(builder: TraceBuilder, tmp_path: Path) -> Case:
    return open_session(builder.write(tmp_path / "trace.json"), use_cache=False).case


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_question_and_a_page(name):
    assert RULES[name].question.endswith("?")
    page = DOCS / f"{name}.md"
    assert page.is_file()
    assert page.read_text(encoding="utf-8").startswith(f"# `{name}`")


def test_there_is_no_page_without_a_rule():
    assert {page.stem for page in DOCS.glob("*.md")} - {"README"} == set(RULES)


def test_rules_read_analyses_and_no_files():
    """What is in a trace or a recording comes to them through the case alone."""
    for path in (Path(stepscope.findings.__file__).parent / "rules").glob("*.py"):
        assert "stepscope.trace" not in path.read_text(encoding="utf-8"), path


def test_the_gpu_is_busy_for_a_share_of_the_clean_step(tmp_path):
    """As on the card, and not of the traced step, which is longer."""
    trace = TraceBuilder().step(1, 0, 16_000).op("aten::mm", 0, 20, id=1).launch("gemm", 5, runs=(30, 8000), id=1)
    trace.call("cudaDeviceSynchronize", 60, 15_900)
    case = case_of(trace, tmp_path)
    assert diagnose(case).gpu_busy_share == pytest.approx(0.5, abs=0.01)

    clean = recorded(tmp_path / "run", [10.0] * 8, is_gpu=True)
    assert diagnose(replace(clean, _trace=case._trace)).gpu_busy_share == pytest.approx(0.8)


def test_every_rule_is_accounted_for_once(tmp_path):
    trace = TraceBuilder().step(1, 0, 400)
    trace.op("aten::mm", 0, 20, id=1).launch("gemm", 5, runs=(30, 100), id=1)
    diagnosis = diagnose(case_of(trace, tmp_path))

    asked = [*(f.id for f in diagnosis.findings), *diagnosis.clean, *(u.id for u in diagnosis.unchecked)]
    assert sorted(set(asked)) == sorted(RULES)
    assert not set(diagnosis.clean) & {one.id for one in diagnosis.unchecked}
    assert all(one.reason for one in diagnosis.unchecked)


def test_a_rule_can_be_suppressed(tmp_path):
    trace = TraceBuilder().step(1, 0, 400).op("aten::mm", 0, 20)

    diagnosis = diagnose(case_of(trace, tmp_path), {"launch_bound"})

    assert diagnosis.suppressed == ("launch_bound",)
    assert "launch_bound" not in [*diagnosis.clean, *(one.id for one in diagnosis.unchecked)]
    with pytest.raises(UsageError, match="Unknown rule 'lunch_bound'"):
        diagnose(case_of(trace, tmp_path), {"lunch_bound"})


def test_a_rate_has_its_unit():
    rows = [
        {"bus_bandwidth_bytes_per_s": 12_345_678_901, "best_bus_bandwidth_bytes_per_s": None, "flops_per_s": 4e9,
         "name": "n" * 99}
    ]  # fmt: skip
    told = Finding("It is slow.", "do less", (Evidence("collectives", rows),), "it is not", id="communication")
    diagnosis = Diagnosis(1e6, False, (told,), (), (), (), "It is bound by the GPU.", 0.9, ())

    text = terminal_text(diagnosis_document(diagnosis), 200)

    assert "12.3 GB/s" in text and "4.00 GFLOP/s" in text and "n" * 99 in text
    assert "bus bandwidth" in text and "FLOP/s" in text


def test_a_narrow_terminal_cuts_names_and_keeps_figures():
    rows = [{"op": "aten::mm", "kernel": "k" * 99, "shapes": "s" * 99, "num_calls": 7, "duration_ns": 1_234_567}]
    told = Finding("It is slow.", "do less", (Evidence("products", rows),), "it is not", saving_ns=1e5)
    told = replace(told, saving_bytes=1 << 30, upper_bound=True, id="full_logits")
    diagnosis = Diagnosis(1e6, False, (told,), (), (), (), "It is bound by the GPU.", 0.9, ())

    for width in (70, 80, 120):
        lines = terminal_text(diagnosis_document(diagnosis), width).splitlines()
        assert max(map(len, lines)) <= width
        assert any("7" in line.split() and "1.23 ms" in line for line in lines), lines


def test_nothing_found_where_nothing_could_look_is_no_health():
    unchecked = tuple(Unchecked(name, "there is no trace") for name in ("a", "b", "c"))
    blind = Diagnosis(None, False, (), ("d",), unchecked, (), "What binds it is not known.", None, ())
    idle = replace(blind, gpu_busy_share=0.25)

    shown = " ".join(terminal_text(diagnosis_document(blind), 200).split())
    assert "These checks found no problem." in shown and "1 check passed, 3 could not run." in shown
    assert "No problems found" not in shown  # unknown without a ledger
    assert "No problems found" not in terminal_text(diagnosis_document(idle), 200)
    assert "idle for 75.0 %" in terminal_text(diagnosis_document(idle), 200)


def test_a_folder_of_traces_says_which_one_is_told(tmp_path):
    for name in ("one.json", "other.json"):
        TraceBuilder().step(1, 0, 400).op("aten::mm", 0, 20, id=1).launch("gemm", 5, runs=(30, 100), id=1).write(
            tmp_path / name
        )

    told = diagnose(open_session(tmp_path, use_cache=False).case).warnings

    assert any("of 2 traces this is rank 0, one.json" in note for note in told)
    assert any("nor their names say their ranks" in note for note in told)
    assert not diagnose(open_session(tmp_path / "one.json", use_cache=False).case).warnings


def test_a_saving_in_time_and_memory_is_said_with_its_share():
    told = Finding("It is slow.", "do less", (), "it is not", saving_ns=2.5e5, saving_bytes=1 << 30, upper_bound=True)

    assert saving_texts(told, 1e6) == ("up to 250 µs", "per step (25.0 %) and up to 1.00 GiB of the peak")
    assert saving_texts(replace(told, saving_ns=None), 1e6) == ("up to 1.00 GiB", "of the peak")
    assert saving_texts(replace(told, saving_ns=None, saving_bytes=None), 1e6) == ("unknown", "")


@pytest.mark.long
def test_streams_and_threads_are_not_looked_at_one_by_one(tmp_path):
    def traced(num: int) -> Case:
        """A thread for each stream, whose kernels the GPU waits for."""
        trace = TraceBuilder()
        for number in range(4 * num):
            at, thread = 10.0 * number, 100 + number % num
            trace.op("aten::mm", at, 8, thread, id=number + 1)
            trace.launch("gemm", at + 2, runs=(at + 3, 4), thread=thread, stream=number % num, id=number + 1)
        return case_of(trace.step(1, 0, 20 * num).step(2, 20 * num, 20 * num), tmp_path)

    few, many = traced(50), traced(500)
    diagnose(traced(10))

    # Ten times the kernels, each with a few calls; one pass a thread would be thousands of calls a thread.
    assert num_calls(lambda: diagnose(many)) < 4 * num_calls(lambda: diagnose(few))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(any_trace())
def test_no_trace_is_too_odd(tmp_path, builder):
    diagnosis = diagnose(case_of(builder, tmp_path))

    json.dumps(diagnosis.to_json(), allow_nan=False)
    terminal_text(diagnosis_document(diagnosis))
    for finding in diagnosis.findings:
        assert finding.saving_ns is None or finding.saving_ns >= 0


@pytest.mark.long
@needs_traces
@pytest.mark.parametrize(
    "path", sorted(PUBLIC.rglob("*.json.gz")), ids=lambda path: path.name.removesuffix(".json.gz")
)
def test_other_peoples_traces(path):
    diagnosis = diagnose(open_session(path, use_cache=False).case)

    json.dumps(diagnosis.to_json(), allow_nan=False)
    for finding in diagnosis.findings:
        assert finding.sentence and finding.fix and finding.evidence and finding.falsified_by
        assert finding.saving_ns is None or finding.saving_ns <= (diagnosis.step_ns or 0)
        if finding.id in ("launch_bound", "synchronization"):  # what a host makes the GPU wait for is idle time
            assert finding.saving_ns <= (1 - diagnosis.gpu_busy_share) * diagnosis.step_ns + 1
        for start, end in finding.places:
            assert start < end


@pytest.mark.parametrize(
    "facts", [{"memory": [1]}, {"memory": {"peak_reserved_bytes": 1, "num_allocator_retries": "x"}},
              {"counters": {"other_processes": 3}}],
)  # fmt: skip
def test_a_damaged_field_of_a_recording_is_left_out_and_said(tmp_path, facts):
    found = diagnose(recorded(tmp_path, [10.0] * 8, is_gpu=True, **facts))
    (name,) = facts
    assert any(warning.startswith(f"recording.json: {name}") for warning in found.warnings)
    assert not [one for one in found.unchecked if "check failed" in one.reason]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> tuple[Case, Diagnosis]:
    trace = TraceBuilder().step(1, 0, 400)
    trace.op("aten::mm", 0, 20, id=1).launch("gemm", 5, runs=(30, 100), id=1)
    case = case_of(trace, tmp_path_factory.mktemp("healthy"))
    return case, diagnose(case)


ERRORS = cycle([KeyError("x"), RecursionError("too deep"), PanicException("x")])


@parametrized(("name", "error"), list(zip(RULES, ERRORS)), quick=25)
def test_a_rule_that_fails_costs_only_itself(name, error, healthy, monkeypatch):
    case, whole = healthy

    def fails(*_: object) -> list[Finding]:
        """Does it fail?"""
        raise error

    if name == UNCLAIMED:
        monkeypatch.setattr("stepscope.findings.diagnose.unclaimed_time", fails)
    else:
        monkeypatch.setitem(REGISTERED, name, fails)
    found = diagnose(case)

    (failed,) = [one for one in found.unchecked if one.id == name]
    assert failed.reason.startswith(f"This check failed ({type(error).__name__}")
    assert [one for one in found.unchecked if one.id != name] == [one for one in whole.unchecked if one.id != name]
    assert found.clean == tuple(id for id in whole.clean if id != name)
    others = (name, UNCLAIMED)  # what a failed rule does not claim is unclaimed
    assert [one for one in found.findings if one.id not in others] == [
        one for one in whole.findings if one.id not in others
    ]


def test_a_failed_rule_and_its_error_are_told_everywhere(healthy, monkeypatch):
    def fails(_: Case) -> list[Finding]:
        """Does it fail?"""
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(REGISTERED, "launch_bound", fails)
    case, whole = healthy
    found = diagnose(case)
    said = "This check failed (ZeroDivisionError: division by zero)"
    document = diagnosis_document(found)

    assert said in " ".join(terminal_text(document).split()) and said in page_of(document)
    assert {"id": "launch_bound", "reason": f"{said}. The others are not affected."} in found.to_json()["unchecked"]
    assert f"{len(whole.unchecked) + 1} could not run" in terminal_text(document)
