"""What ops allocate on a CPU: each runs once with its sizes on this machine, while PyTorch counts allocations.

The kernels of a plan for a CPU are here. oneDNN's copies in its own layout, what it keeps for the backward, buffers
of attention and of norms, sums in a wider dtype: all of this comes from PyTorch's allocator, and no shape shows it.
"""

import functools
import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.planner.emulation.ops import kind_of, look, mapped
from stepscope.planner.hardware import GEMMS
from stepscope.recorder.values import tensors_in

MOST_BYTES = 1 << 30  # of the inputs of an op that is tried
LARGEST_PLAIN_PRODUCT = 16**3  # multiplications of a bfloat16 product that PyTorch does without oneDNN
MOST_MULTIPLICATIONS = 2 * 10**11  # of a product that is tried: a second or two
_LISTS = ("_foreach", "_fused", "_amp")  # of a model's weights: they work in place


class HostKernels:
    """Tries ops, each with the same sizes once. `unknown` says which could not be, and why."""

    def __init__(self) -> None:
        self._tried: dict[Any, tuple[Any, int]] = {}
        self.unknown: dict[str, str] = {}

    def outputs(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return meta tensors like an op's outputs, or NotImplemented if it is not or cannot be tried."""
        return self._try(func, args, kwargs)[0] if _is_tried(func) else NotImplemented

    def scratch_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Return the bytes that an op has at most at once besides its outputs; 0 if unknown."""
        if func in GEMMS:
            return self._product_bytes(func, args, kwargs)
        return self._try(func, args, kwargs)[1] if _is_tried(func) else 0

    def _product_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Return the scratch memory of a product. oneDNN copies inputs in 16 bits into the layout of its tiles."""
        first, second = args[-2:]
        num_multiplications = first.numel() * second.shape[-1]
        if second.dtype not in (torch.bfloat16, torch.float16):
            return 0
        if second.dtype is torch.bfloat16 and _sums_bfloat16_in_float32():
            return _sums_bytes(first, second) if num_multiplications > LARGEST_PLAIN_PRODUCT else 0
        if num_multiplications > MOST_MULTIPLICATIONS:
            self._is_unknown(func, f"it has {num_multiplications:.1e} multiplications")
            return 0
        return self._try(func, args, kwargs)[1]

    def _try(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        # A recurrence keeps what its backward needs if gradients are enabled.
        key = (torch.is_grad_enabled(), func, *map(look, args), *map(look, kwargs.items()))
        if key not in self._tried:
            self._tried[key] = NotImplemented, 0
            tensors = list(tensors_in((args, kwargs)))
            try:
                if sum(tensor.untyped_storage().nbytes() for tensor in tensors) > MOST_BYTES:
                    raise MemoryError(f"its inputs have more than {MOST_BYTES >> 30} GiB")
                if all(tensor.numel() for tensor in tensors):  # kernels may not check what is empty
                    self._tried[key] = _run(func, args, kwargs)
            except Exception as error:
                self._is_unknown(func, error)
        out, scratch_bytes = self._tried[key]
        return mapped(_without_data, out), scratch_bytes

    def _is_unknown(self, func: Any, why: object) -> None:
        name = func.name().replace("::", ".").partition(".")[2]
        self.unknown[name] = f"its scratch memory is not counted, because it cannot be tried here: {why}"


def _sums_bytes(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return the bytes of the float32 sums of a product of bfloat16, a matrix per thread."""
    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    num_matrices = first.numel() // max(1, rows * inner)
    num_sums = min(num_matrices, torch.get_num_threads()) * 64 * -(-rows * columns // 64)
    return int(4 * num_sums + 128)  # aligned


def _sums_bfloat16_in_float32() -> bool:
    """Return whether the CPU has AVX-512 but no bfloat16 products. Trying them there would take too long."""
    has_products: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not has_products()


def _run(func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
    """Return meta tensors like an op's outputs, and the most bytes that it had besides them at once."""
    # Kineto reads this once. Without it, torch 2.13 prints "profiler_start" to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        args, kwargs = mapped(_with_data, args), mapped(_with_data, kwargs)
        with profile(profile_memory=True, acc_events=True) as profiler:
            profiler.acc_events = False  # stop without parsing events
            out = func(*args, **kwargs)
        events = profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        running = list(accumulate((num_bytes for _, num_bytes in changes), initial=0))
        known, found = ({t.untyped_storage()._cdata for t in tensors_in(values)} for values in ((args, kwargs), out))
        # The schema of `_unsafe_view` does not say that it shares its input's memory.
        return NotImplemented if known & found else mapped(_without_data, out), max(running) - running[-1]


def _with_data(value: Any) -> Any:
    """Return an argument; ones for a meta tensor, and zeros for integers, which may be indices."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return _as_large(value, int(value.is_floating_point()), "cpu")
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _without_data(value: Any) -> Any:
    """Return an output: a meta tensor with as large a storage. That of `mse_loss` has room for all it averages."""
    return _as_large(value, 0, "meta") if isinstance(value, torch.Tensor) else value


def _as_large(tensor: torch.Tensor, fill: int, device: str) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
    data = torch.full((size,), fill, dtype=tensor.dtype, device=device)
    return data.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@functools.cache
def _is_tried(func: Any) -> bool:
    """Return whether an op computes more than element by element; products would take too long."""
    schema, kind = func._schema, kind_of(func)
    name = schema.name.partition("::")[2]
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    is_plain = torch.Tag.pointwise in func.tags or kind.overwrites or name.startswith(_LISTS) or func in GEMMS
    is_unsure = kind.is_random or kind.has_dynamic_shape or kind.gives_number or kind.device_at is not None
    return func.namespace in ("aten", "fsdp") and not (is_view or is_plain or is_unsure)
