"""The one thread that writes a recording's files, so that a slow disk never holds up the script.

What waits to be written is bounded: on a disk that does not answer for minutes, lines are dropped and counted.
"""

from __future__ import annotations

import _thread
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from stepscope.recorder import wall
from stepscope.recorder.files import LineFile

POLL_SECONDS = 0.25
MOST_WAITING = 20_000  # lines: 5 MB
CLOSE_SECONDS = 20.0
SETTLE_SECONDS = 0.25
MOST_SETTLE_SECONDS = 3.0  # in the whole run
LEAST_STOPPED_NS = 1_000_000_000


class Writer:
    """Runs what it is given, in order, in its thread. Without a thread, it runs it at once.

    The thread starts with the first step, not with the script, which may fork before it trains. It is not one of
    `threading`'s, because scripts count those.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        """Why nothing is written any more."""
        self.ticks: list[Callable[[], None]] = []
        """What the thread calls, some four times per second, before it writes."""
        self.stopped: Callable[[int, int], None] = lambda start_ns, ns: None
        """What the thread calls, with when and how long, if the whole process was stopped."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._num_waiting = 0
        self._pid: int | None = None
        self._is_closing = False
        self._settling: deque[Callable[[], None]] = deque()
        self._patience_s = MOST_SETTLE_SECONDS
        self._wakes, self._is_idle = _thread.allocate_lock(), _thread.allocate_lock()

    @property
    def has_thread(self) -> bool:
        return self._pid == os.getpid()

    def start(self) -> None:
        """Start the thread."""
        if self._pid is None:
            self._wakes.acquire()
            self._is_idle.acquire()
            self._pid = os.getpid()
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the limit on processes is reached
                self._pid = -1

    def put(self, job: Callable[[], None]) -> None:
        """Run a job: soon and in the thread, or at once if there is none."""
        if self.error is not None:
            return
        if self.has_thread:
            self._jobs.append(job)
        else:
            job()

    def append(self, file: LineFile, lines: list[str]) -> None:
        """Append lines to a file, unless too many wait already."""
        if not lines:
            return
        if self.error is not None or self._num_waiting > MOST_WAITING:
            file.num_dropped += len(lines)
            return
        self._num_waiting += len(lines)
        self.put(partial(self._append, file, lines))

    def _append(self, file: LineFile, lines: list[str]) -> None:
        self._num_waiting -= len(lines)
        file.append("\n".join(lines), len(lines))

    def wake(self) -> None:
        """Let the thread work now instead of a quarter of a second later."""
        if self.has_thread and self._wakes.locked():
            try:
                self._wakes.release()
            except RuntimeError:
                pass  # it woke by itself

    def settle(self) -> None:
        """Wait until all that was put is written, so that a kill loses nothing; not on a disk that is slow."""
        if self.has_thread and self._patience_s > 0 and self.error is None:
            is_written, began = _thread.allocate_lock(), time.perf_counter()
            is_written.acquire()
            self._settling.append(is_written.release)
            self.wake()
            is_written.acquire(timeout=SETTLE_SECONDS)
            self._patience_s -= time.perf_counter() - began

    def close(self) -> None:
        """Wait until everything is written, but not forever."""
        if not self.has_thread:
            return
        self._is_closing = True
        self.wake()
        if not self._is_idle.acquire(timeout=CLOSE_SECONDS):
            self._end(f"the disk did not answer for {CLOSE_SECONDS:.0f} s: the recording lacks its end")
        self._pid = -1

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._wait()
                self._work()
            self._work()
        except BaseException as error:
            self._end(f"{type(error).__name__}: {' '.join(wall.message(error).split())[:200]}")
        finally:
            self._is_idle.release()

    def _wait(self) -> None:
        """Wait until there is work. If that took far longer and nothing ran, a signal or a debugger stopped us."""
        began_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        self._wakes.acquire(timeout=POLL_SECONDS)
        ns = time.perf_counter_ns() - began_ns
        if ns > LEAST_STOPPED_NS + POLL_SECONDS * 1e9 and time.process_time_ns() - cpu_ns < ns / 10:
            self.stopped(began_ns, ns)

    def _work(self) -> None:
        # Who begins to wait from here on may have put something that the ticks miss.
        settling = [self._settling.popleft() for _ in range(len(self._settling))]
        for tick in self.ticks:
            tick()
        while self._jobs and self.error is None:
            self._jobs.popleft()()
        for release in settling:
            release()

    def _end(self, why: str) -> None:
        """Write nothing from here on. The session ends the measurement when it next looks."""
        if self.error is None:
            self.error = why
            wall.tell(f"the recording ended ({why}); the script goes on")
