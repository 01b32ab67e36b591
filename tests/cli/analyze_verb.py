"""`stepscope analyze` called, and a trace to call it with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from trace_builder import AUTOGRAD, TraceBuilder
from verbs import run_verb

WIDTH = 100


def training() -> TraceBuilder:
    """Two steps: forward, backward, optimizer; a copy beside them and an all-reduce."""
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    for number, begin in ((4, 0), (5, 200)):
        trace.step(number, begin, 190).op("aten::mm", begin + 10, 30, id=number, sequence=number)
        trace.launch("void gemm_kernel<float>(int)", begin + 15, (begin + 30, 40), id=number)
        node = "autograd::engine::evaluate_function: MmBackward0"
        trace.op(node, begin + 60, 40, AUTOGRAD, sequence=number, forward_thread=1)
        trace.launch("gemm_backward_kernel", begin + 65, (begin + 80, 30), thread=AUTOGRAD)
        trace.annotation("Optimizer.step#SGD.step", begin + 120, 40).op("aten::add_", begin + 125, 10)
        trace.launch("add_kernel", begin + 130, (begin + 140, 10))
        trace.kernel("ncclDevKernel_AllReduce", begin + 100, 20, stream=20)
    return trace.memcpy(5, 10)


def analyze(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the verb without a terminal."""
    return run_verb("analyze", *words, env=environment)


def as_json(*words: str | Path, **environment: str) -> dict[str, Any]:
    done = analyze(*words, "--json", **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


def assert_mistake(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing printed, one line of complaint with these words in it."""
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("stepscope analyze: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
