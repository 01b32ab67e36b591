"""Tensors without data: what a program sees, what it may ask, and that nothing of a plan outlives it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.plan.ghosts import DataNeeded, Ghosts  # noqa: E402
from stepscope.plan.manners import Manners  # noqa: E402


@pytest.fixture
def cuda():
    manners = Manners("cuda")
    seen = []
    with manners, Ghosts(manners.device, manners.kernels, lambda func, *_: seen.append(func.name())):
        yield seen


def test_a_program_sees_the_device_it_asked_for_and_nothing_is_allocated(cuda):
    huge = torch.empty(1 << 20, 1 << 20, device="cuda")

    assert huge.is_cuda and huge.device.type == "cuda"
    assert torch.zeros_like(huge).device == huge.device
    assert huge.to("cuda").data_ptr is not None
    assert torch.tensor([1, 2], device="cuda").is_cuda
    assert not torch.tensor([1, 2]).is_cuda


def test_values_that_only_data_can_give_are_asked_for_in_vain(cuda):
    x = torch.randn(4)
    for ask in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.tolist(), lambda: float(x.max())):
        with pytest.raises(DataNeeded):
            ask()


def test_positions_have_values_until_something_unknown_is_written_over_them(cuda):
    positions = torch.arange(6).view(2, 3)

    assert (positions[1] + 1).tolist() == [4, 5, 6]
    assert bool((positions.diff(dim=-1) == 1).all())
    positions[:, 1:] = torch.randint(9, (2, 2))
    with pytest.raises(DataNeeded):
        positions.tolist()
    with pytest.raises(DataNeeded):
        positions[0, 0].item()


def test_a_module_changes_its_dtype(cuda):
    module = torch.nn.Linear(8, 8).to(torch.bfloat16)

    assert torch.zeros_like(module.weight)._stepscope_inner.dtype is torch.bfloat16
    assert module(torch.randn(2, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_calls_become_the_ops_of_a_cuda_device(cuda):
    x = torch.randn(2, 4, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    torch.nn.functional.dropout(x, 0.1)
    torch.nn.functional.rms_norm(x, (8,))

    assert {"aten::_scaled_dot_product_cudnn_attention", "aten::native_dropout", "aten::_fused_rms_norm"} <= set(cuda)
    assert "aten::_scaled_dot_product_cudnn_attention_backward" in cuda


def test_autocast_is_that_of_cuda(cuda):
    linear = torch.nn.Linear(8, 8)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = linear(torch.randn(2, 8))
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16

        assert out.dtype is torch.bfloat16
        assert (
            out.softmax(-1).dtype
            is out.sum().dtype
            is torch.nn.functional.layer_norm(out, (8,)).dtype
            is torch.float32
        )


def test_nothing_of_a_plan_outlives_it():
    before = torch.autocast.__init__, torch.is_autocast_enabled, torch.cuda._lazy_init
    with pytest.raises(ZeroDivisionError), Manners("cuda"):
        raise ZeroDivisionError

    assert before == (torch.autocast.__init__, torch.is_autocast_enabled, torch.cuda._lazy_init)
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    names = [
        type(node[0]).__name__ for node in ((torch.nn.functional.scaled_dot_product_attention(x, x, x).grad_fn,),)
    ]
    assert names == ["ScaledDotProductFlashAttentionForCpuBackward0"]
    assert torch.nn.functional.dropout(x, 0.5).grad_fn.name() == "MulBackward0"
    assert torch.nn.functional.rms_norm(x, (4,)).isfinite().all()


def test_a_ghost_is_of_no_use_after_the_plan():
    manners = Manners("cpu")
    with manners, Ghosts(manners.device, manners.kernels, lambda *_: None):
        x = torch.ones(2)
    with pytest.raises(RuntimeError, match="used after the plan"):
        x + 1
