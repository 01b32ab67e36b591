"""Waiting for data in a recording with a trace: who makes the batches, and whether the GPU waits in clean steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from host_cases import case_of, kernel, steps
from recorded_cases import GPU

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.document.findings import findings_part
from stepscope.findings.diagnose import diagnose
from stepscope.findings.op_lines import python_text
from stepscope.findings.rules.step_times import waiting_for_data
from stepscope.session.case import Case
from trace_builder import AUTOGRAD, TraceBuilder

LOADER = {"num_workers": 4, "prefetch_factor": 2, "pin_memory": True, "persistent_workers": False, "batch_size": 8}


def training(trace: TraceBuilder, at: float) -> float:
    """5 ms without an op; then 2 ms of a forward, 2 of a backward and 1 of an optimizer on the GPU."""
    begin, at = at, at + 5000
    kernel(trace, at, runs=at + 10, took=2000)
    trace.op("autograd::engine::evaluate_function: MmBackward0", at + 100, 50, AUTOGRAD, sequence=len(trace.events))
    trace.launch("gemm", at + 110, runs=(at + 2010, 2000), thread=AUTOGRAD)
    trace.annotation("Optimizer.step#AdamW.step", at + 200, 100)
    kernel(trace, at + 210, runs=at + 4010, took=1000, op="aten::_fused_adamw_")
    trace.call("cudaDeviceSynchronize", at + 400, 4620)
    return at + 5030 - begin


def recorded(folder: Path, waited_ms: float = 5, loader: dict[str, Any] | None = None, **facts: Any) -> Case:
    """Steps of 10 ms whose GPU waits so long before the forward."""
    device_ns = {"before_forward": int(waited_ms * MS), "forward": int((10 - waited_ms) * MS)}
    lines = [sample(i, host_ns={"before_forward": 5 * MS, "forward": 5 * MS}, device_ns=device_ns) for i in range(8)]
    facts |= {"loader": loader} if loader else {}
    found = cpu_facts(trace=None, environment=GPU, **facts)
    found["flags"] = {**found.get("flags", {}), "num_cores": 8}
    if not loader:
        found.pop("loader", None)
    return case_of(steps(training), write_recording(folder, found, lines))


def test_without_a_loader_workers_are_not_the_fix(tmp_path):
    lines = [{"phase": "other", "place": "train.py:31 sample", "num_samples": 9}]
    case = recorded(tmp_path, python={"num_samples": 9, "lines": lines})

    (finding,) = waiting_for_data(case)

    assert finding.fix.startswith("batch, pending = pending.result(), pool.submit(next_batch)")
    assert "train.py:31 takes longest" in finding.fix and "num_workers=7" not in finding.fix
    cards = findings_part(diagnose(case), "runs/mine").cards
    (card,) = (card for card in cards if card.id == "waiting_for_data")
    assert card.prove is not None and not card.prove.endswith("--fix waiting_for_data"), "it has no loader to change"


def test_with_a_loader_they_are(tmp_path):
    (finding,) = waiting_for_data(recorded(tmp_path, loader={**LOADER, "num_workers": 0}))

    assert "DataLoader(..., num_workers=7," in finding.fix and finding.is_provable


@pytest.mark.parametrize(("waited_ms", "saving_ms"), [(0.01, None), (2, 2), (8, 5)])
def test_a_wait_that_clean_steps_do_not_have(tmp_path, waited_ms, saving_ms):
    """A trace begins with an empty queue: its first step waits for what the host otherwise does ahead."""
    found = waiting_for_data(recorded(tmp_path, waited_ms, LOADER))

    assert [one.saving_ns for one in found] == ([pytest.approx(saving_ms * 1e6, rel=0.02)] if saving_ms else [])


def test_the_line_in_which_the_recorder_waits_is_not_named(tmp_path, monkeypatch):
    lines = [
        {"phase": "other", "place": "train.py:61 main", "num_samples": 12},
        {"phase": "other", "place": "train.py:31 sample", "num_samples": 5},
    ]
    case = recorded(tmp_path, python={"num_samples": 17, "lines": lines})
    assert "train.py:61 in main (71 %)" in python_text(case), "nothing says that it is the optimizer's"
    stepped = frozenset(["train.py:61 main"])
    monkeypatch.setattr("stepscope.findings.op_lines._optimizer_lines", lambda _: stepped)

    assert "main" not in python_text(case) and "train.py:31 in sample (100 %)" in python_text(case)
