"""Recordings on a CPU: threads, bfloat16, short ops, padding, and workers judged by the DataLoader's own figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from device_cases import BF16
from host_cases import case_of
from recorded_cases import recorded, run_script

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.document.findings import findings_part
from stepscope.document.whole_run import WholeRun
from stepscope.errors import Unavailable
from stepscope.findings.diagnose import diagnose
from stepscope.findings.rules.cpu import cpu_float32, cpu_threads, outside_passes, small_cpu_ops
from stepscope.findings.rules.machine import other_process
from stepscope.findings.rules.padding import padding
from stepscope.findings.rules.step_times import between_steps, host_work_between_steps, waiting_for_data
from stepscope.findings.rules.wide_and_narrow import float64_work
from stepscope.session import open_session
from stepscope.session.case import Case
from trace_builder import TraceBuilder

FLAGS = {"num_threads": 8, "num_cores": 8, "cpu.bf16": False}


@pytest.mark.parametrize(("threads", "cores", "wanted"), [(16, 8, 8), (1, 8, 8), (8, 8, None), (4, 8, None)])
def test_threads_that_do_not_fit_the_cores(tmp_path, threads, cores, wanted):
    found = cpu_threads(recorded(tmp_path, [10.0] * 20, flags={"num_threads": threads, "num_cores": cores}))

    assert [one.fix.split("  #")[0] for one in found] == ([f"torch.set_num_threads({wanted})"] if wanted else [])
    assert all(one.saving_ns is None for one in found), "what it saves is not known"


def test_a_gpu_s_recording_has_other_rules(tmp_path):
    with pytest.raises(Unavailable, match="about training on a CPU"):
        cpu_threads(recorded(tmp_path, [10.0] * 20, is_gpu=True, flags=FLAGS))


def test_a_recording_without_switches_cannot_be_checked(tmp_path):
    with pytest.raises(Unavailable, match="Record it again"):
        cpu_threads(recorded(tmp_path, [10.0] * 20))


POSITIONS = {"num_positions": 1000, "num_used": 180, "num_to_longest": 200}


def test_padding_costs_what_its_positions_cost(tmp_path):
    (finding,) = padding(recorded(tmp_path, [10.0] * 20, padding=POSITIONS))

    assert finding.saving_ns == pytest.approx(0.8 * 10_000_000)
    assert "82 % of the 1,000 positions" in finding.sentence


def test_texts_of_different_length_are_batched_by_length(tmp_path):
    counted = {"num_positions": 1000, "num_used": 500, "num_to_longest": 1000}

    (finding,) = padding(recorded(tmp_path, [10.0] * 20, padding=counted))

    assert finding.saving_ns == pytest.approx(0.5 * 10_000_000)
    assert "similar length" in finding.fix


@pytest.mark.parametrize("counts", [(0, 0, 0), (1000, 950, 1000)])
def test_little_padding_is_usual(tmp_path, counts):
    assert padding(recorded(tmp_path, [10.0] * 20, padding=dict(zip(POSITIONS, counts)))) == []


def test_a_recording_without_values_cannot_be_checked(tmp_path):
    with pytest.raises(Unavailable, match="Record it again"):
        padding(recorded(tmp_path, [10.0] * 20))


@pytest.mark.parametrize(
    ("loader", "cores", "advice"),
    [
        ({"num_workers": 0}, 8, "num_workers=7"),
        ({"num_workers": 0}, 1, "store them"),
        ({"num_workers": 2}, 16, "num_workers=4"),  # half of each step is a wait: twice as many
        ({"num_workers": 6}, 8, "dataset cheaper"),
        (None, None, "num_workers=4"),
    ],
)
def test_workers_are_judged_by_the_loader_s_own_figures(tmp_path, loader, cores, advice):
    facts = {"loader": loader, "flags": {"num_cores": cores, "num_threads": 1}} if loader else {}
    case = recorded(tmp_path, [20.0] * 20, where="data", **facts)

    (finding,) = waiting_for_data(case)

    assert advice in finding.fix


@pytest.mark.parametrize(("num_workers", "advice"), [(0, "num_workers=7"), (2, "keep the workers")])
def test_only_workers_can_be_kept_from_one_epoch_to_the_next(tmp_path, num_workers, advice):
    """Every fifth step waits 30 ms for the first batch of an epoch."""
    loader = {"num_workers": num_workers}
    steps = [sample(step) for step in range(20)]
    for step in steps[::5]:
        step["host_ns"] = {**step["host_ns"], "loader_start": 30 * MS}
        step.update(wall_ns=40 * MS, num_times={"loader_start": 1})
    write_recording(tmp_path, cpu_facts(trace=None, loader=loader, flags={"num_cores": 8}), steps)

    (finding,) = between_steps(open_session(tmp_path, use_cache=False).case)

    assert finding.saving_ns == 6 * MS
    assert advice in finding.fix


def traced(
    folder: Path, name: str, took: float, num: int, dtype: str = "float", ms=10.0, dims=(8, 8), where="other", **flags
) -> Case:
    """A recording of steps on a CPU, 10 ms of each in the forward, with a trace of two steps of 1 ms and so many ops
    in each."""
    recorded(folder, [ms] * 20, flags={**FLAGS, **flags}, where=where)
    trace = TraceBuilder()
    for step in (0, 1):
        trace.step(step + 1, 1000 * step, 1000).annotation("stepscope.phase/between", 1000 * step, 995)
        for number in range(num):
            shapes = {"Input Dims": [[8, 8], dims], "Input type": ["float", dtype]}
            trace.op(name, 1000 * step + (took + 1) * number, took, id=100 * step + number + 1, **shapes)
    return case_of(trace, folder)


def test_short_ops_cost_their_share(tmp_path):
    (finding,) = small_cpu_ops(traced(tmp_path, "aten::add", 10, 40))

    in_them_ns = 3 * 8 * 8 * 4 / 4  # bytes, at the least rate of 4 GB/s
    assert finding.saving_ns == pytest.approx(0.4 * 10_000_000 - 40 * in_them_ns)
    assert "40 ops per step take 4.00 ms per step" in finding.sentence


@pytest.mark.parametrize(("took", "num"), [(10, 20), (110, 8)])
def test_few_or_long_ops_are_fine(tmp_path, took, num):
    assert small_cpu_ops(traced(tmp_path, "aten::add", took, num)) == []


@pytest.mark.parametrize(("num", "says"), [(30, "100 % of that is in ops, mostly aten::clone"), (6, "Python code")])
def test_what_the_script_does_outside_of_its_passes_is_told(tmp_path, num, says):
    case = traced(tmp_path, "aten::clone", 25, num, ms=20.0)
    (finding,) = outside_passes(case)

    assert finding.saving_ns == 10 * MS == case.ledger.parts["cpu_outside"] / case.ledger.num_steps
    assert sum(case.ledger.parts.values()) == case.ledger.total_ns
    assert says in finding.sentence
    (largest,) = case.ledger.to_json()["largest_ops"]
    assert (largest["name"], largest["phase"], largest["num_calls"]) == ("aten::clone", "other", num)
    assert largest["time_ns"] == num * 25_000 and largest["share"] == pytest.approx(num * 0.025)


def test_little_outside_of_the_passes_is_usual(tmp_path):
    assert outside_passes(traced(tmp_path, "aten::clone", 25, 4, ms=10.5)) == []


def test_host_work_between_steps_has_its_own_row_with_its_ops(tmp_path):
    case = traced(tmp_path, "aten::one_hot", 25, 30, ms=20.0, where="before_forward")
    (finding,) = host_work_between_steps(case)

    assert "75 % of it is in ops, mostly aten::one_hot" in finding.sentence
    assert finding.saving_ns == 10 * MS == case.ledger.parts["cpu_between"] / case.ledger.num_steps
    assert "cpu_data" not in case.ledger.parts and waiting_for_data(case) == []


@pytest.mark.parametrize(("num_workers", "named"), [(0, True), (2, False)])
def test_a_loader_without_workers_spends_its_time_in_ops_of_this_process(tmp_path, num_workers, named):
    case = traced(tmp_path, "aten::reflection_pad2d", 25, 30, ms=20.0, where="data")
    case.recording.facts["loader"] = {"num_workers": num_workers}
    (finding,) = waiting_for_data(case)

    assert ("no workers and spends most of it in aten::reflection_pad2d" in finding.sentence) == named


@pytest.mark.parametrize(("dims", "saved"), [((8, 8), 0.8 * 0.4), ((), None)])
def test_float64_on_a_cpu_costs_its_bytes(tmp_path, dims, saved):
    found = float64_work(traced(tmp_path, "aten::mul", 50, 16, "double", dims=dims))

    assert [one.saving_ns for one in found] == ([pytest.approx(saved * 10 * MS, rel=0.02)] if saved else [])


@pytest.mark.parametrize(("share", "num"), [(0.3, 1), (0.02, 0), (None, 0)])
def test_training_that_waits_for_a_core(tmp_path, share, num):
    case = traced(tmp_path, "aten::add", 100, 8)
    block = {"step": 0, "num_steps": 20, "window": "free", "start_ns": 1, "t": 1e9, "wall_ns": 200 * MS,
             "median_ns": 10 * MS, "max_ns": 10 * MS, "max_step": 0, "host_ns": {"forward": 200 * MS}}  # fmt: skip
    lines = [{"began": 1e9, "start_ns": 1, "pid": 1, "host": "h"}, {**block, "core_share": 0.5}]
    if share is not None:
        lines[1]["core_wait_share"] = share
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if share is None:
        with pytest.raises(Unavailable, match="waited for a CPU core"):
            other_process(case)
        return

    found = other_process(case)

    assert [one.saving_ns for one in found] == [pytest.approx(share * 10 * MS)] * num
    on_the_card = [fact.title for fact in WholeRun.of(open_session(tmp_path, use_cache=False)).facts()]
    assert on_the_card.count("CPU cores") == num


def test_products_in_float32_on_a_cpu_with_bfloat16(tmp_path):
    (finding,) = cpu_float32(traced(tmp_path, "aten::mm", 50, 12, **{"cpu.bf16": True}))

    assert finding.saving_ns == pytest.approx(0.6 / 2 * 10_000_000)


def test_emulated_bfloat16_is_no_gain(tmp_path):
    assert cpu_float32(traced(tmp_path / "emulated", "aten::mm", 50, 12)) == []
    assert cpu_float32(traced(tmp_path / "low", "aten::mm", 50, 12, BF16, **{"cpu.bf16": True})) == []


SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Embedding(50, 4), *[nn.Tanh() for _ in range(40)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ids = torch.zeros(4, 32, dtype=torch.long)
ids[:, :8] = torch.arange(1, 9)
for _ in range(40):
    model(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_run_on_a_cpu_records_its_switches_and_its_padding(forks, tmp_path):
    case = run_script(forks, tmp_path, SCRIPT, "--warmup", "2", "--clean", "5", "--exit-after")

    facts = case.recording.facts
    assert facts["padding"] == {"num_positions": 128, "num_used": 4 * 9, "num_to_longest": 4 * 9}, "one may be an end"
    assert facts["flags"]["num_cores"] >= 1 and facts["flags"]["deterministic_algorithms"] is False
    assert "loader" not in facts
    diagnosis = diagnose(case)
    assert "padding" in {one.id for one in diagnosis.findings}
    part = findings_part(diagnosis)
    assert re.search(r"could not run, \d\d are about GPUs\.", part.summary)
    shown = {name for _, names in part.unchecked for name in names}
    assert "stragglers" in shown and "launch_bound" not in shown
