"""Ops on a CPU by line: results that no update uses, that never change, that grow, and loops of equal calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_cases import case_of
from recorded_cases import recorded, run_script

from handmade import MS
from stepscope.errors import ABOUT_CPUS, Unavailable
from stepscope.findings.diagnose import diagnose
from stepscope.findings.rules.cpu import outside_passes
from stepscope.findings.rules.op_results import (
    constant_work,
    discarded_gradients,
    growing_work,
    independent_calls,
    mostly_zeros,
    work_beside_training,
)
from stepscope.session.case import Case
from trace_builder import TraceBuilder

FLAGS = {"num_threads": 1, "num_cores": 8, "cpu.bf16": False}
RULES = (constant_work, discarded_gradients, growing_work, independent_calls, mostly_zeros, work_beside_training)
STEP_US = 10_000
WEIGHT, DATA, MADE = range(3)
STORAGES: list[dict[str, Any]] = [
    {"owner": owner, "born": None if index < MADE else index, "died": died, "module": None, "shape": [index],
     "dtype": "float32", "bytes": 4, "device": "cpu"}
    for index, (owner, died) in enumerate([("parameter", None), ("other", None), *[("temporary", 99)] * 40])
]  # fmt: skip
Op = dict[str, Any]


def an_op(name: str, reads: list[int], writes: list[int], took: int = 1000, **more: Any) -> Op:
    """An op of the log and of both traced steps, in microseconds; `dims` are those of a step, by its number."""
    fields = {
        "phase": "forward",
        "line": "train.py:7 step",
        "caller": None,
        "dims": lambda step: [[256, 256]],
        "size": 0,
        "zeros": 0.0,
    }
    return {"name": name, "reads": reads, "writes": writes, "took": took, **fields, **more}


def of(folder: Path, *ops: Op, unchanged: tuple[int, ...] = (), pause: int = 0, around: tuple[str, ...] = ()) -> Case:
    """A recording on a CPU of two traced steps of 10 ms with these ops, and a log of the third. Only the trace shows
    the ops `around` them all."""
    recorded(folder, [10.0] * 20, flags=FLAGS)
    trace = TraceBuilder()
    for step in (0, 1):
        at = STEP_US * step
        trace.step(step + 1, at, STEP_US)
        if around:
            took = sum(one["took"] + pause for one in ops)
            trace.annotation(f"stepscope.phase/{ops[0]['phase']}", at, took)
        for number, name in enumerate(around):
            shapes = {"Input Dims": [[256, 256]], "Input type": ["float"]}
            trace.op(name, at, took - 50 * number, id=len(trace.events) + 1, **shapes)
        for one in ops:
            dims = one["dims"](step)
            if not around:
                trace.annotation(f"stepscope.phase/{one['phase']}", at, one["took"])
            shapes = {"Input Dims": dims, "Input type": ["float"] * len(dims)}
            trace.op(one["name"].replace(".", "::"), at, one["took"], id=len(trace.events) + 1, **shapes)
            at += one["took"] + pause
    case = case_of(trace, folder)
    kinds = [
        {"op": one["name"], "phase": one["phase"], "place": one["line"], "caller": one["caller"], "is_random": False}
        for one in ops
    ]
    calls = [
        {"kind": number, **{key: one[key] for key in ("reads", "writes", "size")}} for number, one in enumerate(ops)
    ]
    zeros = [
        {"call": number, "share": one["zeros"], "storage": one["reads"][0]}
        for number, one in enumerate(ops)
        if one["zeros"]
    ]
    log = {"kinds": kinds, "calls": calls, "zeros": zeros, "unchanged": list(unchanged)}
    case.__dict__["allocations"] = {"allocations": STORAGES, "ops": log}
    return case


TRAINED = an_op("aten.mul", [DATA], [WEIGHT], 1000)


def test_a_gradient_that_no_update_uses(tmp_path):
    case = of(tmp_path, TRAINED, an_op("aten.mm", [DATA], [MADE], 3000, phase="backward", line="train.py:9 step"))

    (finding,) = discarded_gradients(case)

    assert finding.saving_ns == pytest.approx(3 * MS)
    assert "1 op of the backward pass" in finding.sentence and "train.py:9 in step (3.00 ms: mm)" in finding.sentence
    assert "train.py:9 led to" in finding.fix


def test_a_gradient_of_a_model_that_is_called_twice(tmp_path):
    unused = an_op(
        "aten.mm", [DATA], [MADE], 3000, phase="backward", line="gan.py:43 forward", caller="gan.py:115 step"
    )

    (finding,) = discarded_gradients(of(tmp_path, TRAINED, unused))

    assert finding.sentence.endswith(
        "gan.py:43 in forward (3.00 ms: mm); the call of the model is at gan.py:115 in step."
    )
    assert "gan.py:115 led to" in finding.fix


def test_work_that_no_update_uses(tmp_path):
    (finding,) = work_beside_training(of(tmp_path, TRAINED, an_op("aten.histc", [DATA], [MADE], 2000)))

    assert finding.saving_ns == pytest.approx(2 * MS) and "at most Python code reads them" in finding.sentence


def test_what_an_action_is_drawn_from_is_for_training(tmp_path):
    chances = an_op("aten.mm", [DATA], [MADE], 3000)
    drawn = an_op("aten.multinomial", [MADE], [MADE + 1])

    assert work_beside_training(of(tmp_path, TRAINED, chances, drawn)) == []


def test_a_result_that_never_changes(tmp_path):
    mask = an_op("aten.tril", [DATA], [MADE], 2000)
    used = an_op("aten.mul", [MADE], [WEIGHT])

    (finding,) = constant_work(of(tmp_path, mask, used, unchanged=(DATA,)))

    assert finding.saving_ns == pytest.approx(2 * MS) and "train.py:7 in step" in finding.sentence
    assert constant_work(of(tmp_path, mask, used)) == [], "new data in every step"


def test_an_op_around_new_data_is_not_constant(tmp_path):
    """batch_norm: its first op makes an empty tensor, the second one normalizes new data."""
    norm = an_op("aten.native_batch_norm", [DATA], [WEIGHT], 3000)
    around = ("aten::batch_norm", "aten::_batch_norm_impl_index")
    for first, saving_ns in (
        (an_op("aten.empty", [], [-1], 100), None),
        (an_op("aten.tril", [DATA], [MADE], 1000), 1 * MS),  # not the time of what is next to it
    ):
        case = of(tmp_path / first["name"], first, norm, pause=200, around=around, unchanged=(DATA,))
        assert [one.saving_ns for one in constant_work(case)] == ([pytest.approx(saving_ns)] if saving_ns else [])


def history(first: int, more: int, size: int) -> Op:
    return an_op("aten.cat", [DATA], [WEIGHT], 1000, dims=lambda step: [[[first + more * step], [more]]], size=size)


def test_an_input_that_grows_with_every_step(tmp_path):
    (finding,) = growing_work(of(tmp_path, history(100, 10, 130), TRAINED))

    assert finding.saving_ns == pytest.approx(1 * MS)
    assert "8 % more than in the step before, at step 2" in finding.sentence, "10 of 120 elements"
    assert "2.67 ms at step 22" in finding.sentence, "a twelfth more with each of 20 steps"
    assert growing_work(of(tmp_path, history(100, 10, 127), TRAINED)) == [], "lengths that differ"
    assert growing_work(of(tmp_path, history(100, 0, 100), TRAINED)) == []


def test_a_loop_that_makes_a_tensor_longer(tmp_path):
    pieces = [
        an_op("aten.cat", [DATA], [WEIGHT], 100, dims=lambda _, n=n: [[[256, n], [256, 1]]]) for n in range(1, 21)
    ]
    (finding,) = growing_work(of(tmp_path, *pieces))

    assert finding.saving_ns == pytest.approx(2 * MS * (1 - 2 / 21), rel=0.01)
    assert "20 calls per step" in finding.sentence


def test_a_product_with_zeros_and_what_makes_them(tmp_path):
    dims = {"dims": lambda step: [[640, 4000], [4000, 64]]}
    made = an_op("aten._to_copy", [DATA], [MADE], 1000)
    beside = an_op("aten.relu", [DATA], [MADE + 1], 1000)  # on the same line, but for something else
    case = of(tmp_path, made, beside, an_op("aten.mm", [MADE, WEIGHT], [WEIGHT], 4000, zeros=0.99, **dims))

    (finding,) = mostly_zeros(case)

    assert finding.saving_ns == pytest.approx(0.99 * (1 + 4) * MS, rel=0.01)
    assert mostly_zeros(of(tmp_path, made, an_op("aten.mm", [MADE], [WEIGHT], 4000, zeros=0.91, **dims))) == []


@pytest.mark.parametrize(("is_chain", "num"), [(False, 1), (True, 0)])
def test_calls_that_do_not_need_one_another(tmp_path, is_chain, num):
    reads = (lambda n: [MADE + n]) if is_chain else (lambda n: [DATA])
    heads = [an_op("aten.tanh", reads(n), [MADE + n + 1], 200, dims=lambda step: [[8, 8]]) for n in range(20)]

    found = independent_calls(
        of(tmp_path, *heads, an_op("aten.mul", [MADE + 20], [WEIGHT], line="train.py:8"), pause=100)
    )

    assert len(found) == num
    if num:
        # 20 calls of 200 µs with 100 µs after each become one.
        assert found[0].saving_ns == pytest.approx(0.95 * (20 * 200 + 19 * 100) * 1000, rel=0.02)
        assert "20 times per forward" in found[0].sentence


def test_a_loop_that_only_takes_memory_is_nothing_to_report(tmp_path):
    taken = [an_op("aten.empty", [], [MADE + n], 200, dims=lambda step: [[8, 8]]) for n in range(20)]

    assert independent_calls(of(tmp_path, *taken, TRAINED, pause=100)) == []


def test_what_no_rule_explains_has_its_line(tmp_path):
    slow = an_op("aten.sort", [DATA], [WEIGHT], 6000, line="train.py:31 rank", dims=lambda step: [[64, 64]])
    found = diagnose(of(tmp_path, TRAINED, slow)).findings

    assert any(one.id == "unclaimed_time" and "train.py:31 in rank (6.00 ms: sort)" in one.sentence for one in found)


def test_only_recordings_with_a_log_are_judged(tmp_path):
    recorded(tmp_path / "old", [10.0] * 20, flags=FLAGS)
    trace = TraceBuilder()
    trace.step(1, 0, STEP_US).op("aten::mul", 0, 100)
    with_trace = case_of(trace, tmp_path / "old")
    with_trace.__dict__["allocations"] = {"allocations": STORAGES}
    on_gpu = recorded(tmp_path / "gpu", [10.0] * 20, is_gpu=True)
    for rule in RULES:
        with pytest.raises(Unavailable, match="Record it again"):
            rule(with_trace)
        with pytest.raises(Unavailable, match=f"{ABOUT_CPUS}|has no trace"):
            rule(on_gpu)
        with pytest.raises(Unavailable, match="takes a recording"):
            rule(case_of(trace))


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)
net, head = nn.Linear(256, 256), nn.Linear(256, 4)
optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.01)
table = torch.randn(1000, 64)
def prior():
    return torch.cdist(table, table).mean()
for step in range(14):
    x = torch.randn(1024, 256)
    with torch.no_grad():
        report = torch.randn(60_000).sort().values.mean()
    scale = prior()
    wasted = net(x).square().mean()
    wasted.backward()
    optimizer.zero_grad()
    loss = (head(net(x)) * scale).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def line_of(text: str) -> str:
    return f"train.py:{next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if text in line)}"


def test_a_real_script_and_its_lines(forks, tmp_path):
    case = run_script(forks, tmp_path, SCRIPT, "--warmup", "2", "--clean", "3")
    rules: dict[str, Callable[[Case], Any]] = {
        "torch.cdist": constant_work, "wasted = net(x)": discarded_gradients, ".sort()": work_beside_training,
    }  # fmt: skip
    for text, rule in rules.items():
        (finding,) = rule(case)
        places = [row["place"].split()[0] for row in finding.evidence[0].rows]
        assert line_of(text) in places, finding.sentence


def test_a_saving_on_a_cpu_has_an_interval_unless_it_is_an_upper_bound(tmp_path):
    wasted = an_op("aten.mm", [DATA], [MADE], 2000, phase="backward")
    found = diagnose(of(tmp_path, TRAINED, wasted)).findings

    (discarded,) = (one for one in found if one.id == "discarded_gradients")
    assert discarded.saving_low_ns == pytest.approx(0.8 * discarded.saving_ns)
    assert discarded.saving_ns <= discarded.saving_high_ns <= 2.4 * discarded.saving_ns
    assert all(one.saving_low_ns is None for one in found if one.upper_bound)


def test_work_outside_of_the_passes_has_its_line(tmp_path):
    logs = an_op("aten.histc", [DATA], [MADE], 4000, phase="other", line="train.py:40 log")
    case = of(tmp_path, TRAINED, logs)
    case.__dict__["summary"] = recorded(tmp_path / "same", [14.0] * 20, flags=FLAGS, where="other").summary

    (finding,) = outside_passes(case)

    assert "Its ops are at train.py:40 in log" in finding.sentence
