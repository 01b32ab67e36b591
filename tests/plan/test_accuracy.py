"""Predicted peaks against measured ones: on this CPU, now, and on an H200, as `stepscope bench` wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parametrized import parametrized

torch = pytest.importorskip("torch")

from step_bytes import measured_bytes

from stepscope.analysis.memory.account import account
from stepscope.devices.limits import find_device
from stepscope.planner.emulation import dataless as ghosts
from stepscope.planner.prediction import Planner
from stepscope.recorder.clock import BACKWARD, OPTIMIZER
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.sweep import prepare
from stepscope.sweep.grid import Grid, Point
from stepscope.workloads.registry import find

H200 = [json.loads(line) for line in Path(__file__).with_name("h200.jsonl").read_text().splitlines()]
CPU = [
    ("cs336", {"attention": "naive"}),
    ("cs336", {"attention": "builtin", "checkpoint": 1}),
    ("cs336", {"attention": "sdpa"}),
    ("megalodon", {"ema": "fft"}),
    ("megalodon", {"ema": "scan"}),
    ("hydra", {"loss": "full"}),
    ("hydra", {"loss": "fused"}),
    ("nano", {"attention": "dense"}),
    ("nano", {"attention": "sparse_mask"}),
    ("tsmoe", {"dispatch": "capacity"}),
    ("tsmoe", {"dispatch": "one_hot"}),
]
ONE_EACH = [CPU[2], CPU[4], CPU[6], CPU[8], CPU[9]]
# Slow on a CPU without the instructions for it.
IN_BFLOAT16 = [CPU[2], CPU[3], CPU[6], CPU[9]]


def point_of(workload, preset=None, **values):
    grid = Grid(find(workload), {"device": "cpu"})
    words = [f"{name}={value}" for name, value in values.items()]
    return grid.points([grid.words([f"preset={preset}", *words])], False)[0]


@parametrized(
    ("workload", "values", "dtype", "mode"),
    [
        pytest.param(
            workload,
            values,
            dtype,
            mode,
            id="-".join((workload, *map(str, values.values()), dtype, mode)),
            marks=() if dtype == "fp32" and (workload, values) in ONE_EACH else pytest.mark.long,
        )
        for workload, values in CPU
        for dtype, mode in (("fp32", "step"), ("autocast_bf16", "step"))
        if dtype == "fp32" or (workload, values) in IN_BFLOAT16
    ],
    quick=3,
)
@pytest.mark.filterwarnings("ignore:mkldnn_bf16_gemm")
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_on_a_cpu(workload, values, dtype, mode):
    point = point_of(workload, "tiny", **values, dtype=dtype, mode=mode)

    predicted = Planner(find(workload)).predict(point, None)

    assert predicted.peak_allocated_bytes == pytest.approx(measured_bytes(point), rel=0.01)
    assert sum(predicted.live_at_peak.values()) == predicted.peak_allocated_bytes
    assert sum(predicted.live_at_peak_by_module.values()) == predicted.peak_allocated_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    "row", H200, ids=[f"{r['workload']}-{r['preset']}-{i}-{r['run']['mode']}" for i, r in enumerate(H200)]
)
def test_on_an_h200(row):
    point = Point(**{name: row[name] for name in ("workload", "preset", "config", "run")}, hash="")

    predicted = Planner(find(row["workload"])).predict(point, find_device("NVIDIA H200"))

    assert predicted.peak_allocated_bytes == pytest.approx(row["peak_allocated_bytes"], rel=0.002)
    assert predicted.peak_reserved_bytes == pytest.approx(row["peak_reserved_bytes"], rel=0.03)
    assert predicted.fits == "fits"
    assert sum(predicted.live_at_peak.values()) == predicted.peak_allocated_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "values"),
    [
        ("cs336", {"attention": "naive"}),
        ("cs336", {"attention": "sdpa"}),
        ("megalodon", {}),
        ("hydra", {}),
        ("nano", {}),
        ("tsmoe", {}),
    ],
)
def test_accounting_and_prediction_name_the_same_owners(workload, values, monkeypatch):
    """A real step on a CPU, followed as a recording follows it, against the plan of the same point.

    While a dispatch mode looks on, autograd adds no gradient in place: the recording's step, and for once the plan's.
    """
    monkeypatch.setattr(ghosts, "_is_engine_sum", lambda args: False)
    point = point_of(workload, "tiny", **values)
    family = find(workload)
    built = prepare.build(family, family.config(**point.config), 0, "cpu")
    one_pass = prepare.Pass(built.module, prepare.make_batch(built, 0, "cpu"), point.run)
    one_pass()
    phase = []
    ledger = Ledger([built.module], [one_pass.optimizer], lambda: phase[-1] if phase else None)

    def on_phase(name):
        if name == BACKWARD:
            ledger.backward_begins()
        elif name == OPTIMIZER:
            ledger.note_gradients(one_pass.optimizer)
        phase.append(name)

    ledger.start()
    ledger.note_inputs((), one_pass.batch)
    one_pass(on_phase)
    ledger.note_parameter_gradients()
    ledger.stop()
    measured = {part.name: part.bytes for part in account(ledger.memory()).live_at_peak.by_owner}

    predicted = Planner(family).predict(point, None).live_at_peak

    assert measured.keys() - {"buffer"} == predicted.keys() - {"buffer"}
    for owner, num_bytes in predicted.items():
        assert num_bytes == pytest.approx(measured[owner], rel=0.01, abs=2048), owner
