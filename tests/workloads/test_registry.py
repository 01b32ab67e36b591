"""Workloads by name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from stepscope.errors import UsageError
from stepscope.workloads import registry
from stepscope.workloads.workload import Workload


def test_the_names_are_the_five_families_and_the_ten_ops():
    assert registry.MODELS == ("cs336", "megalodon", "hydra", "nano", "tsmoe")
    assert len(registry.OPS) == 10 and len(set(registry.names())) == 15


@pytest.mark.parametrize("name", registry.names())
def test_every_name_leads_to_its_workload(name):
    workload = registry.find(name)

    assert isinstance(workload, Workload) and workload.name == name
    knobs = {knob.name: knob for knob in workload.knobs()}
    for values in (*workload.presets.values(), workload.reference, workload.gate):
        assert values.keys() <= knobs.keys()
    assert all(knob.about for knob in knobs.values())
    for preset in workload.presets:
        workload.configure(preset)
    assert name not in registry.MODELS or {"batch", "checkpoint"} <= knobs.keys()
    assert name not in registry.MODELS or "tiny" in workload.presets


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("tsmo", "tsmoe"), ("Hydra", "hydra"), ("softmx", "softmax"), ("all-reduce", "all_reduce")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(UsageError, match=f"did you mean {nearest}?"):
        registry.find(name)


def test_a_name_like_nothing_is_answered_with_all():
    with pytest.raises(UsageError, match=r"one of: cs336, .*path/to/file\.py:build"):
        registry.find("zzzzzz")


def test_names_cost_no_torch():
    code = "import sys, stepscope.workloads.registry as r; r.names(); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_other_two_kinds_are_reached(tmp_path):
    (tmp_path / "mine.py").write_text("def build(size: int = 3):\n    'A step.'\n    return lambda: size\n")
    assert registry.find(f"{tmp_path}/mine.py:build").about == "A step."

    with pytest.raises(UsageError, match="not found"):
        registry.find(f"hf:{tmp_path}/config.json")
    assert importlib.util.find_spec("stepscope.workloads.huggingface")
