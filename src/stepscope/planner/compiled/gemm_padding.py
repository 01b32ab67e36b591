"""Which products Inductor pads: it decides by a benchmark on the device, which a plan does not have.

Padded operands and results have rows that begin at multiples of 16 bytes, and each padded copy is another tensor: for
the gradient of the logits, 1.5 GiB for 16384 × 50257 in bfloat16. Inductor's own code decides what may be
padded, how, and whether a benchmark is worthwhile. Its outcome is predicted from the row alignment: tensor cores are
several times slower on unaligned rows; float32 units are not.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from stepscope.devices.peaks import Device
from stepscope.planner.emulation.torch_support import replaced
from stepscope.recorder.machine.environment import products_in_tf32

DECIDERS = ("_should_pad", "should_pad_bench")
"""The functions that run the benchmark; older versions have the second."""
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Padding:
    """While the context is active, Inductor pads what it would pad on a device, in graphs with host tensors."""

    def __init__(self, device: Device, is_tf32: bool) -> None:
        self._device, self._is_tf32 = device, is_tf32
        self._stack = ExitStack()
        self.products: dict[str, None] = {}
        """Rows × inner size × columns of padded products."""

    def __enter__(self) -> Padding:
        from torch._inductor.fx_passes import pad_mm

        device = self._device
        replacement = replaced(
            *((pad_mm, name, self._is_padded) for name in DECIDERS),
            (pad_mm, "check_device", lambda first, second: True),
            (pad_mm, "has_triton", lambda: True),
            (pad_mm.utils, "get_device_tflops", lambda dtype: device.peak_flops[HALVES.get(dtype, "tf32")] / 1e12),
            (pad_mm.utils, "get_gpu_dram_gbps", lambda: device.bandwidth_bytes_per_s / 1e9),
            (torch.cuda, "get_device_capability", lambda index=None: device.compute_capability),
        )
        self._stack.enter_context(replacement)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def note(self) -> str | None:
        """Return a note for the plan, or None if nothing was padded."""
        if not self.products:
            return None
        first, *more = self.products
        return (
            f"{first}{f' and {len(more)} more' * bool(more)}: rows do not begin at multiples of 16 bytes; assumed to "
            "be padded, which Inductor decides by a benchmark on the device"
        )

    def _is_padded(
        self, match: Any, first: torch.Tensor, second: torch.Tensor, op: Any, added: torch.Tensor | None = None
    ) -> bool:
        """Replaces the benchmark."""
        from torch._inductor.fx_passes import pad_mm

        sizes = (*first.shape[-2:], second.shape[-1])
        unit = pad_mm.get_alignment_size(first)
        is_tf32 = first.dtype is torch.float32 and (self._is_tf32 or products_in_tf32())
        is_padded = (
            any(pad_mm.get_padded_length(size, unit) for size in sizes)
            and (is_tf32 or first.dtype in HALVES)
            and has_unaligned_rows(first, second, unit)
            and bool(pad_mm.is_mm_compute_bound(*sizes, first.dtype))
        )
        if is_padded:
            self.products[" × ".join(map(str, sizes))] = None
        return is_padded


def has_unaligned_rows(first: torch.Tensor, second: torch.Tensor, unit: int) -> bool:
    """Return whether rows of an operand or of the result do not all begin at multiples of `unit` numbers.

    >>> tokens, words = torch.empty(64, 32), torch.empty(101, 32)
    >>> has_unaligned_rows(tokens, words.t(), 8), has_unaligned_rows(tokens, words[:96].t(), 8)
    (True, False)
    """
    return any(size % unit for size in (max(first.stride()[-2:]), max(second.stride()[-2:]), second.shape[-1]))
