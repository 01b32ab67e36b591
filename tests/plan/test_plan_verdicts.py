"""Verdicts: what a device really has, programs that grow, optimizers that never step, and what is traced once."""

from __future__ import annotations

import dataclasses

import pytest

from parametrized import parametrized

torch = pytest.importorskip("torch")

from stepscope.devices.limits import find_device, known_devices
from stepscope.errors import UsageError
from stepscope.planner import prediction
from stepscope.planner.hardware import CONTEXT_BYTES, usable_bytes
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

GIB = 1 << 30
PROGRAM = """
import torch
from torch import nn

def model_and_optimizer():
    model = nn.Linear(64, 64, bias=False)
    return model, torch.optim.AdamW(model.parameters())

def plain(batch: int = 8):
    model, optimizer = model_and_optimizer()

    def step():
        print("a call")
        model(torch.randn(batch, 64, device=model.weight.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

def keeps(num_bytes: int = 1 << 22, every: int = 1):
    model, optimizer = model_and_optimizer()
    kept, calls = [], []

    def step():
        calls.append(None)
        model(torch.randn(8, 64, device=model.weight.device)).sum().backward()
        if len(calls) % every == 0:
            kept.append(torch.empty(num_bytes, dtype=torch.uint8, device=model.weight.device))
        optimizer.step()
        optimizer.zero_grad()

    return step

def differs():
    model, optimizer = model_and_optimizer()
    calls = []

    def step():
        calls.append(None)
        model(torch.randn(8, 64, device=model.weight.device)).sum().backward()
        torch.empty(len(calls) << 20, dtype=torch.uint8, device=model.weight.device)
        optimizer.step()
        optimizer.zero_grad()

    return step

def adds_up(every: int = 1):
    model, optimizer = model_and_optimizer()
    calls = []

    def step():
        calls.append(None)
        model(torch.randn(8, 64, device=model.weight.device)).sum().backward()
        if len(calls) % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step

def rarely(every: int = 4):
    model, optimizer = model_and_optimizer()
    other, second = model_and_optimizer()
    calls = []

    def step():
        calls.append(None)
        x = torch.randn(8, 64, device=model.weight.device)
        (model(x).sum() + other(x).sum()).backward()
        optimizer.step()
        if len(calls) % every == 0:
            second.step()

    return step

def weightless():
    return nn.ReLU(), lambda: torch.randn(8, 64)
"""
# What PyTorch says of them, by people who have them, in GiB; nvidia-smi says up to 0.6 more.
VISIBLE = {
    "NVIDIA L4": 22.05,
    "NVIDIA L40S": 44.4,
    "Tesla T4": 14.6,
    "NVIDIA A10G": 22.06,
    "NVIDIA A100-SXM4-40GB": 39.4,
    "NVIDIA A100-SXM4-80GB": 79.15,
    "NVIDIA H100 80GB HBM3": 79.1,
    "NVIDIA H200": 139.8,
    "NVIDIA B200": 178.35,
    "NVIDIA GeForce RTX 4090": 23.55,
    "Tesla V100-SXM2-16GB": 15.77,
}


@pytest.fixture
def program(tmp_path):
    (tmp_path / "programs.py").write_text(PROGRAM)

    def planner_and_point(function, **values):
        workload = find(f"{tmp_path}/programs.py:{function}")
        grid = Grid(workload, {"device": "cpu"})
        (point,) = grid.points([grid.words(f"{name}={value}" for name, value in values.items())])
        return Planner(workload), point

    return planner_and_point


@pytest.fixture
def plan(program):
    def predict(function, device="NVIDIA H100 80GB HBM3", **values):
        planner, point = program(function, **values)
        return planner.predict(point, find_device(device) if isinstance(device, str) else device)

    return predict


@pytest.mark.parametrize("name", VISIBLE)
def test_a_process_cannot_see_all_of_a_device(name):
    device = find_device(name)

    assert device.visible_bytes == pytest.approx(VISIBLE[name] * GIB, rel=0.003)
    assert usable_bytes(device) == (device.visible_bytes - CONTEXT_BYTES,) * 2


def test_what_is_not_known_is_a_range_that_holds_every_device_that_is():
    shares = []
    for device in known_devices():
        if device.visible_bytes is None:
            least, most = usable_bytes(device)
            assert 0.85 * device.memory_bytes < least < most < device.memory_bytes
        else:
            shares.append(device.visible_bytes / device.memory_bytes)
    assert 0.90 < min(shares) < max(shares) < 0.992


@parametrized(
    ("share", "verdict"),
    [(None, "too close to call"), (0.9, "does not fit"), (1.1, "fits"), (1.01, "too close to call")],
    quick=2,
)
def test_a_verdict_holds_for_all_that_the_device_may_have(plan, share, verdict):
    """A device that has so much of what the program needs, or of which that is unknown."""
    device = find_device("NVIDIA H200")
    needed = plan("plain").peak_reserved_bytes
    visible = None if share is None else int(share * needed) + CONTEXT_BYTES
    nominal = int((needed + CONTEXT_BYTES) / 0.95)
    found = plan("plain", device=dataclasses.replace(device, memory_bytes=nominal, visible_bytes=visible))

    assert (found.fits, found.peak_reserved_bytes) == (verdict, needed)
    assert found.usable_bytes == (visible or int(0.9 * nominal)) - CONTEXT_BYTES


