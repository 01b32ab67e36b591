"""Asks a running job for a window, and waits until all ranks have taken it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError, UsageError
from stepscope.recorder import files
from stepscope.recorder.history import conditions, requests

SEE_SECONDS = 30.0
TELL_SECONDS = 10.0
POLL_SECONDS = 0.2
MARGIN_SECONDS = 4.0
MOST_TRIES = 5
LAST_STEPS = 3  # that show the pace of a rank that has agreed to a step
_OPEN = {requests.ARMED, requests.RUNNING}


def take_window(
    run: Path, wanted: dict[str, Any], when: str | None, limit: int, tell: Callable[[str], None]
) -> Path | None:
    """Return the folder of a window taken from a running job; None if the job will take windows by itself."""
    try:
        wanted = requests.checked(**wanted)
        condition = None if when is None else conditions.parse(when)
        if limit < 1:
            raise ValueError(f"limit is {limit}: it must be 1 or more")
    except ValueError as error:
        raise UsageError(str(error)) from None
    ranks = _Ranks(run)
    ranks.check(tell)
    try:
        if condition is not None:
            requests.create(ranks.run, "when", {**wanted, "when": condition.text, "limit": limit})
            tell(f"windows will be taken when `{condition.text}`, at most {limit}: {ranks.run}/window1, …")
            return None
        return _take(ranks, wanted, tell)
    except OSError as error:
        raise RecordingError(f"cannot write to {ranks.run}: {error.strerror or error}") from None


@dataclass
class _Rank:
    folder: Path
    name: str
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def step_ns(self) -> int:
        return int(self.answer.get("step_ns") or 1_000_000_000)

    def has_answered(self, step: int) -> bool:
        """Return whether it has answered to the proposal of a step, or cannot any more."""
        is_over = self.answer.get("state") in (requests.DONE, requests.REFUSED, requests.WITHDRAWN)
        return is_over or self.answer.get("proposed") == step

    def ending(self) -> str | None:
        """Return how its process ended; None if it runs, as far as can be seen from here."""
        from stepscope.session.process import writer_runs
        from stepscope.trace.recording import read_facts

        facts = read_facts(self.folder, [])
        if facts["status"] != files.STATUS_INTERRUPTED:
            return facts["status"]
        return f"process {facts['pid']} was killed" if writer_runs(self.folder, facts) is False else None


class _Ranks:
    """The ranks of a run."""

    def __init__(self, path: Path) -> None:
        from stepscope.session import history

        if not (path / files.RECORDING_FILE).is_file():
            raise RecordingError(f"{path} is not a run: it has no {files.RECORDING_FILE}")
        is_child = files.CHILD_FOLDER.fullmatch(path.name) and (path.parent / files.RECORDING_FILE).is_file()
        self.run = path.parent if is_child else path
        folders = [each for each in history.rank_folders(self.run) if (each / files.HISTORY_FILE).is_file()]
        self.all = [_Rank(each, "rank0" if each == self.run else each.name) for each in folders]

    def check(self, tell: Callable[[str], None]) -> None:
        """Raise RecordingError if no rank runs. Leave out those that have ended."""
        endings = {rank.name: ending for rank in self.all if (ending := rank.ending()) is not None}
        if len(endings) == len(self.all):
            if ending := next(iter(endings.values()), None) or _Rank(self.run, "").ending():
                raise RecordingError(f"the run in {self.run} has ended ({ending}): trigger needs one that is running")
            raise RecordingError(f"the run in {self.run} has not finished a step yet: try again when it has")
        for name, ending in endings.items():
            tell(f"{name} has ended ({ending}): the window is taken from the others")
        self.all = [rank for rank in self.all if rank.name not in endings]

    def read(self, number: int) -> None:
        """Read the answers to a request."""
        for rank in self.all:
            rank.answer = requests.read_object(requests.request_file(self.run, number, rank.name)) or rank.answer

    def have_slowed(self, step: int) -> bool:
        """Return whether a step is far away at the pace of now, which the ranks' last steps show."""
        from stepscope.session.history import recent_steps

        for rank in self.all:
            steps = recent_steps(rank.folder, LAST_STEPS)
            if not steps:
                return False
            rank.answer |= {"step": steps[-1].step + 1, "step_ns": sum(each.wall_ns for each in steps) // len(steps)}
        return all(
            requests.is_far(step - rank.answer["step"], rank.step_ns / 1e9, MARGIN_SECONDS) for rank in self.all
        )

    def states(self) -> set[str]:
        return {str(rank.answer.get("state")) for rank in self.all}


def _take(ranks: _Ranks, wanted: dict[str, Any], tell: Callable[[str], None]) -> Path:
    number = requests.create(ranks.run, "request", wanted)
    path = requests.request_file(ranks.run, number)
    try:
        for seconds in _until(ranks, number, tell, lambda _: all(rank.answer for rank in ranks.all)):
            if seconds > SEE_SECONDS:
                silent = ", ".join(rank.name for rank in ranks.all if not rank.answer)
                raise RecordingError(f"{silent} did not answer within {SEE_SECONDS:.0f} s: no window was taken")
        step = _agree(ranks, number, wanted, tell)
        tell(f"window {number} begins at step {step}")
        looked_s = 0.0
        for seconds in _until(ranks, number, tell, lambda _: not ranks.states() & _OPEN):
            if seconds - looked_s > MARGIN_SECONDS and ranks.states() == {requests.ARMED}:
                looked_s = seconds
                if ranks.have_slowed(step):
                    step = _agree(ranks, number, wanted, tell)
                    tell(f"steps have become slower: window {number} begins at step {step}")
    except BaseException:
        requests.replace(path, {**wanted, "step": 0, "is_withdrawn": True})
        ranks.read(number)
        if requests.RUNNING in ranks.states():
            tell(f"the job still takes window {number}, which has begun: {ranks.run}/window{number}")
        raise
    for rank in ranks.all:
        if rank.answer.get("state") != requests.DONE:
            raise RecordingError(f"no window from {rank.name}: {rank.answer.get('reason', 'it was withdrawn')}")
    return ranks.run / f"window{number}"


def _agree(ranks: _Ranks, number: int, wanted: dict[str, Any], tell: Callable[[str], None]) -> int:
    """Return the step that all ranks have agreed to begin at."""
    free_from = 0
    for attempt in range(MOST_TRIES):
        step_ns = min(rank.step_ns for rank in ranks.all)
        newest = max(int(rank.answer.get("step", 0)) for rank in ranks.all)
        step = max(newest, free_from) + requests.margin_steps(step_ns, MARGIN_SECONDS * 2**attempt)
        requests.replace(requests.request_file(ranks.run, number), {**wanted, "step": step})
        for _ in _until(ranks, number, tell, lambda at: all(rank.has_answered(at) for rank in ranks.all), step):
            pass
        if requests.LATE not in ranks.states():
            return step
        late = ", ".join(rank.name for rank in ranks.all if rank.answer.get("state") == requests.LATE)
        if ranks.states() & {requests.RUNNING, requests.DONE}:
            raise RecordingError(f"{late} was too late for step {step}, where the others began: try again")
        free_from = max(int(rank.answer.get("free_from") or 0) for rank in ranks.all)
        tell(f"{late} cannot begin at step {step}: proposing a later one")
    raise RecordingError(f"the ranks could not agree on a step in {MOST_TRIES} attempts: try again")


def _until(
    ranks: _Ranks, number: int, tell: Callable[[str], None], is_done: Callable[[int], bool], step: int = 0
) -> Iterator[float]:
    """Yield the seconds that have passed, again and again, until something is done or a rank has ended."""
    began = told = looked = time.monotonic()
    while True:
        ranks.read(number)
        if is_done(step):
            return
        now = time.monotonic()
        if now - looked > 1:
            looked = now
            for rank in ranks.all:
                if (ending := rank.ending()) is None:
                    continue
                ranks.read(number)  # it may have answered in the meantime
                if not rank.has_answered(-1):
                    raise RecordingError(f"{rank.name} has ended ({ending}): no window was taken")
        if now - told > TELL_SECONDS:
            told = now
            waits = ", ".join(f"{rank.name} at step {rank.answer.get('step', '?')}" for rank in ranks.all)
            tell(f"waiting for {waits}: a rank answers between two steps, not inside a long one or an evaluation")
        yield now - began
        time.sleep(POLL_SECONDS)
