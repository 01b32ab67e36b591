"""The optimizers: the hand-written one is torch's AdamW, and names are names."""

from __future__ import annotations

import pytest
import torch

from stepscope.errors import UsageError
from stepscope.workloads.optimizers import OPTIMIZERS, HandwrittenAdamW, make_optimizer


def trained(make, num_steps: int) -> list[torch.Tensor]:
    """The parameters of a small net after some steps of an optimizer, float64; one parameter never has a gradient."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = make([*net.parameters(), unused])
    for _ in range(num_steps):
        optimizer.zero_grad()
        net(torch.randn(7, 6, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in (*net.parameters(), unused)]


@pytest.mark.parametrize("num_steps", [1, 7])
@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3}])
def test_handwritten_adamw_is_torchs(num_steps, options):
    right = trained(lambda parameters: torch.optim.AdamW(parameters, **options), num_steps)
    found = trained(lambda parameters: HandwrittenAdamW(parameters, **options), num_steps)

    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["adamw", "fused", "handwritten"])
def test_the_adamws_agree(name):
    torch.testing.assert_close(
        trained(lambda parameters: make_optimizer(name, parameters), 5),
        trained(torch.optim.AdamW, 5),
        rtol=1e-12,
        atol=1e-14,
    )


def test_fused_asks_for_the_fused_kernel():
    optimizer = make_optimizer("fused", [torch.nn.Parameter(torch.ones(3))])

    assert optimizer.param_groups[0]["fused"] is True


def test_sgd_moves_against_the_gradient():
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer("sgd", [parameter])
    parameter.square().sum().backward()
    optimizer.step()

    assert parameter.item() == pytest.approx(2 - 1e-3 * 4)


def test_handwritten_state_survives_saving_and_a_closure_is_called():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    first = HandwrittenAdamW([parameter])
    parameter.square().sum().backward()
    assert first.step(lambda: torch.tensor(5.0)) == 5.0

    second = HandwrittenAdamW([parameter])
    second.load_state_dict(first.state_dict())
    assert second.state[parameter]["step"] == 1
    assert torch.equal(second.state[parameter]["mean"], first.state[parameter]["mean"])


def test_an_unknown_name_is_refused_with_the_right_ones():
    with pytest.raises(UsageError, match=f"adam.*{', '.join(OPTIMIZERS)}"):
        make_optimizer("adam", [])
