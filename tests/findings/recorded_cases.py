"""Cases made of recordings that are written by hand: no trace, round numbers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from forks import Forks
from handmade import MS, cpu_facts, sample, write_recording
from stepscope.session import open_session
from stepscope.session.case import Case

GPU = {"device": "cuda", "device_name": "NVIDIA H200", "torch": "2.11.0", "rank": 0, "world_size": 1}


def recorded(
    folder: Path,
    step_ms: list[float],
    nvml: list[dict[str, Any]] | None = None,
    window: dict[str, Any] | None = None,
    is_gpu: bool = False,
    where: str = "forward",
    **facts: Any,
) -> Case:
    """A recording of clean steps so long; what a step takes above 10 ms is in the phase `where`, the rest is forward.

    Of a GPU each step's time is also the device's. `nvml` is for counters.jsonl, `window` for memory.json.gz.
    """
    lines = []
    start_ns = 0
    for step, ms in enumerate(step_ms):
        usual = min(10.0, ms)
        host = {"forward": round(usual * MS)}
        host[where] = host.get(where, 0) + round((ms - usual) * MS)
        device = {"device_ns": {"forward": round(ms * MS)}} if is_gpu else {}
        lines.append(sample(step, host_ns=host, start_ns=start_ns, **device))
        start_ns += round(ms * MS)
    environment = {"environment": GPU} if is_gpu else {}
    write_recording(folder, cpu_facts(trace=None, **{**environment, **facts}), lines, nvml)
    if window is not None:
        (folder / "memory.json.gz").write_bytes(gzip.compress(json.dumps({"schema_version": 2, **window}).encode()))
    return open_session(folder, use_cache=False).case


def tensor(num_bytes: int, born: int | None = None, died: int | None = None, **fields: Any) -> dict[str, Any]:
    """An allocation of memory.json.gz on the processor."""
    base: dict[str, Any] = {"device": "cpu", "dtype": "float32", "shape": [num_bytes // 4], "owner": "other"}
    return {**base, "bytes": num_bytes, "born": born, "died": died, **fields}


def run_script(forks: Forks, folder: Path, script: str, *options: str) -> Case:
    """A real recording: `stepscope run` of a script, on the processor, in a fork of a process that has torch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script)
    code, _, error = forks.run(["-m", "stepscope", "run", "--quiet", "-o", "run", *options, "train.py"], folder, {})
    assert code == 0, error
    return open_session(folder / "run", use_cache=False).case


TRAINING = """
import time, torch
torch.manual_seed(0); torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
kept = []
for step in range({num_steps}):
    x = torch.ones(32, 64)
    loss = net(x).square().mean()
    loss.backward({backward})
    optimizer.step()
    optimizer.zero_grad()
    {also}
"""
"""A script of so many steps that does something else at the end of each."""
