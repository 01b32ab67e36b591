"""Many points and many opens: memory and time per point stay what they were at the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from stepscope.analysis.comparison.sweeps import sweep_of
from stepscope.rows import read_rows
from stepscope.sweep.grid import Point
from stepscope.sweep.results import Results
from stepscope.sweep.runner import identity, run_points

ROOT = Path(__file__).parents[2]
RUN = {"mode": "step", "dtype": "fp32", "device": "cpu", "optimizer": "adamw", "compile": "off"}


def points(num: int) -> list[Point]:
    return [
        Point(workload="x", preset=None, config={"width": width}, run=RUN, hash=f"{width:012x}")
        for width in range(num)
    ]


def row(point: Point) -> dict:
    samples = [1_000_000 + step for step in range(3)]
    return {**identity(point), "status": "ok", "samples_device_ns": samples, "samples_host_ns": samples}


@pytest.mark.parametrize("num", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_sweep_of_many_points_takes_the_same_time_and_memory_for_each(tmp_path, num):
    marks: list[tuple[float, int]] = []

    def on_row(_: dict, num_done: int) -> None:
        if num_done % (num // 4) == 0:
            marks.append((time.process_time(), tracemalloc.get_traced_memory()[0]))

    tracemalloc.start()
    try:
        with Results(tmp_path, {"command": "test"}, False, "") as results:
            run_points(points(num), results, row, on_row)
        quarters = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(marks)]
    finally:
        tracemalloc.stop()
    found = read_rows(tmp_path / "results.jsonl").rows
    began = time.process_time()
    assert len(sweep_of(found[: num // 5], {}).points) == num // 5
    whole_s = time.process_time() - began
    began = time.process_time()
    sweep_of(found[: num // 20], {})
    quarter_s = time.process_time() - began

    assert len(found) == len({row["hash"] for row in found}) == num
    line_bytes = (tmp_path / "results.jsonl").stat().st_size / num
    assert max(memory for _, memory in quarters) < 8 * line_bytes * num / 4  # the rows themselves, and nothing more
    assert quarters[-1][1] < 1.3 * quarters[0][1] + 100_000
    assert quarters[-1][0] < 2.5 * quarters[0][0] + 0.2
    assert whole_s < 8 * quarter_s + 0.5
    print(f"{num} points: seconds and bytes of each quarter {quarters}; a fifth summarized in {whole_s:.2f} s")


MANY_POINTS = """
import os, sys
sys.path[:0] = sys.argv[3:]
import fault_campaign as faults
from pathlib import Path
from types import SimpleNamespace
from stepscope.sweep.grid import Point
from stepscope.sweep.results import Place
from stepscope.sweep.runner import Options, Runner, run_points
faults.preload(())
def resident(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
def on_row(row, num_done):
    if num_done % (num // 4) == 0:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        print(resident(os.getpid()), resident(server._process.pid), descriptors, row["status"], flush=True)
num, run = int(sys.argv[2]), {"mode": "step", "dtype": "fp32", "device": "cpu", "optimizer": "adamw"}
run["compile"] = "off"
points = [Point(workload="x", preset=None, config={"width": i}, run=run, hash=f"{i:012x}") for i in range(num)]
place = Place(folder=Path(sys.argv[1]), command="test", resume=True, resume_command="")
with place.open() as results, faults.fake_server() as server:
    run_points(points, results, Runner(SimpleNamespace(gate={}), server, results, Options()).run, on_row)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_processes_of_a_sweep_do_not_grow(tmp_path):
    """Real processes, one a point, that do nothing."""
    words = [
        sys.executable,
        "-c",
        MANY_POINTS,
        str(tmp_path / "sweep"),
        "800",
        str(ROOT / "tests"),
        str(ROOT / "src"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    marks = [line.split() for line in done.stdout.splitlines()]

    assert len(marks) == 4 and {mark[3] for mark in marks} == {"ok"}, done.stdout + done.stderr
    assert len({mark[2] for mark in marks}) == 1  # descriptors
    assert int(marks[-1][1]) <= int(marks[0][1]) + 512  # KiB of the server
    assert int(marks[-1][0]) <= int(marks[0][0]) + 4096  # the driver keeps its rows


OPENS = """
import json, sys
from pathlib import Path
from stepscope.trace import cache
real, num_read = cache.read_trace, 0
def read(*words):
    global num_read
    num_read += 1
    return real(*words)
cache.read_trace, cache._SETTLED_NS = read, 0
resident = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
marks, heights = [], set()
for number in range(int(sys.argv[2])):
    heights.add(cache.open_trace(Path(sys.argv[1])).host.height)
    marks.append(resident())
print(json.dumps([num_read, marks, sorted(heights)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.long
def test_a_thousand_opens_of_one_trace_by_eight_processes_take_no_more_memory(tmp_path):
    each = 125
    trace = tmp_path / "trace.json"
    common = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 1}
    events = [{**common, "name": f"op{i % 99}", "ts": i} for i in range(30_000)]
    trace.write_text(json.dumps({"traceEvents": events}))
    environment = {**os.environ, "STEPSCOPE_CACHE": str(tmp_path / "cache"), "POLARS_MAX_THREADS": "1"}
    words = [sys.executable, "-c", OPENS, str(trace), str(each)]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(8)]
    found = [json.loads(process.communicate()[0]) for process in started]

    assert all(heights == [len(events)] for _, _, heights in found)
    assert all(num_read <= 1 for num_read, _, _ in found)  # each reads the trace at most once
    assert len(list((tmp_path / "cache" / "traces").iterdir())) == 1  # and nothing is left over
    for _, marks, _ in found:
        settled = marks[max(2, each // 5)]
        assert marks[-1] < 1.1 * settled + 8_192, marks
    print([(marks[0], marks[-1]) for _, marks, _ in found])
