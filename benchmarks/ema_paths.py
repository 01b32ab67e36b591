"""What the paths of the complex moving average cost, and how near the fused kernels come to what the GPU allows.

    python benchmarks/ema_paths.py                      # on a GPU: 8 × 512…8192 tokens, 1024 channels, 16 states
    python benchmarks/ema_paths.py --device cpu --batch 1 --width 32 --lengths 128,512 --steps 3

First the paths are held against the loop in float64; then each is timed forward (graph kept) and forward+backward;
then every way to launch the fused kernels. Times are medians, on a GPU of CUDA events.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from stepscope.workloads.ops.ema import CEMA, HAS_KERNELS, EmaConfig, build

OPERATIONS = {"forward": 7, "backward_input": 7, "backward_weights": 12}
"""Floating-point instructions of a kernel for one state of one token, the sum over states among them."""


def median_ms(run: Callable[[], object], steps: int, device: str, seconds: float = 5.0) -> float:
    """The median time of a call in ms, after two that are not counted; fewer calls where they are slow."""
    run()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    steps = max(1, min(steps, int(seconds / (time.perf_counter() - begin))))
    if device != "cuda":
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(steps)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events)


def results(path: str, dtype: torch.dtype, length: int, with_state: bool) -> dict[str, torch.Tensor]:
    """Outputs, last state and gradients of a path over 2 × length tokens of 64 channels, 16 states."""
    torch.manual_seed(0)
    module = CEMA(64, 16, path).to(dtype)
    x = torch.randn(2, length, 64).to(dtype).requires_grad_()
    state = torch.randn(2, 64, 16, 2).to(dtype).requires_grad_() if with_state else None
    y, last = module(x, state)
    loss = (y * torch.randn(y.shape)).sum() + (last * torch.randn(last.shape)).sum()
    loss.backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    incoming = {} if state is None else {"gradient of state": state.grad}
    return {"outputs": y.detach(), "last state": last.detach(), "gradient of x": x.grad, **incoming, **gradients}


def check(length: int) -> None:
    """Prints how far each path is from the loop in float64, relative to the largest number of each result."""
    print(f"\nlargest distance from the loop in float64, 2 × {length} tokens, 64 channels, 16 states")
    for with_state, dtype in itertools.product((False, True), (torch.float64, torch.float32)):
        truth = results("sequential", torch.float64, length, with_state)
        for path in ("fft", "sequential", "scan"):
            found = results(path, dtype, length, with_state)
            far = {name: ((found[name] - t).abs().max() / t.abs().max()).item() for name, t in truth.items()}
            worst = max(far, key=lambda name: far[name])
            name = f"{path:<11}{str(dtype).removeprefix('torch.'):<8} state {'in' if with_state else 'no'}"
            print(f"  {name}  outputs {far['outputs']:.1e}  last state {far['last state']:.1e}", end="")
            print(f"  worst {far[worst]:.1e} ({worst})", flush=True)


def compare(arguments: argparse.Namespace, lengths: list[int]) -> None:
    """Prints the paths' times, forward and forward+backward, and their ratio to fft with last state."""
    print("\nms (ratio to fft with its last state)")
    variants = [("fft", True), ("fft", False), ("scan", True), ("sequential", True)]
    variants = [variant for variant in variants if variant[0] in arguments.paths.split(",")]
    for length, backward in itertools.product(lengths, (False, True)):
        fft = 0.0
        for path, last_state in variants:
            config = EmaConfig(
                batch=arguments.batch,
                width=arguments.width,
                num_states=arguments.states,
                seq_len=length,
                path=path,
                last_state=last_state,
            )
            torch.manual_seed(0)
            built = build(config)
            batch = built.batch()
            seeds: list[torch.Tensor] = []

            def run(built=built, batch=batch, backward=backward, seeds=seeds) -> None:
                outputs = built.module(**batch)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                if backward:
                    if not seeds:
                        seeds.extend(torch.randn(output.shape) for output in outputs)
                    torch.autograd.grad(outputs, (*built.module.parameters(), *batch.values()), seeds)

            peak = ""
            try:
                if arguments.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                ms = median_ms(run, arguments.steps, arguments.device)
                if arguments.device == "cuda":
                    peak = f"  peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"
            except torch.OutOfMemoryError:
                print(f"  L {length:<6}{path}: out of memory")
                continue
            fft = fft or ms
            name = f"{path}{'' if last_state else ', outputs only'}"
            phase = "forward+backward" if backward else "forward"
            print(f"  L {length:<6}{phase:<17}{name:<19}{ms:>10.3f}  {fft / ms:>7.2f}×{peak}", flush=True)


def launches(arguments: argparse.Namespace, length: int) -> None:
    """Prints the time of each kernel for each way to launch it, beside what memory and arithmetic allow."""
    from stepscope.workloads import ema_triton as kernels

    batch, width, num_states = arguments.batch, arguments.width, arguments.states
    torch.manual_seed(0)
    module = CEMA(width, num_states, "scan")
    constants = module.coefficients()
    x, grad = torch.randn(batch, length, width), torch.randn(batch, length, width)
    grad_last = torch.randn(batch, width, num_states, 2)
    q = torch.polar(constants.decay, constants.angle).to(torch.complex64)
    with torch.no_grad():
        q, w, skip = torch.view_as_real(q).contiguous(), constants.weight.float(), constants.skip.float()
    runs = {
        "forward": lambda block_width: kernels.forward(x, q, w, skip, None, block_width),
        "backward_input": lambda block_width: kernels.backward_input(grad, grad_last, q, w, skip, block_width),
        "backward_weights": lambda block_width: kernels.backward_weights(grad, grad_last, x, q, w, None, block_width),
    }
    properties = torch.cuda.get_device_properties(0)
    floors = f"floors at {arguments.clock_ghz} GHz, {arguments.tb_per_s} TB/s"
    print(f"\nkernels at L {length} on {properties.name}; {floors}")
    for name, run in runs.items():
        instructions = batch * length * width * num_states * OPERATIONS[name]
        arithmetic = instructions / (properties.multi_processor_count * 128 * arguments.clock_ghz * 1e9) * 1e3
        memory = 2 * x.nbytes / (arguments.tb_per_s * 1e12) * 1e3
        print(f"  {name}: arithmetic ≥ {arithmetic:.3f} ms, memory ≥ {memory:.3f} ms")
        for block_width in (2, 4, 8, 16, 32):
            with torch.no_grad():
                ms = median_ms(lambda run=run, block_width=block_width: run(block_width), arguments.steps, "cuda")
            share = f"{arithmetic / ms:.0%} of the arithmetic floor's speed"
            print(f"    block_width {block_width:<3} {ms:8.3f} ms  {share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--states", type=int, default=16)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--paths", default="fft,scan,sequential", help="those to time")
    parser.add_argument("--steps", type=int, default=20, help="timed calls of each")
    parser.add_argument("--clock-ghz", type=float, default=1.98, help="for the arithmetic floor; 1.98 is an H200's")
    parser.add_argument("--tb-per-s", type=float, default=4.8, help="for the memory floor; 4.8 is an H200's")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with torch.device(arguments.device):
        check(min(1000, lengths[-1]))
        compare(arguments, lengths)
        if arguments.device == "cuda" and HAS_KERNELS:
            launches(arguments, lengths[-1])


if __name__ == "__main__":
    main()
