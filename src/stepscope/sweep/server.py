"""The process that starts points and supervises them.

It has imported torch but never run an op or initialized CUDA. A fork of it is a fresh process with torch already
imported, which saves seconds per point. `--start spawn` starts a new interpreter for each point instead.

It is a separate process because the process that reads the grid may have run user code. It reads one request per line
and answers with one `Ending` per line. When its input ends, it kills the running point and exits.
"""

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
from stepscope.sweep.process import CHILD_SUBREAPER, PARENT_DEATH_SIGNAL, begin, die_with_parent, set_process
from stepscope.sweep.protocol import Ending, Request

FORK, SPAWN = "fork", "spawn"
# How often to check on a running point; a check costs microseconds.
POLL_S = 0.02
# How often a waiting client checks that the server is alive.
POLL_SERVER_S = 1.0
# How long to wait for a point's leftover processes to die.
REAP_S = 5.0


def default_start() -> str:
    """Return `fork` on Linux, where it is safe, else `spawn`."""
    return FORK if sys.platform == "linux" else SPAWN


class Server(contextlib.AbstractContextManager["Server"]):
    """Client of the server: `run(request)` returns how the point's process ended. Restarts a server that died."""

    def __init__(self, start: str, folder: Path | None = None) -> None:
        """Points run in `folder`, by default in that of this process."""
        self._start, self._folder = start, folder
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, request: Request) -> Ending:
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
        # The server was killed from outside, or its answers were corrupted. Its point dies with it.
        code = self._end(process)
        seconds = time.monotonic() - began
        return Ending(exit_code=code, timed_out=False, memory_kill=False, seconds=seconds, lost=True)

    def _begin(self) -> subprocess.Popen[bytes]:
        # Its own session: Ctrl-C is for the process that talks to the user.
        return subprocess.Popen(
            [sys.executable, "-m", "stepscope.sweep.server", self._start, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=self._folder,
        )

    def __exit__(self, *_exception: object) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]  # pipes since _begin
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Kill the server and return its exit code."""
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # pipes since _begin
        self._process = None
        return process.wait()


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    """Return the next line from the server; empty if it has ended, even if another process holds its pipe open."""
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], POLL_SERVER_S)[0]:
        if process.poll() is not None:
            return b""
    return process.stdout.readline()


def serve(start: str, parent_id: int) -> None:
    """Answer requests from process `parent_id` on standard input until it ends."""
    die_with_parent(parent_id)
    set_process(CHILD_SUBREAPER, 1)  # a point's orphaned processes become our children
    # Answers go to a separate descriptor, so that library output is never taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if start == FORK:
        _import_torch()
        if _has_touched_cuda():
            text = "stepscope: importing torch initialized CUDA, so each point starts a new interpreter"
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr)
            start = SPAWN
    # From now on the end of our input means that the parent is gone. That leaves time to kill the running point.
    set_process(PARENT_DEATH_SIGNAL, 0)
    for line in _lines():
        request = Request(**json.loads(line))
        ending = watch(start_point(request, start), request.timeout_s)
        print(json.dumps(dataclasses.asdict(ending)), file=answers, flush=True)


def start_point(request: Request, start: str) -> int:
    """Start a point in its own process and session and return its process id."""
    if start == SPAWN:
        text = json.dumps(dataclasses.asdict(request))
        words = [sys.executable, "-m", "stepscope.sweep.process", text, str(os.getpid())]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        process.returncode = 0  # `watch` waits for it by its id
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
    """Wait for a point's process and kill everything it leaves behind."""
    began, kills = time.monotonic(), memory.num_oom_kills()
    timed_out = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        # No request arrives before the last one is answered, so readable input means that the client is gone.
        if select.select([0], [], [], POLL_S)[0]:
            _kill_group(pid)
            os.waitpid(pid, 0)
            kill_descendants()
            os._exit(1)
        if not timed_out and time.monotonic() - began > timeout_s:
            timed_out = True
            _kill_group(pid)
    _kill_group(pid)  # its leftover children
    kill_descendants()
    return Ending(
        exit_code=os.waitstatus_to_exitcode(status),
        timed_out=timed_out,
        memory_kill=memory.num_oom_kills() > kills,
        seconds=time.monotonic() - began,
    )


def _lines() -> Any:
    # Not sys.stdin: its buffer would hide input from `select`, and a fork would copy it.
    buffer = b""
    while piece := os.read(0, 1 << 16):
        *lines, buffer = (buffer + piece).split(b"\n")
        yield from lines


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all descendants, in other sessions too, and wait for them: when a child dies, its children become ours."""
    end = time.monotonic() + REAP_S
    while time.monotonic() < end:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not reaped:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have; none where /proc is not there."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = children.get(pid, [])
    for each in found:  # which grows meanwhile
        found += children.get(each, [])
    return found


def _import_torch() -> None:
    """Import what points need without running an op: neither threads nor CUDA survive a fork."""
    # The usual check for a GPU initializes CUDA; with this variable torch asks NVML instead.
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    # Every optimizer step needs torch._dynamo, which takes as long to import as torch itself.
    for name in ("torch._dynamo", "torch.profiler", "torch.utils.flop_counter", "stepscope.sweep.point_stages"):
        importlib.import_module(name)
    del os.environ[variable]
    if before is not None:
        os.environ[variable] = before
    # Garbage collection in a point then skips torch's objects and does not copy their pages.
    gc.collect()
    gc.freeze()


def _has_touched_cuda() -> bool:
    """Return whether CUDA is initialized in this process; a fork of it could not use the GPU."""
    import torch

    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if descriptor.readlink().name == "nvidia-uvm":
                return True
    return bool(torch.cuda.is_initialized())


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # nothing is left to do, and torch is slow to shut down
