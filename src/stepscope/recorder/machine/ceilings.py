"""Measures the best rates this machine reaches with a plain matrix product and a plain copy.

Operands are random. On zeros a GPU draws less power and keeps higher clocks, so no training step could reach that
rate. Each size runs long enough to hit the power limit, so a short burst can be faster than the ceiling.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from stepscope.recorder.machine.cpu import last_level_cache_bytes

# Smallest first: a size is skipped if the previous one shows that it would exceed its time.
CUDA_SIZES = (2048, 4096, 8192, 16384)
CPU_SIZES = (256, 512, 1024, 2048)
MAX_ROUNDS = 500
WARM_UP_ROUNDS = 2

# Several times the last-level cache of any GPU.
CUDA_COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 256 << 20
MAX_CPU_COPY_BYTES = 1 << 30

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure_ceilings(
    device: str = "cuda",
    seconds: float = 2.0,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Return the ceilings of `device` ("cuda" or "cpu"), taking about `seconds` per dtype and for the copy.

    `progress` receives what is measured next. Random state and float32 precision are restored.
    """
    target = torch.device(device)
    if target.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, not {device}")
    with torch.cuda.device(target) if target.type == "cuda" else nullcontext():
        flops: dict[str, int] = {}
        sizes: dict[str, int] = {}
        left_out: dict[str, str] = {}
        for name in _DTYPES:
            reason = _unsupported(name, target)
            if reason:
                left_out[name] = reason
                continue
            progress(f"matmul {name}")
            try:
                flops[name], sizes[name] = _best_matmul(name, target, seconds)
            except RuntimeError as error:  # not implemented for this dtype, or out of memory
                left_out[name] = str(error).partition("\n")[0]
        progress("copy")
        return {
            "matmul_flops": flops,  # per second by dtype, 2 per multiply-add: the best median over the square sizes
            "matmul_sizes": sizes,  # the size that reached it
            "copy_bytes_per_s": _copy_bytes_per_s(target, seconds),  # read plus written
            "left_out": left_out,  # the dtypes that could not be measured, and why
            "torch_version": str(torch.__version__),
        }


def _unsupported(name: str, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "only on CUDA devices" if name == "tf32" else None
    if name == "tf32" and torch.version.hip:
        return "torch does not report whether ROCm uses it"
    if torch.version.hip or name not in ("tf32", "bf16"):
        return None
    return "needs compute capability 8.0" if torch.cuda.get_device_capability(device) < (8, 0) else None


def _best_matmul(name: str, device: torch.device, seconds: float) -> tuple[int, int]:
    """Return the highest median rate over the sizes in FLOP/s, and its size."""
    sizes = CUDA_SIZES if device.type == "cuda" else CPU_SIZES
    budget_ns = round(seconds * 1e9 / len(sizes))
    generator = torch.Generator(device).manual_seed(0)
    best = (0, 0)
    with _float32_precision("high" if name == "tf32" else "highest"):
        for size in sizes:
            left = torch.randn(size, size, generator=generator, device=device, dtype=_DTYPES[name])
            right = torch.randn(size, size, generator=generator, device=device, dtype=_DTYPES[name])
            multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
            median_ns = _median_ns(multiply, device, budget_ns)
            best = max(best, (round(2 * size**3 / (median_ns / 1e9)), size))
            if median_ns * 8 * (WARM_UP_ROUNDS + 1) > budget_ns:
                break
    return best


def _copy_bytes_per_s(device: torch.device, seconds: float) -> int:
    if device.type == "cuda":
        num_bytes = min(CUDA_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    else:
        cache_bytes = last_level_cache_bytes()
        num_bytes = min(4 * cache_bytes, MAX_CPU_COPY_BYTES) if cache_bytes else CPU_COPY_BYTES
    generator = torch.Generator(device).manual_seed(0)
    source = torch.rand(num_bytes // 4, generator=generator, device=device)
    target = torch.empty_like(source)
    median_ns = _median_ns(lambda: target.copy_(source), device, round(seconds * 1e9))
    return round(2 * int(source.nbytes) / (median_ns / 1e9))


def _median_ns(run: Callable[[], object], device: torch.device, budget_ns: int) -> float:
    """Return the median nanoseconds of one `run`, over as many as fit in `budget_ns`, at least one."""
    for _ in range(WARM_UP_ROUNDS):
        run()
    timed = _cuda_rounds_ns if device.type == "cuda" else _cpu_rounds_ns
    first_ns = timed(run, 1)[0]
    rounds = min(MAX_ROUNDS, int(budget_ns // max(first_ns, 1)))
    return statistics.median(timed(run, rounds) if rounds > 1 else [first_ns])


def _cpu_rounds_ns(run: Callable[[], object], rounds: int) -> list[float]:
    times_ns: list[float] = []
    for _ in range(rounds):
        start_ns = time.perf_counter_ns()
        run()
        times_ns.append(time.perf_counter_ns() - start_ns)
    return times_ns


def _cuda_rounds_ns(run: Callable[[], object], rounds: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) * 1e6 for start, end in pairwise(events)]


@contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
