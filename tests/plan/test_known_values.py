"""What is known of a tensor without data, when it is forgotten, and what a program may do without it."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")

from stepscope.planner.emulation.cuda_dispatch import CudaDispatch
from stepscope.planner.emulation.dataless import DatalessMode, DataNeeded


@pytest.fixture
def mode():
    manners = CudaDispatch("cuda")
    with manners, DatalessMode(manners.device, manners.kernels, lambda *_: None) as mode, torch.device("cuda"):
        yield mode


def unknown(*shape, dtype=torch.int64):
    return torch.randint(9, shape, device="cuda").to(dtype)


def test_whole_numbers_and_decisions_that_only_data_can_give_are_asked_for_in_vain(mode):
    x = torch.randn(4)
    asks = {
        "whole number": lambda: int(unknown(1).item()),
        "count": lambda: range(unknown(1).item()),
        "index": lambda: [1, 2][unknown(1).item()],
        "slice": lambda: x[: unknown(1).item()],
        "a comparison of whole numbers": lambda: unknown(1).item() > 0,
        "if": lambda: bool(x[0] > 0),
        "list": lambda: x.tolist(),
        "array": lambda: x.numpy(),
        "range": lambda: range(unknown()),
        "mask": lambda: x[x > 0],
        "nonzero": lambda: x.nonzero(),
        "unique": lambda: unknown(4).unique(),
        "comparison": lambda: x.sum().item() < 1,
        "minimum": lambda: min(1.0, x.sum().item()),
        "truth": lambda: bool(x.sum().item()),
        "rounded": lambda: int(x.sum().item()),
    }
    for name, ask in asks.items():
        with pytest.raises(DataNeeded, match=r"test_known_values\.py:\d+ ") as error:
            ask()
        assert error.value.where.startswith("test_known_values.py:"), name


def test_a_loss_can_be_logged(mode):
    loss = torch.randn(4).sum()
    value = loss.item()

    assert f"{value:.3f} {loss:.2f} {value} {round(value, 2)}" == "nan nan nan nan"
    assert f"{(2 * value + 1) / 3 - sum([value, value]):.1f}" == "nan"
    assert math.isfinite(value) and math.isfinite(float(loss)) and math.isfinite(loss.tolist())
    assert mode.assumptions
    assert all("test_known_values.py" in text and "is 1.0" in text for text in mode.assumptions)


def test_a_count_can_be_logged_and_nothing_is_as_long_as_it_says(mode):
    correct = 0
    for _ in range(2):
        correct += (unknown(4) == unknown(4)).sum().item()

    assert f"{correct} {correct:d} {correct:5d} {100 * correct / 8:.1f}%" == "nan nan   nan nan%"
    assert json.dumps({"correct": correct}) == '{"correct": NaN}'
    assert (torch.randn(4).sum() / correct).dtype is torch.float32
    for make in (torch.zeros, torch.arange, torch.randn(4).expand):
        with pytest.raises((TypeError, RuntimeError)):
            make(correct)


def test_draws_of_an_initialization_are_within_its_limits(mode):
    weight = torch.nn.init.trunc_normal_(torch.empty(8, 8), std=0.02)
    assert weight.is_cuda
    with pytest.raises(DataNeeded):
        bool((weight > 0).any())


def test_positions_have_values_until_something_unknown_is_written_over_them(mode):
    positions = torch.arange(6).view(2, 3)

    assert (positions[1] + 1).tolist() == [4, 5, 6]
    assert bool((positions.diff(dim=-1) == 1).all())
    assert [row.tolist() for row in positions] == [[0, 1, 2], [3, 4, 5]]
    assert positions[positions > 3].tolist() == [4, 5]
    positions[:, 1:] = unknown(2, 2)
    for lost in (positions, positions[0], positions.view(6)):
        with pytest.raises(DataNeeded):
            lost.tolist()


def test_what_is_known_is_written_to_every_view(mode):
    base = torch.zeros(4, dtype=torch.int64)
    part = base[1:3]
    part += 2
    assert base.tolist() == [0, 2, 2, 0]
    base.fill_(7)
    assert part.tolist() == [7, 7]
    part.copy_(unknown(2))
    base.zero_()
    assert part.tolist() == [0, 0]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch._foreach_add_([x], [unknown(3)]),  # gives nothing
        lambda x: torch._foreach_copy_([x], [unknown(3)]),
        lambda x: torch.sort(unknown(3), out=(x, torch.empty(3, dtype=torch.int64))),  # gives two
        lambda x: torch.add(unknown(3), 1, out=x),
        lambda x: x.view(torch.float64).copy_(torch.randn(3, dtype=torch.float64)),
        lambda x: x.random_(),
        lambda x: setattr(x, "data", unknown(3)),
    ],
    ids=["foreach", "foreach copy", "two outs", "out", "other dtype", "random", "data"],
)
def test_every_way_to_write_is_seen(mode, write):
    x = torch.arange(3)
    write(x)

    with pytest.raises(DataNeeded):
        x.tolist()


def test_data_that_is_taken_over_brings_its_values(mode):
    x = unknown(3)
    x.data = torch.arange(2)
    assert x.tolist() == [0, 1] and x.shape == (2,)
    x.data = torch.tensor([5, 6, 7], device="cpu")
    assert x.tolist() == [5, 6, 7] and not x.is_cuda


def test_a_new_tensor_in_the_place_of_an_old_one_has_its_own_values(mode):
    for _ in range(50):
        x = torch.arange(3)
        x.copy_(unknown(3))
        del x
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_rates_and_what_the_host_draws_are_known(mode):
    assert [round(rate.item(), 2) for rate in torch.linspace(0, 0.1, 3)] == [0.0, 0.05, 0.1]
    assert all(0 <= int(row) < 9 for row in torch.randint(9, (4,), device="cpu"))
    assert bool(torch.rand((), device="cpu") < 1.0)
    torch.manual_seed(3)
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    torch.manual_seed(3)
    assert drawn == int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def test_a_tensor_with_data_takes_none_that_is_unknown(mode):
    numbers = torch.tensor([1.0, 2.0], device="cpu")
    with pytest.raises(DataNeeded, match=r"torch\.zeros"):
        numbers.copy_(torch.randn(2))
