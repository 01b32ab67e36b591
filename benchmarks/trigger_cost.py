"""What `stepscope trigger` costs two gloo ranks outside the window that it takes.

    python benchmarks/trigger_cost.py [--triggers 8] [--seconds 6]

One training of two ranks under `stepscope run`, from which windows are taken. Each rank notes the CPU time of the
thread that trains for every step, because other processes share the machine. `outside` is the median CPU time of the
steps from the request to the window and from the window on for as long as before, over that of the steps before the
request; `nothing` is the same ratio where there was no request: the noise. Both are medians over all triggers
and ranks, with bootstrap intervals. The windows of both ranks must begin at the same step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from pathlib import Path

import stepscope
from stepscope.trace.recording import read_recording

TRAIN = """
import json, sys, time, torch, torch.distributed as dist
from pathlib import Path
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
is_over, steps = torch.zeros(1), []
while not is_over:
    began, cpu = time.perf_counter_ns(), time.thread_time_ns()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps.append((began, time.thread_time_ns() - cpu))
    if len(steps) % 50 == 0:
        is_over.fill_((folder / "stop").exists())
        dist.broadcast(is_over, 0)
(folder / f"steps{rank}.json").write_text(json.dumps(steps))
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triggers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6.0, help="before each trigger, and after it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch += ["-m", "stepscope", "run", "--quiet", "--trace", "0", "--no-memory", "-o", "run", "train.py", name]
        with subprocess.Popen(launch, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}) as job:
            while not (folder / "run" / "rank1" / "history.jsonl").exists():
                assert job.poll() is None, "the job ended before its first window"
                time.sleep(0.2)
            asked, quiet = [], []
            for _ in range(arguments.triggers):
                time.sleep(arguments.seconds)
                quiet.append(time.perf_counter_ns())
                time.sleep(2 * arguments.seconds)
                begin = time.perf_counter_ns()
                window = stepscope.trigger(folder / "run", trace=2, clean=3)
                assert window is not None
                asked.append((begin, window))
            time.sleep(2 * arguments.seconds)
            (folder / "stop").touch()
            assert job.wait() == 0
        report(folder, asked, quiet, round(arguments.seconds * 1e9))


def report(folder: Path, asked: list[tuple[int, Path]], quiet: list[int], length_ns: int) -> None:
    outside, nothing, firsts = [], [], []
    for rank in range(2):
        steps = json.loads((folder / f"steps{rank}.json").read_text())
        starts = [start for start, _ in steps]

        def cpu(begin_ns: int, end_ns: int, steps: list[list[int]] = steps, starts: list[int] = starts) -> list[int]:
            return [ns for _, ns in steps[bisect_left(starts, begin_ns) : bisect_left(starts, end_ns)]]

        for begin, window in asked:
            samples = read_recording(window if rank == 0 else window / f"rank{rank}").samples
            firsts.append(samples[0].step)
            end = samples[-1].end_ns + 1_000_000_000  # while the trace is written, no step runs
            then = cpu(begin, samples[0].start_ns) + cpu(end, end + length_ns)
            outside.append(statistics.median(then) / statistics.median(cpu(begin - length_ns, begin)))
        for at in quiet:
            ratio = statistics.median(cpu(at, at + length_ns)) / statistics.median(cpu(at - length_ns, at))
            nothing.append(ratio)
    num = len(asked)
    assert firsts[:num] == firsts[num:], "windows begin at different steps"
    print(f"{num} windows, at the same steps on both ranks: {firsts[:num]}")
    for name, ratios in (("outside", outside), ("nothing", nothing)):
        drawn = random.Random(0)
        medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
        middle = statistics.median(ratios)
        print(f"{name:8}  ratio {middle:.4f}  95 % interval {medians[50]:.4f} to {medians[-51]:.4f}")


if __name__ == "__main__":
    main()
