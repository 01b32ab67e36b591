"""The process that starts points and watches over them.

It has imported torch and never run an op nor touched CUDA, so that a fork of it is a fresh process with torch in it:
that saves each point the seconds of the import. `--start spawn` starts a new interpreter for each point instead.

It is a process of its own, because the one that reads the grid may have run anybody's code. It reads one request a
line and answers with one `Ending` a line; when its input ends, it kills the point that is running, and ends.
"""

from __future__ import annotations

import contextlib
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
from stepscope.sweep.process import (
    CHILD_SUBREAPER,
    PARENT_DEATH_SIGNAL,
    begin,
    die_with_parent,
    request_of,
    set_process,
)

FORK, SPAWN = "fork", "spawn"
# How long a point may run on unseen; each look costs some microseconds.
LOOK_EVERY_S = 0.02
# How long the server's own end may stay unseen by who waits for an answer.
LOOK_FOR_SERVER_S = 1.0
# How long what a point left behind may take to die: only the kernel can hold it up.
REAP_S = 5.0


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
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, request: Request) -> Ending:
        """Run one point to its end."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._begin()
        assert process.stdin is not None and process.stdout is not None
        began = time.monotonic()
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(request)).encode() + b"\n")
            process.stdin.flush()
            return Ending(**json.loads(_answer(process)))
        except (BrokenPipeError, ValueError, TypeError):
            pass
        # It was killed from outside, or somebody wrote into its answers. Its point dies with it.
        process.kill()
        code = process.wait()
        self._let_go()
        return Ending(exit_code=code, timed_out=False, memory_kill=False, seconds=time.monotonic() - began)

    def _begin(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is for the process that talks with the user.
        return subprocess.Popen(
            [sys.executable, "-m", "stepscope.sweep.server", self._start, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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
            self._let_go()

    def _let_go(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of the server; empty when it has ended, whoever else may hold its pipe open."""
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], LOOK_FOR_SERVER_S)[0]:
        if process.poll() is not None:
            return b""
    return process.stdout.readline()


def serve(start: str, parent_id: int) -> None:
    """Answer requests on standard input, of the process `parent_id`, until it ends."""
    die_with_parent(parent_id)
    set_process(CHILD_SUBREAPER, 1)  # what a point leaves behind becomes our child
    # Answers go to a descriptor of our own: whatever a library prints must not be taken for one.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if start == FORK:
        _import_torch()
        if _has_touched_cuda():
            with contextlib.suppress(OSError):
                print("stepscope: importing torch touched CUDA here: points are spawned", file=sys.stderr)
            start = SPAWN
    # From now on the end of our input says that the parent is gone: time to kill a point with all it has started.
    set_process(PARENT_DEATH_SIGNAL, 0)
    for line in _lines():
        request = request_of(json.loads(line))
        ending = watch(start_point(request, start), request.timeout_s)
        print(json.dumps(dataclasses.asdict(ending)), file=answers, flush=True)


def start_point(request: Request, start: str) -> int:
    """Start a point in a process and a session of its own; returns its process id."""
    if start == SPAWN:
        text = json.dumps(dataclasses.asdict(request))
        words = [sys.executable, "-m", "stepscope.sweep.process", text, str(os.getpid())]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        process.returncode = 0  # it is waited for below, by its id
        return process.pid
    server_id = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            begin(request, server_id)
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
            kill_descendants()
            os._exit(1)
        if not timed_out and time.monotonic() - began > timeout_s:
            timed_out = True
            _kill_group(pid)
    _kill_group(pid)  # what it started and left behind
    kill_descendants()
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


def kill_descendants() -> None:
    """Kill all our children and, as each becomes ours when its parent dies, all of theirs: also in other sessions."""
    end = time.monotonic() + REAP_S
    while time.monotonic() < end:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not reaped:
            for pid in _children():
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            time.sleep(0.001)


def _children() -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = place.read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has ended
        if int(parent) == os.getpid():
            found.append(int(place.parent.name))
    return found


def _import_torch() -> None:
    """Import what points need, without running an op: threads do not survive a fork, nor does CUDA."""
    # The usual test whether there is a GPU initializes CUDA; this one asks the driver's library instead.
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    # torch._dynamo: every optimizer's step wants it, and it takes as long as torch itself.
    names = ["torch._dynamo", "torch.profiler", "torch.utils.flop_counter", "stepscope.workloads.registry"]
    names += [f"stepscope.recorder.{name}" for name in ("compiler.compile_watch", "environment", "ledger.ledger")]
    names += [f"stepscope.sweep.{name}" for name in ("measure", "prepare")]
    names += [f"stepscope.sweep.checks.{name}" for name in ("compiled_graphs", "gate", "proofs")]
    for name in names:
        importlib.import_module(name)
    del os.environ[variable]
    if before is not None:
        os.environ[variable] = before
    # No collection in a point looks at all of torch's objects again, nor copies their pages.
    gc.collect()
    gc.freeze()


def _has_touched_cuda() -> bool:
    """Whether CUDA was initialized in this process: a fork of it could not use the GPU."""
    import torch

    return bool(torch.cuda.is_initialized()) or any(map(_is_cuda_memory, Path("/proc/self/fd").iterdir()))


def _is_cuda_memory(descriptor: Path) -> bool:
    try:
        return descriptor.readlink().name == "nvidia-uvm"
    except OSError:
        return False  # it was the listing's own


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # nothing is left to be done, and torch takes its time to go
