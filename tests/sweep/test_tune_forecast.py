"""Which points of a tuning are planned, and what the plan says of them, for a GPU that is not here."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from stepscope.planner.forecast import Forecaster
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

MIB = 1 << 20
WORKLOAD = find("cs336")
ENVIRONMENTS = {"h200": {"device_name": "NVIDIA H200"}, "other": {"device_name": "Somebody's GPU"}}


def point(**values):
    grid = Grid(WORKLOAD, {"device": "cuda"})
    (found,) = grid.points([{"preset": ["tiny"], **{name: [value] for name, value in values.items()}}])
    return found


def defaults(peak_bytes, environment="h200"):
    return {
        "status": "ok",
        "environment_hash": environment,
        "config": dict(point().config),
        "peak_reserved_bytes": peak_bytes,
    }


def test_what_is_over_the_budget_does_not_fit():
    forecaster = Forecaster(WORKLOAD, 100 * MIB, ENVIRONMENTS)

    small = forecaster(point(batch=4), defaults(60 * MIB))
    large = forecaster(point(batch=256), defaults(60 * MIB))

    assert small is not None and small.fits and small.reason is None
    # cuBLAS alone has 32 MiB of it.
    assert 32 * MIB < small.peak_bytes < 100 * MIB < large.peak_bytes
    assert large is not None and not large.fits
    assert large.reason.startswith("its plan needs ") and large.reason.endswith("100 MiB are available")


@pytest.mark.parametrize(
    ("values", "budget", "row"),
    [
        ({"batch": 4}, None, defaults(60 * MIB)),  # 139 GiB are far away
        ({"batch": 4}, 1000 * MIB, defaults(60 * MIB)),
        ({"compile": "default"}, 10 * MIB, defaults(60 * MIB)),
        ({"batch": 256}, 10 * MIB, None),
    ],
)
def test_what_needs_no_plan_gets_none(values, budget, row):
    assert Forecaster(WORKLOAD, budget, ENVIRONMENTS)(point(**values), row) is None


def test_a_device_that_no_table_knows_is_said():
    forecaster = Forecaster(WORKLOAD, 10 * MIB, ENVIRONMENTS)

    assert forecaster(point(), defaults(60 * MIB, "other")) is None
    assert list(forecaster.notes) == [
        "Somebody's GPU cannot be planned: points that do not fit are found by running them"
    ]


def test_plans_that_cannot_be_made_are_said_and_given_up():
    forecaster = Forecaster(WORKLOAD, 10 * MIB, ENVIRONMENTS)

    found = [forecaster(point(d_model=65 + i), defaults(60 * MIB)) for i in range(3)]

    assert found == [None] * 3 and len(forecaster.notes) == 2
    assert all(note.startswith("not planned: ") for note in forecaster.notes)
