"""Decodes one trace in several threads or processes."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from queue import SimpleQueue

import polars as pl

from stepscope.errors import TraceError
from stepscope.trace.decode import Decoded, decode_slice, identity, receive_answer, send
from stepscope.trace.source import Slice, Source

Result = Callable[[], Decoded]  # returns a slice's result, or raises its error
MOST_WORKERS = 4  # more would be faster but need more memory at once
_START = "import sys; sys.path[:] = {path!r}; from stepscope.trace.decode import main; main({file!r}, {file_id!r})"


def num_workers() -> int:
    """Return the number of processes to start: one per usable core, at most as many as Polars has threads."""
    if not sys.executable or getattr(sys, "frozen", False):
        return 1  # there is no interpreter to start
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return min(MOST_WORKERS, cores, pl.thread_pool_size())


class Threads(AbstractContextManager["Threads"]):
    """Threads of this process, which run side by side where the compiled scanner does the work."""

    def __init__(self, source: Source, size: int) -> None:
        self.size = size
        self._source = source
        self._threads = ThreadPoolExecutor(size)  # starts no thread yet

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def decode(self, slices: Iterable[Slice]) -> Iterator[tuple[Slice, Result]]:
        """Yield each slice and its result in file order, a few ahead of the one requested."""
        pending: deque[tuple[Slice, Future[Decoded]]] = deque()
        for part in slices:
            pending.append((part, self._threads.submit(self._run, part)))
            if len(pending) > 2 * self.size:
                yield _next(pending)
        while pending:
            yield _next(pending)

    def _run(self, part: Slice) -> Decoded:
        return decode_slice(self._source.bytes_of(part), part.base)


class Processes(Threads):
    """Worker processes that live as long as the `with` block, each with a thread that waits for it.

    Raises OSError if the system cannot start processes.
    """

    def __init__(self, source: Source, size: int) -> None:
        super().__init__(source, size)
        start = _START.format(
            path=[str(entry) for entry in sys.path],
            file=str(source.path.absolute()),
            file_id=identity(source.fileno()),
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        try:
            for _ in range(size):
                process = subprocess.Popen(
                    [sys.executable, "-c", start],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,  # the user's terminal must not receive its traceback
                    env=os.environ | {"POLARS_MAX_THREADS": "1"},
                )
                self._processes.append(process)
                self._free.put(process)
        except BaseException:  # the system has none left, or the user interrupted
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # a waiting thread gets the end of its pipe
        super().__exit__()
        for process in self._processes:
            process.communicate()

    def _run(self, part: Slice) -> Decoded:
        process = self._free.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, (part.base, part.length, part.data))
            return receive_answer(process.stdout)
        except (OSError, EOFError):
            raise TraceError(
                f"A process that was decoding the trace at byte {part.base:,} died (exit code {_end(process)}). "
                "The trace is intact. If memory was short, try again when there is more."
            ) from None
        finally:
            self._free.put(process)  # even if dead: nobody must wait for it forever


def _next(pending: deque[tuple[Slice, Future[Decoded]]]) -> tuple[Slice, Result]:
    part, future = pending.popleft()
    wait((future,))
    return part, future.result


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
