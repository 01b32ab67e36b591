"""The process that starts points and watches over them.

It has imported torch and never run an op nor touched CUDA, so that a fork of it is a fresh process with torch in it:
that saves each point the seconds of the import. `--start spawn` starts a new interpreter for each point instead.

It is a process of its own, because the one that reads the grid may have run anybody's code. It reads one request a
line and answers with one `Ending` a line; when its input ends, it kills the point that is running, and ends.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stepscope.sweep import memory
from stepscope.sweep.point_process import Request
from stepscope.sweep.process import begin, request_of

FORK, SPAWN = "fork", "spawn"
# How long a point may run on unseen; each look costs some microseconds.
LOOK_EVERY_S = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a point's process ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    timed_out: bool
    memory_kill: bool
    """Whether the kernel killed something for want of memory meanwhile."""
    seconds: float


def default_start() -> str:
    """`fork` where it is safe: Linux."""
    return FORK if sys.platform == "linux" else SPAWN


class Server:
    """The near end: `run(request)` returns how the point's process ended. A server that dies is started again."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._process: subprocess.Popen[str] | None = None

    def run(self, request: Request) -> Ending:
        """Run one point to its end."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._begin()
        assert process.stdin is not None and process.stdout is not None
        began = time.monotonic()
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(request)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return Ending(**json.loads(line))
        # Killed from outside; its point died with it.
        code = process.wait()
        return Ending(exit_code=code, timed_out=False, memory_kill=False, seconds=time.monotonic() - began)

    def _begin(self) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C is for the process that talks with the user.
        return subprocess.Popen(
            [sys.executable, "-m", "stepscope.sweep.server", self._start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the server and the point that it is running, if any."""
        if self._process is not None and self._process.stdin is not None and self._process.stdout is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def serve(start: str) -> None:
    """Answer requests on standard input until it ends."""
    # Answers go to a descriptor of our own: whatever a library prints must not be taken for one.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if start == FORK:
        _import_torch()
        if _has_touched_cuda():
            print("stepscope: importing torch touched CUDA here: points are spawned", file=sys.stderr)
            start = SPAWN
    for line in _lines():
        request = request_of(json.loads(line))
        ending = watch(start_point(request, start), request.timeout_s)
        print(json.dumps(dataclasses.asdict(ending)), file=answers, flush=True)


def start_point(request: Request, start: str) -> int:
    """Start a point in a process and a session of its own; returns its process id."""
    if start == SPAWN:
        words = [sys.executable, "-m", "stepscope.sweep.process", json.dumps(dataclasses.asdict(request))]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        process.returncode = 0  # it is waited for below, by its id
        return process.pid
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            begin(request)
        finally:
            os._exit(1)
    return pid


def watch(pid: int, timeout_s: float) -> Ending:
    """Wait for a point's process, and see to it that nothing of it is left."""
    began, kills = time.monotonic(), memory.num_oom_kills()
    timed_out = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if _is_abandoned():
            _kill_group(pid)
            os.waitpid(pid, 0)
            os._exit(1)
        if not timed_out and time.monotonic() - began > timeout_s:
            timed_out = True
            _kill_group(pid)
    _kill_group(pid)  # what it started and left behind
    return Ending(
        exit_code=os.waitstatus_to_exitcode(status),
        timed_out=timed_out,
        memory_kill=memory.num_oom_kills() > kills,
        seconds=time.monotonic() - began,
    )


def _is_abandoned() -> bool:
    """Whether nobody is there any more to be answered; takes LOOK_EVERY_S to find out."""
    readable, _, _ = select.select([0], [], [], LOOK_EVERY_S)
    # Nobody sends a request before the last one is answered: what can be read is the end.
    return bool(readable)


def _lines() -> Any:
    # Not sys.stdin: its buffer would hide from `select` what has arrived, and a fork would copy it.
    buffer = b""
    while True:
        piece = os.read(0, 1 << 16)
        if not piece:
            return
        buffer += piece
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            yield line


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _import_torch() -> None:
    """Import what points need, without running an op: threads do not survive a fork, nor does CUDA."""
    # The usual test whether there is a GPU initialises CUDA; this one asks the driver's library instead.
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    # torch._dynamo: every optimizer's step wants it, and it takes as long as torch itself.
    names = ["torch._dynamo", "torch.profiler", "torch.utils.flop_counter", "stepscope.workloads.registry"]
    names += [f"stepscope.record.{name}" for name in ("compiler", "environment", "ledger")]
    names += [f"stepscope.sweep.{name}" for name in ("compiled_graphs", "gate", "measure", "prepare", "proofs")]
    for name in names:
        importlib.import_module(name)
    del os.environ[variable]
    if before is not None:
        os.environ[variable] = before
    # No collection in a point looks at all of torch's objects again, nor copies their pages.
    gc.collect()
    gc.freeze()


def _has_touched_cuda() -> bool:
    """Whether CUDA was initialised in this process: a fork of it could not use the GPU."""
    import torch

    return bool(torch.cuda.is_initialized()) or any(map(_is_cuda_memory, Path("/proc/self/fd").iterdir()))


def _is_cuda_memory(descriptor: Path) -> bool:
    try:
        return descriptor.readlink().name == "nvidia-uvm"
    except OSError:
        return False  # it was the listing's own


if __name__ == "__main__":
    serve(sys.argv[1])
    os._exit(0)  # nothing is left to be done, and torch takes its time to go
