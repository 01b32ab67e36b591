"""What starting a point costs a sweep: forked from a server that has torch, or a new interpreter each time.

    python benchmarks/sweep_startup.py               # 10 points each
    python benchmarks/sweep_startup.py --device cuda # with the first touch of CUDA in each

Both servers run side by side and take turns. `empty` is a step that does nothing: all of its time is start-up, with
torch imported and the first row's facts gathered. `cs336 tiny` is a whole short point: gate, two steps, trace, FLOPs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from stepscope.sweep.grid import Grid
from stepscope.sweep.results import Results
from stepscope.sweep.runner import Options, Runner
from stepscope.sweep.server import FORK, SPAWN, Server
from stepscope.workloads.registry import find

EMPTY = "def build(index: int = 0):\n    return lambda: None\n"


def seconds_of(runner: Runner, point: Any) -> float:
    """Wall seconds of one point, from asking for it to having its row."""
    began = time.perf_counter()
    row = runner.run(point)
    seconds = time.perf_counter() - began
    if row["status"] != "ok":
        raise SystemExit(f"{row['status']}: {row['reason']}")
    return seconds


def measure(name: str, words: list[str], device: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds a point by way of starting it; the ways take turns."""
    workload = find(name)
    grid = Grid(workload, {"device": device, "warmup": 1, "steps": 1})
    (point,) = grid.points([grid.words(words)])
    seconds: dict[str, list[float]] = {FORK: [], SPAWN: []}
    with Results(folder, {}, True, "") as results, Server(FORK) as forks, Server(SPAWN) as spawns:
        runners = {
            FORK: Runner(workload, forks, results, Options()),
            SPAWN: Runner(workload, spawns, results, Options()),
        }
        for runner in runners.values():
            seconds_of(runner, point)  # the server's own start, and files read for the first time
        for _ in range(rounds):
            for start, runner in runners.items():
                seconds[start].append(seconds_of(runner, point))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    print("| point | start | median s | p10–p90 s | points a minute | times fewer seconds |")
    print("|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as temporary:
        empty = Path(temporary) / "empty.py"
        empty.write_text(EMPTY)
        for title, name, words in (
            ("empty", f"{empty}:build", []),
            ("cs336 tiny", "cs336", ["preset=tiny", "attention=sdpa"]),
        ):
            seconds = measure(name, words, arguments.device, arguments.rounds, Path(temporary) / title)
            medians = {start: statistics.median(values) for start, values in seconds.items()}
            for start, values in seconds.items():
                cuts = statistics.quantiles(values, n=10)
                print(
                    f"| {title} | {start} | {medians[start]:.3f} | {cuts[0]:.3f}–{cuts[-1]:.3f} "
                    f"| {60 / medians[start]:.0f} | {medians[SPAWN] / medians[start]:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
