"""Plants a cause in a training step, measures the step with it and without it, and records both as traces.

    python benchmarks/plant_traces.py -o plants [NAME…] [--small]      where torch and a GPU are
    python benchmarks/plant_accuracy.py plants                         anywhere: what diagnose makes of them

For each plant: NAME.slow.json.gz and NAME.fixed.json.gz, two steps each of torch.profiler with shapes and memory,
and a line in truth.json with the clean steps and peaks of both, taken without a profiler, one step in turns: a host
that others share may be twice as slow a second later, so the saving is the median difference of neighbors, and its
quartiles are beside it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
MODULES = ("host", "kernels", "lookups_and_loops", "models", "recordings", "strangers")
NUM_WARM, NUM_ROUNDS = 3, 20


def plants() -> dict[str, Callable]:
    found = {}
    for name in MODULES:
        found |= importlib.import_module(f"plants.{name}").PLANTS
    return found


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed_ms(step: Callable[[], None]) -> float:
    step()  # what the other one left behind, an empty cache say, is this one's to clear away
    synchronize()
    start_ns = time.perf_counter_ns()
    step()
    synchronize()
    return (time.perf_counter_ns() - start_ns) / 1e6


def peak_gib(step: Callable[[], None]) -> float | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def record(step: Callable[[], None], path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(
        activities=activities, schedule=schedule(wait=0, warmup=1, active=2), record_shapes=True, profile_memory=True,
        acc_events=True, on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:  # fmt: skip
        for _ in range(3):
            step()
            synchronize()
            profiler.step()


def plant(name: str, build: Callable, folder: Path, small: bool) -> dict[str, object]:
    slow, fixed, what = build(torch.device("cuda" if torch.cuda.is_available() else "cpu"), small=small)
    for step in (slow, fixed):
        for _ in range(NUM_WARM):
            step()
    times: dict[str, list[float]] = {"slow": [], "fixed": []}
    for _ in range(NUM_ROUNDS):
        for which, step in (("slow", slow), ("fixed", fixed)):
            times[which].append(timed_ms(step))
    savings = [slow_ms - fixed_ms for slow_ms, fixed_ms in zip(times["slow"], times["fixed"])]
    truth: dict[str, object] = {"what": what, "saving_quartiles_ms": statistics.quantiles(savings, n=4)}
    for which, step in (("slow", slow), ("fixed", fixed)):
        truth[f"{which}_ms"] = statistics.median(times[which])
        truth[f"{which}_gib"] = peak_gib(step)
        record(step, folder / f"{name}.{which}.json.gz")
    return truth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU: to try the plants themselves")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "truth.json"
    truth = json.loads(path.read_text()) if path.is_file() else {}
    for name, build in plants().items():
        if arguments.names and name not in arguments.names:
            continue
        began = time.monotonic()
        try:
            truth[name] = plant(name, build, arguments.output, arguments.small)
        except Exception as error:  # one plant's failure is its own
            truth[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        path.write_text(json.dumps(truth, indent=1))
        print(f"{name:32} {truth[name]}  ({time.monotonic() - began:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
