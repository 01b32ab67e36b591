"""What Stepscope costs a step: the same loop bare, outside every window, and in the clean window.

    python benchmarks/overhead.py                # a CPU step of about 10 ms
    python benchmarks/overhead.py --device cuda  # GPU steps of about 10 ms, device- and launch-bound, and nanoGPT

All three are interleaved in one process, in blocks of steps, in random order within each round. A block includes all
that is left to do for the steps recorded in it. The figure is the median over the rounds of a block's ratio to the
bare block of the same round, so that a machine that slows down for a while hardly matters; beside it is its bootstrap
interval.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stepscope.recorder.session import Session
from stepscope.recorder.windows import Windows

STEPS_PER_BLOCK = 30
STEPS_PER_ROUND = 1 + STEPS_PER_BLOCK  # after a pause the first step is not timed


@dataclass
class Loop:
    """One training loop to be timed."""

    name: str
    model: nn.Module
    batch: torch.Tensor
    optimizer: torch.optim.Optimizer

    def passes(self) -> None:
        self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        self.passes()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def mlp(name: str, device: str, width: int, depth: int, batch: int, dtype: torch.dtype) -> Loop:
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return Loop(name, model, torch.randn(batch, width, device=device, dtype=dtype), optimizer)


class NanoGPT(Loop):
    """The steps of that script: its batches, autocast, clipping and optimizer."""

    def __init__(self) -> None:
        sys.argv = ["nanogpt.py", "--seconds", "0", *([] if torch.cuda.is_available() else ["--tiny"])]
        self.names = runpy.run_path(str(Path(__file__).parent / "improve" / "nanogpt.py"))
        super().__init__("nanoGPT, 124M", self.names["model"], torch.empty(0), self.names["optimizer"])

    def passes(self) -> None:
        x, y = self.names["batch_of"](self.names["data"])
        with self.names["context"]:
            _, loss = self.model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def loops(device: str) -> list[Callable[[], Loop]]:
    if device == "cpu":
        return [
            lambda: mlp("CPU, one pass", "cpu", 256, 6, 256, torch.float32),
            lambda: mlp("CPU, more passes", "cpu", 256, 6, 128, torch.float32),
        ]
    return [
        lambda: mlp("GPU, device-bound", device, 8192, 2, 8192, torch.bfloat16),
        lambda: mlp("GPU, launch-bound", device, 64, 50, 64, torch.float32),
        NanoGPT,
    ]


def block_ms(loop: Loop, device: str, num_steps: int, session: Session | None = None) -> float:
    """Milliseconds a step of one block. The device's queue is empty and everything recorded at both ends."""
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter_ns()
    for _ in range(num_steps):
        loop.step()
    if session is not None:
        session.catch_up()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - began) / 1e6 / num_steps


def tune(make: Callable[[], Loop], device: str) -> tuple[Loop, int]:
    """A loop and how many of its steps make about 10 ms (1 when a step is that long already)."""
    loop = make()
    for _ in range(3):
        block_ms(loop, device, 5)
    return loop, max(1, round(10 / block_ms(loop, device, 20)))


def measure(make: Callable[[], Loop], device: str, seconds: float) -> Iterator[dict[str, float | str]]:
    """The table's rows for one loop: the bare loop, then each way of recording it."""
    loop, repeat = tune(make, device)
    if repeat > 1:  # a step is several passes: gradient accumulation makes it 10 ms long
        single = loop.step

        def accumulated() -> None:
            for _ in range(repeat - 1):
                loop.passes()
            single()

        loop.step = accumulated
    with tempfile.TemporaryDirectory() as folder:
        sessions: dict[str, Session | None] = {"bare": None}
        for name, num_clean in (("free running", 1), ("clean window", 10**9)):
            (Path(folder) / name).mkdir()
            windows = Windows(warmup=2, clean=num_clean, trace=0, memory=0)
            session = sessions[name] = Session(Path(folder) / name, windows=windows, facts={})
            session.start()
            for _ in range(8):
                loop.step()
            session.suspend()
        times: dict[str, list[float]] = {name: [] for name in sessions}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name in random.sample(list(sessions), len(sessions)):
                session = sessions[name]
                if session is not None:
                    session.resume()
                block_ms(loop, device, 1)
                times[name].append(block_ms(loop, device, STEPS_PER_BLOCK, session))
                if session is not None:
                    session.suspend()
        for session in sessions.values():
            if session is not None:
                session.close("finished")
        lines = map(json.loads, (Path(folder) / "clean window" / "samples.jsonl").read_text().splitlines())
        clean = [line for line in lines if line.get("window") == "clean"]
        if device == "cpu":  # what the clean samples say a step takes: without what is done between steps
            walls = [line["wall_ns"] / 1e6 for line in clean[-len(times["bare"]) * STEPS_PER_ROUND :]]
            rounds = [walls[i + 1 : i + STEPS_PER_ROUND] for i in range(0, len(walls), STEPS_PER_ROUND)]
            times["clean window, its own samples"] = [statistics.mean(round) for round in rounds]
    for name, values in times.items():
        each = [value / bare for value, bare in zip(values, times["bare"])]
        ratios = sorted(statistics.median(random.choices(each, k=len(each))) for _ in range(1000))
        yield {
            "loop": loop.name,
            "recorded": name,
            "blocks": len(values),
            "ms": statistics.median(values),
            "ratio": statistics.median(each),
            "low": ratios[25],
            "high": ratios[975],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=40.0, help="measuring time for each loop")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # one busy core of a shared machine is steadier than two
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, blocks of {STEPS_PER_BLOCK} steps\n")
    print("| loop | recorded | blocks | step ms | ratio to bare | 95 % interval |")
    print("|---|---|---|---|---|---|")
    for make in loops(arguments.device):
        for row in measure(make, arguments.device, arguments.seconds):
            print(
                f"| {row['loop']} | {row['recorded']} | {row['blocks']} | {row['ms']:.3f} "
                f"| {row['ratio']:.4f} | {row['low']:.4f} to {row['high']:.4f} |"
            )


if __name__ == "__main__":
    main()
