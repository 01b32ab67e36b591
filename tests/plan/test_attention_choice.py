"""The back end of attention by device, shape and setting: PyTorch's rules for CUDA, and this CPU itself."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.planner.emulation.attention_backend import choose, workspace_bytes
from stepscope.planner.emulation.cuda_dispatch import CudaDispatch
from stepscope.planner.emulation.dataless import DatalessMode

A100, A10, L4, H100, B200, B300, RTX50, T4, V100 = (
    (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (7, 5), (7, 0),
)  # fmt: skip
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def chosen(
    capability, *, width=64, value_width=None, length=128, keys=None, heads=4, key_heads=None, dtype=BF16,
    causal=False, dropout=0.0, mask=None, mask_gradient=False, gradient=True, gqa=False, transposed=False,
):  # fmt: skip
    def made(heads, length, width):
        tensor = torch.empty(2, heads, length, width, dtype=dtype, device="meta", requires_grad=gradient)
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if transposed else tensor

    given = None if mask is None else torch.empty(*mask, dtype=dtype, device="meta", requires_grad=mask_gradient)
    few, long = key_heads or heads, keys or length
    return choose(
        made(heads, length, width), made(few, long, width), made(few, long, value_width or width), given, causal, gqa,
        capability, dropout,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "options", "wanted"),
    [
        # By device and dtype.
        (H100, {}, "cudnn"), (B200, {}, "cudnn"), (B300, {}, "cudnn"), (A100, {}, "flash"), (RTX50, {}, "flash"),
        (T4, {}, "math"), (V100, {}, "math"), (T4, {"dtype": FP16}, "efficient"), (T4, {"dtype": FP32}, "efficient"),
        (A100, {"dtype": FP32}, "efficient"), (A100, {"dtype": torch.float64}, "math"),
        # By the width of a head.
        (L4, {"width": 200}, "efficient"), (A10, {"width": 224}, "efficient"), (RTX50, {"width": 200}, "efficient"),
        (L4, {"width": 192}, "flash"), (L4, {"width": 256}, "flash"),
        (L4, {"width": 200, "gradient": False}, "flash"),
        (L4, {"width": 256, "dropout": 0.125}, "efficient"), (A100, {"width": 200, "dropout": 0.125}, "flash"),
        (A100, {"width": 264}, "efficient"), (A100, {"width": 60}, "flash"), (H100, {"width": 60}, "flash"),
        (H100, {"width": 136}, "cudnn"), (B200, {"width": 136}, "flash"),
        (H100, {"width": 192, "value_width": 128}, "cudnn"),
        (A100, {"width": 192, "value_width": 128}, "efficient"), (A100, {"width": 62, "dtype": FP32}, "math"),
        (T4, {"width": 62, "dtype": FP32}, "efficient"), (T4, {"width": 62, "dtype": FP16}, "math"),
        # By lengths.
        (A100, {"causal": True, "keys": 256}, "efficient"), (A100, {"causal": True, "length": 1}, "flash"),
        (A100, {"causal": True, "length": 1, "keys": 64}, "efficient"), (H100, {"length": 1, "keys": 64}, "cudnn"),
        (H100, {"length": 1}, "flash"), (H100, {"length": 1, "keys": 64, "dropout": 0.125}, "flash"),
        # By dropout, masks and heads.
        (H100, {"dropout": 0.125}, "cudnn"), (H100, {"dropout": 0.1}, "flash"),
        (H100, {"mask": (128, 128)}, "cudnn"), (A100, {"mask": (128, 128)}, "efficient"),
        (H100, {"mask": (1, 4, 128, 128)}, "cudnn"), (H100, {"mask": (4, 128, 128)}, "efficient"),
        (H100, {"mask": (128, 128), "mask_gradient": True}, "efficient"),
        (A100, {"key_heads": 2, "gqa": True}, "flash"), (A100, {"key_heads": 2, "gqa": True, "dtype": FP32}, "math"),
        (H100, {"key_heads": 2, "gqa": True}, "cudnn"), (A100, {"key_heads": 3, "gqa": True}, "math"),
        (A100, {"transposed": True}, "math"), (H100, {"transposed": True}, "math"),
    ],
)  # fmt: skip
def test_the_back_end_on_cuda(capability, options, wanted):
    assert chosen(capability, **options) == wanted


def test_settings_are_obeyed():
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert chosen(A100) == "math"  # which is asked before cuDNN there
        assert chosen(H100) == "cudnn"
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert chosen(H100) == "math"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        chosen(A100, dtype=FP32)
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(H100) == "flash"
        tensor = torch.empty(1, 4, 128, 64, dtype=BF16, device="meta")
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        assert workspace_bytes(backward, tensor, tensor, 132)[0][1] == 33 * 4 * 128 * 4 * 64
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert chosen(H100) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


CASES = {
    "plain": lambda attend, q, k: attend(q, q, q, is_causal=True),
    "three dimensions": lambda attend, q, k: attend(q[0], q[0], q[0]),
    "grouped": lambda attend, q, k: attend(q, k, k, enable_gqa=True),
    "dropout": lambda attend, q, k: attend(q, q, q, dropout_p=0.5),
    "mask": lambda attend, q, k: attend(q, q, q, attn_mask=torch.ones(16, 16, dtype=torch.bool)),
    "mask transposed": lambda attend, q, k: attend(q, q, q, attn_mask=torch.zeros(16, 16).t()),
    "mask of three": lambda attend, q, k: attend(q, q, q, attn_mask=torch.zeros(8, 16, 16)),
    "mask with gradient": lambda attend, q, k: attend(q, q, q, attn_mask=torch.zeros(16, 16, requires_grad=True)),
    "other width": lambda attend, q, k: attend(q, q, q[..., :16]),
    "not dense": lambda attend, q, k: attend(*(q.transpose(-1, -2).contiguous().transpose(-1, -2),) * 3),
    "doubles": lambda attend, q, k: attend(q.double(), q.double(), q.double()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_back_end_of_a_cpu_is_that_of_this_one(case):
    def is_fused():
        q, k = torch.randn(2, 8, 16, 32, requires_grad=True), torch.randn(2, 2, 16, 32)
        out = CASES[case](torch.nn.functional.scaled_dot_product_attention, q, k)
        return "FlashAttention" in out.grad_fn.name()

    real = is_fused()
    manners = CudaDispatch("cpu")
    with manners, DatalessMode(manners.device, manners.kernels, lambda *_: None):
        assert is_fused() == real
