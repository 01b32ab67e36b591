"""A step recorded on an H200 whose graph breaks before each of 24 layers, and the same compiled as one graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.findings.diagnose import diagnose
from stepscope.session import open_session

TRACES = Path(__file__).parents[1] / "traces"


def diagnosed(name):
    return diagnose(open_session(TRACES / f"{name}.json.gz", use_cache=False).case)


def test_graph_breaks_within_a_loop_cost_what_was_measured():
    truth = json.loads((TRACES / "truth.json").read_text())["graph_breaks"]
    diagnosis = diagnosed("graph_breaks.slow")

    assert "graph_breaks" in [finding.id for finding in diagnosis.findings[:2]]
    found = next(finding for finding in diagnosis.findings if finding.id == "graph_breaks")
    assert found.saving_ns / 1e6 == pytest.approx(truth["slow_ms"] - truth["fixed_ms"], rel=0.35)
    assert "24 compiled regions" in found.sentence


def test_one_graph_is_left_with_launches_that_the_host_is_late_with():
    diagnosis = diagnosed("graph_breaks.fixed")

    # 2.8 ms of GPU in a clean step of 36 ms.
    assert {finding.id for finding in diagnosis.findings} == {"launch_bound"}