def test_a_program_that_settles(plan):
    found = plan("plain")

    assert (found.fits, found.growth_bytes_per_step) == ("fits", 0)
    assert found.settles_at_step is not None and found.unmodelled == ()


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", None])
def test_a_program_that_grows_never_fits(plan, device):
    found = plan("keeps", device=device)

    assert found.fits == (None if device is None else "grows")
    assert (found.settles_at_step, found.growth_bytes_per_step) == (None, 1 << 22)
    assert found.peak_step > 2
    assert sum(found.live_at_peak.values()) == found.peak_allocated_bytes
    kept = found.live_at_peak["temporary"] + found.live_at_peak["activation"]
    assert kept >= (found.peak_step - 1) << 22


def test_a_program_that_grows_out_of_the_device_at_once_does_not_fit(plan):
    found = plan("keeps", num_bytes=50 * GIB)

    assert (found.fits, found.growth_bytes_per_step) == ("does not fit", 50 * GIB)


def test_a_list_of_losses_is_no_matter_for_a_verdict_and_is_told(plan):
    found = plan("keeps", num_bytes=4)

    assert (found.fits, found.growth_bytes_per_step, found.settles_at_step) == ("fits", 512, None)


def test_a_step_that_is_not_like_the_one_before_is_told(plan):
    found = plan("differs")

    assert any("16 steps" in note and "do not repeat" in note for note in found.unmodelled)
    assert found.live_at_peak["temporary"] >= 16 << 20


def test_what_grows_in_every_second_step_grows_by_half_of_it_in_each(plan):
    found = plan("keeps", every=2)

    assert (found.fits, found.growth_bytes_per_step) == ("grows", 1 << 21)
    assert any("every 2 steps" in note for note in found.unmodelled)


def test_an_optimizer_that_never_steps_is_told(plan):
    found = plan("rarely", every=17)

    (note,) = [note for note in found.unmodelled if "optimizer" in note]
    assert note.startswith("1 of the program's optimizers never stepped in 16 steps")
    assert found.fits == "not known"
    assert plan("rarely", device=None, every=17).fits is None


@pytest.mark.long
@pytest.mark.parametrize("every", [2, 4, 8, 16])
def test_an_optimizer_that_steps_now_and_then_is_waited_for(plan, every):
    often, found = plan("rarely", every=1), plan("rarely", every=every)

    assert found.live_at_peak["optimizer_state"] == often.live_at_peak["optimizer_state"] >= 4 * 64 * 64 * 4
    assert (found.fits, found.growth_bytes_per_step, found.unmodelled[1:]) == ("fits", 0, ())
    assert f"every {every} steps" in found.unmodelled[0]
    assert found.settles_at_step <= 2 * every


@pytest.mark.long
@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", None])
@pytest.mark.parametrize("every", [2, 4])
def test_gradients_that_are_added_up_over_calls_do_not_grow(plan, device, every):
    once, found = plan("adds_up", device=device, every=1), plan("adds_up", device=device, every=every)

    assert found.growth_bytes_per_step == 0 and found.settles_at_step is not None
    for owner in ("parameter", "optimizer_state"):
        assert found.live_at_peak[owner] == once.live_at_peak[owner]
    assert 0 <= found.peak_allocated_bytes - once.peak_allocated_bytes <= 64 * 64 * 4 + 1024
    assert found.live_at_peak["gradient"] == 64 * 64 * 4


def test_an_ordinary_step_runs_three_times(plan, capsys):
    plan("plain")

    assert capsys.readouterr().out.count("a call") == 3


@pytest.mark.parametrize("words", [{"dtype": "bf16"}, {"mode": "forward"}])
def test_a_whole_step_runs_as_it_is(plan, words):
    with pytest.raises(UsageError, match="whole step of your own: leave --mode and --dtype out"):
        plan("plain", **words)


def test_what_cannot_run_is_a_mistake_in_one_line(plan):
    with pytest.raises(UsageError, match="no parameters"):
        plan("weightless")


def test_devices_of_one_kind_share_a_trace_unless_the_program_may_ask_for_the_device(program, monkeypatch):
    traced = []
    trace = prediction.trace

    def counted(workload, config, *rest, **options):
        traced.append(workload.name)
        return trace(workload, config, *rest, **options)

    monkeypatch.setattr(prediction, "trace", counted)
    workload = find("cs336")
    grid = Grid(workload, {"device": "cpu"})
    ours = Planner(workload), grid.points([grid.words(["preset=tiny"])], False)[0]
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB")
    found, _ = (
        [planner.predict(point, find_device(name)) for name in (*names, "NVIDIA A100 80GB PCIe")]
        for planner, point in (ours, program("plain"))
    )

    assert traced[:2] == ["cs336"] * 2 and len(traced) == 2 + 4
    assert found[0].peak_allocated_bytes == found[1].peak_allocated_bytes
    assert found[0].lower_bound != found[1].lower_bound


def test_a_planner_does_not_keep_every_trace(program, monkeypatch):
    monkeypatch.setattr(prediction, "MOST_TRACES", 2)
    planner, point = program("plain")
    for batch in (1, 2, 3):
        planner.predict(dataclasses.replace(point, config={"batch": batch}), None)

    assert len(planner._traced) == 2
