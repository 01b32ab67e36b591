"""Memory that steps leave behind: written by hand, in a trace, and of a script that keeps its losses."""

from __future__ import annotations

import pytest
from recorded_cases import TRAINING, recorded, run_script, tensor

from stepscope.analysis.run.series import Run, Track
from stepscope.errors import Unavailable
from stepscope.findings.rules.memory import memory_growth
from stepscope.session import open_session
from trace_builder import TraceBuilder

MODEL = tensor(8000, owner="parameter")


def window(*allocations, left_alive=()):
    return {"device": "cpu", "allocations": [MODEL, *allocations], "left_alive": list(left_alive)}


def test_what_a_step_leaves_and_earlier_ones_have_left(tmp_path):
    held = [tensor(400, caller="train.py:7 outputs") for _ in range(5)]
    memory = window(*held, tensor(400, born=0, op="aten.mm"))

    (finding,) = memory_growth(recorded(tmp_path, [10.0] * 8, window=memory))

    assert finding.saving_bytes == 5 * 400
    assert finding.saving_ns is None
    assert "leaves 400 B" in finding.sentence
    assert "aten.mm of shape [100], held by train.py:7 outputs" in finding.sentence
    assert finding.evidence[0].rows[0]["num_held"] == 5


@pytest.mark.parametrize(("per_step", "num_findings"), [(400, 1), (250, 1), (150, 0), (0, 0)])
def test_the_run_rises_by_what_a_step_leaves_or_it_is_replaced_later(tmp_path, per_step, num_findings):
    held = [tensor(400, caller="train.py:7 outputs") for _ in range(5)]
    case = recorded(tmp_path, [10.0] * 8, window=window(*held, tensor(400, born=0, op="aten.mm")))
    steps = list(range(0, 400, 10))
    levels = [9000 + per_step * step + 50_000 * (step % 50 == 0) for step in steps]  # and evaluations
    case.__dict__["run"] = Run(blocks=(), tracks={"allocated_bytes": Track(steps, steps, levels)})

    assert len(memory_growth(case)) == num_findings


@pytest.mark.parametrize(
    "allocations",
    [
        pytest.param([tensor(400, born=0)], id="the last step's own variable"),
        pytest.param([*[tensor(400)] * 5, tensor(400, died=1), tensor(400, born=0)], id="one goes as one comes"),
        pytest.param([*[tensor(400)] * 5, tensor(400, born=0, died=1)], id="a temporary like others"),
        pytest.param([*[tensor(8)] * 5, tensor(8, born=0)], id="numbers, which never fill anything"),
    ],
)
def test_what_a_healthy_step_leaves(tmp_path, allocations):
    assert memory_growth(recorded(tmp_path, [10.0] * 8, window=window(*allocations))) == []


def test_a_graph_that_is_kept_but_does_not_grow(tmp_path):
    graph = {"bytes": 2000, "num_tensors": 1, "op": "MeanBackward0", "module": None, "frame": "train.py:9 out"}
    memory = window(tensor(2000, owner="left_alive"), left_alive=[graph])

    (finding,) = memory_growth(recorded(tmp_path, [10.0] * 8, window=memory))

    assert finding.saving_bytes == 2000
    assert "held by train.py:9 out" in finding.sentence
    assert "of the 9.77 KiB peak" in finding.sentence


def test_without_memory_nothing_is_said(tmp_path):
    with pytest.raises(Unavailable):
        memory_growth(recorded(tmp_path, [10.0] * 8))


def traced(kept_bytes, freed_bytes=4096):
    """Three steps; each allocates something that it frees, and something that it keeps."""
    trace = TraceBuilder()
    total = 1 << 20
    for step in range(3):
        begin = 100 * step
        trace.step(step, begin, 100).op("aten::mm", begin + 10, 20)
        for at, num_bytes, address in ((12, freed_bytes, 7), (14, kept_bytes, 100 + step), (30, -freed_bytes, 7)):
            if num_bytes:
                total += num_bytes
                args = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": num_bytes,
                        "Total Allocated": total, "Total Reserved": 1 << 30}  # fmt: skip
                trace.raw(
                    ph="i", cat="cpu_instant_event", name="[memory]", pid=1, tid=1, ts=begin + at, s="t", args=args
                )
    return trace


def test_a_trace_whose_level_rises_from_step_to_step(tmp_path):
    (finding,) = memory_growth(open_session(traced(1 << 15).write(tmp_path / "trace.json"), use_cache=False).case)

    assert finding.saving_bytes == 1 << 15
    assert "leaves 32.0 KiB of memory behind, mostly from aten::mm" in finding.sentence
    assert "3 steps in a row" in finding.sentence


def test_a_trace_whose_level_stays(tmp_path):
    assert memory_growth(open_session(traced(0).write(tmp_path / "trace.json"), use_cache=False).case) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("backward", "also", "is_told"),
    [("retain_graph=True", "kept.append(loss)", True), ("", "kept.append(loss.item())", False)],
)
def test_a_script_that_keeps_its_losses(forks, tmp_path, backward, also, is_told):
    script = TRAINING.format(num_steps=14, backward=backward, also=also)
    case = run_script(forks, tmp_path, script, "--warmup", "2", "--clean", "8", "--trace", "0")

    found = memory_growth(case)

    assert bool(found) == is_told
    if is_told:
        assert "train.py:13 kept" in found[0].sentence
        # Each graph keeps its input of the second layer, and its input, output and gradient's: 32 × 256 and 32 × 64.
        assert found[0].saving_bytes > 8 * 32 * 256 * 4
