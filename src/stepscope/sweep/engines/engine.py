"""The border between a sweep and where its processes run: submit an order, poll it, cancel it.

Locally, `Server` starts a point's process and `run_process` a recording's. An engine has the same two functions,
`run` and `run_process`. It sends an order to a node, waits for the answer, and puts the files of the answer where
a local process would have written them. What a sweep makes of them is the same.
"""

import dataclasses
import io
import os
import pickle
import shutil
import signal
import sys
import tarfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from stepscope.errors import StepscopeError
from stepscope.formatting import plural
from stepscope.sweep.engines.settings import Settings
from stepscope.sweep.protocol import EXIT_CANNOT_WRITE, FROM_OUTSIDE, Ending, Failure, Request
from stepscope.version import __version__

QUEUED, RUNNING, DONE, LOST = "queued", "running", "done", "lost"
Order = dict[str, Any]  # plain values, so that nodes with another version can read it and say so
Answer = dict[str, Any]
Job = Any  # an engine's own handle
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What is known of a job; its `answer` if it is done, the `reason` if it was lost."""

    phase: str
    answer: Answer = dataclasses.field(default_factory=dict)
    reason: str = ""
    node: str | None = None  # as the engine names it


class SchedulerDown(Exception):
    """The engine does not answer now. It may later, and its jobs may go on meanwhile."""


class Cancelled(Exception):
    """The sweep ended before this job did."""


class Engine(AbstractContextManager["Engine"], ABC):
    """Runs orders on nodes, several at a time: `run` and `run_process` may be called in many threads."""

    name: str

    def __init__(self, settings: Settings, folder: Path, say: Say, keeps_node: bool = False) -> None:
        """With `keeps_node`, runs that are compared with each other stay on the node of the first."""
        self.settings, self.folder, self._say, self._keeps_node = settings, folder, say, keeps_node
        self.num_slots = settings.jobs
        self._node: str | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._phases: dict[int, str] = {}
        self._down_since: float | None = None

    @abstractmethod
    def submit(self, order: Order, node: str | None) -> Job:
        """Return the handle of a new job, on `node` if possible."""

    @abstractmethod
    def poll(self, job: Job) -> State:
        """Return the state of a job after waiting a moment for news."""

    @abstractmethod
    def cancel(self, job: Job) -> None:
        """End a job, running or not."""

    @property
    def counts(self) -> dict[str, int]:
        """How many jobs are queued and running."""
        with self._lock:
            found = Counter(self._phases.values())
        return {phase: found[phase] for phase in (QUEUED, RUNNING)}

    def stop(self) -> None:
        """Cancel every job; threads that wait for one get `Cancelled`."""
        self._stopped.set()

    def run(self, request: Request) -> Ending:
        """Run a point on a node; its result, log and trace are written where the request says."""
        fields = {**dataclasses.asdict(request), "log_path": "", "result_path": ""}
        fields["trace_path"] = request.trace_path and Path(request.trace_path).name
        began = time.monotonic()
        answer, attempts, reason = self._answer({"request": fields}, request.timeout_s)
        _write(Path(request.log_path), answer.get("log"))
        if not answer.get("ending"):
            seconds = time.monotonic() - began
            return Ending(exit_code=1, timed_out=False, memory_kill=False, seconds=seconds, lost=True,
                          lost_because=reason, attempts=attempts, node=answer.get("node", ""))  # fmt: skip
        _write(Path(request.result_path), answer.get("result"))
        if request.trace_path:
            _write(Path(request.trace_path), answer.get("trace"))
        found = {"node": answer["node"], "num_neighbors": answer["num_neighbors"], "attempts": attempts}
        return Ending(**{**answer["ending"], **found})

    def run_process(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, timeout_s: float,
        output: Path | None = None,
    ) -> Failure | None:  # fmt: skip
        """Run a command on a node in the same folder; its log and its output folder are written here."""
        known, own = dict(os.environ), ("STEPSCOPE_ASKED_BY",)
        order = {
            "words": ["{python}" if word == sys.executable else "{output}" if word == str(output) else word
                      for word in words],
            "folder": str(folder),
            "set": {name: text for name, text in environment.items() if known.get(name) != text and name not in own},
            "unset": [name for name in known if name not in environment],
            "timeout_s": timeout_s,
        }  # fmt: skip
        answer, attempts, reason = self._answer({"process": order}, timeout_s)
        log.parent.mkdir(parents=True, exist_ok=True)
        _write(log, answer.get("log"))
        if "failure" not in answer:
            return Failure(f"{reason} ({plural(attempts, 'attempt')})", is_lost=True)
        if output is not None and answer.get("output"):
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
            with tarfile.open(fileobj=io.BytesIO(answer["output"]), mode="r:gz") as archive:
                archive.extractall(output, filter="data")
        return None if answer["failure"] is None else Failure(**answer["failure"])

    def map(self, module: str, function: str, tasks: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield what a function of Stepscope returns on a node for each of some arguments, in their order.

        The first argument is a path that the node must have. No more than the slots are begun or waiting to be
        taken, so that memory does not grow with the number of tasks.
        """
        with ThreadPoolExecutor(self.num_slots) as pool:
            try:
                begun: deque[Future[Any]] = deque()
                for task in tasks:
                    if len(begun) == self.num_slots:
                        yield begun.popleft().result()
                    begun.append(pool.submit(self._returned, module, function, task))
                while begun:
                    yield begun.popleft().result()
            finally:
                self.stop()

    def _returned(self, module: str, function: str, arguments: tuple[Any, ...]) -> Any:
        call = {"module": module, "function": function, "path": arguments[0], "arguments": pickle.dumps(arguments)}
        answer, attempts, reason = self._answer({"call": call}, 0.0)
        if "error" in answer:
            raise pickle.loads(answer["error"])
        if "value" not in answer:
            raise StepscopeError(f"{arguments[0]}: {reason} ({plural(attempts, 'attempt')})")
        return pickle.loads(answer["value"])

    def _answer(self, order: Order, timeout_s: float) -> tuple[Answer, int, str]:
        """Return a node's answer, the number of attempts, and why the last one was lost.

        A job that a node, a preemption or a kill ended says nothing about its point: it is tried again.
        """
        order |= {"version": __version__, "working_folder": str(Path.cwd()), "timeout_s": timeout_s}
        answer, reason = {}, ""
        for attempt in range(1, self.settings.attempts + 1):
            state = self._finished(order)
            answer, reason = state.answer, state.reason or _why_again(state.answer)
            attempts = attempt + int(answer.get("num_restarts", 0))
            if not reason or attempts >= self.settings.attempts:
                break
            self._node = None
            self._say(f"{reason}; trying again, attempt {attempt + 1} of {self.settings.attempts}")
        return answer, attempts, reason

    def _finished(self, order: Order) -> State:
        order = {**order, "id": uuid.uuid4().hex}
        job = self._reaching(lambda: self.submit(order, self._node))
        try:
            while True:
                if self._stopped.is_set():
                    raise Cancelled
                state: State = self._reaching(lambda: self.poll(job))
                if self._keeps_node and state.node:
                    self._node = state.node
                with self._lock:
                    self._phases[id(job)] = state.phase
                if state.phase == DONE and state.answer.get("id") != order["id"]:
                    # A scheduler that lost its memory gives the numbers of jobs again.
                    return State(phase=LOST, reason=f"{self.name} gave the answer of another job")
                if state.phase in (DONE, LOST):
                    return state
        except BaseException:
            with suppress(SchedulerDown):
                self.cancel(job)
            raise
        finally:
            with self._lock:
                self._phases.pop(id(job), None)

    def _reaching(self, ask: Callable[[], Any]) -> Any:
        """Return what the engine says; while it does not answer, ask again for as long as the settings allow."""
        while True:
            try:
                answer = ask()
            except SchedulerDown as error:
                if self._stopped.is_set():
                    raise Cancelled from None
                now, patience_s = time.monotonic(), self.settings.patience_s
                with self._lock:
                    is_first = self._down_since is None
                    self._down_since = now if self._down_since is None else self._down_since
                    waited_s = now - self._down_since
                if waited_s > patience_s:
                    raise StepscopeError(
                        f"{self.name} has not answered for {patience_s:g} s: {error}. All finished rows are kept; "
                        "continue with --resume when it is back."
                    ) from None
                if is_first:
                    self._say(f"{self.name} does not answer: {error}. Asking again for {patience_s:g} s")
                self._stopped.wait(min(2.0, patience_s / 10))
                continue
            if self._down_since is not None:
                self._down_since = None
                self._say(f"{self.name} answers again")
            return answer


def _why_again(answer: Answer) -> str:
    """Return why an answer says nothing about its point; empty if it does."""
    node = answer.get("node", "a node")
    if answer.get("refused"):
        return str(answer["refused"])
    ending, failure = answer.get("ending"), answer.get("failure") or {}
    if ending is None:
        number = failure.get("signal")
        return f"a run on {node} was killed by {signal.Signals(number).name}" if number in FROM_OUTSIDE else ""
    if ending["lost"]:
        return f"the process that starts points on {node} was killed"
    if ending["exit_code"] == EXIT_CANNOT_WRITE and not answer.get("result"):
        answer.pop("ending")
        return f"a point could not write on {node}. Is its disk full?"
    if ending["timed_out"] or ending["memory_kill"] or -ending["exit_code"] not in FROM_OUTSIDE:
        return ""
    return f"a point on {node} was killed by {signal.Signals(-ending['exit_code']).name}"


def _write(path: Path, data: bytes | None) -> None:
    """Write a file of an answer in one step; nothing if the node sent none."""
    if data is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that jobs are cancelled. Does nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
