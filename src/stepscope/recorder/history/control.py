"""Sees requests for windows and answers them: one thread handles files, the one that trains decides.

A window begins at the same step on all ranks. So a rank answers `armed` only in the thread that trains, and only if
that step has not begun.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from stepscope.recorder.files import FIRST_RANK
from stepscope.recorder.history import requests
from stepscope.recorder.history.conditions import State, Watch, parse
from stepscope.recorder.history.history import History
from stepscope.recorder.history.requests import Request, Standing, Wanted
from stepscope.recorder.wall import tell

POLL_NS = 1_000_000_000
MARGIN_SECONDS = 4.0
MOST_ATTEMPTS = 5
RECENT_NS, LEAST_RECENT, LEAST_USUAL = 2_000_000_000, 5, 5


class Control:
    """The requests for one rank of a run. `rank` is its name in files; only the first rank watches conditions."""

    def __init__(
        self, run: Path, rank: str, history: History, num_ranks: int = 1, when: tuple[str, ...] = (), limit: int = 3
    ) -> None:
        self.armed_step: int | None = None
        """Where the next window begins. A plain attribute, because the training thread looks at it often."""
        self.has_news = False
        self._run, self._rank, self._history, self._num_ranks = run, rank, history, num_ranks
        self._given = [Standing(number=0, when=text, limit=limit) for text in when]
        self._armed: dict[int, Request] = {}  # by their first step
        self._taken: set[int] = set()
        self._busy_until = 0
        self._asked: deque[Request] = deque()  # from the writer's thread
        self._answers: deque[tuple[int, dict[str, Any]]] = deque()  # to it
        self._settled: set[int] = set()  # requests that are done, refused, …
        self._known: dict[int, Request] = {}
        self._watches: dict[tuple[bool, int], tuple[Watch, Wanted]] = {}
        self._last_of: dict[tuple[bool, int], int] = {}  # the last request of each watch; one waits at a time
        self._own: dict[int, tuple[dict[str, Any], int]] = {}  # requests of conditions: what, and how many attempts
        self._proposed: dict[int, tuple[int, float]] = {}  # where these begin, and how far ahead that was
        self._polled_ns = 0

    # --- in the thread that trains ----------------------------------------------------------------

    def look(self, step: int, free_from: int) -> None:
        """Answer what was asked. `step` is about to begin; until `free_from`, other windows are being taken."""
        self.has_news = False
        while self._asked:
            request = self._asked.popleft()
            number, first = request.number, request.step or 0
            earlier = [at for at, armed in self._armed.items() if armed.number == number]
            for at in earlier:  # withdrawn, or proposed again for a later step
                del self._armed[at]
            if number in self._taken or request.is_withdrawn:
                if earlier:
                    self.answer(number, requests.WITHDRAWN, step)
                continue
            taken = [range(at, at + each.num_steps) for at, each in self._armed.items()]
            last = first + request.num_steps - 1
            if first < max(step, free_from, self._busy_until) or any(
                r.start <= last and first < r.stop for r in taken
            ):
                free_from = max(free_from, self._busy_until, *(each.stop for each in taken))
                self.answer(number, requests.LATE, step, free_from=free_from, proposed=first)
            else:
                self._armed[first] = request
                self.answer(number, requests.ARMED, step, proposed=first)
        for at in [at for at in self._armed if at < step]:
            self.answer(self._armed.pop(at).number, requests.LATE, step, free_from=step, proposed=at)
        self.armed_step = min(self._armed, default=None)

    def take(self, step: int) -> Request | None:
        """Return the window that begins with this step."""
        found = self._armed.pop(step, None)
        self.armed_step = min(self._armed, default=None)
        if found is not None:
            self._taken.add(found.number)
            self._busy_until = step + found.num_steps
            self.answer(found.number, requests.RUNNING, step, proposed=step)
        return found

    def answer(self, number: int, state: str, step: int, **details: Any) -> None:
        """Let an answer be written."""
        self._answers.append((number, {"state": state, "step": step, **details}))

    # --- in the writer's thread -------------------------------------------------------------------

    def tick(self) -> None:
        while self._answers:
            number, values = self._answers.popleft()
            if values["state"] not in (requests.SEEN, requests.ARMED, requests.LATE, requests.RUNNING):
                self._settled.add(number)
            self._write(number, values)
            if values["state"] == requests.LATE and number in self._own:
                self._propose(number, *self._own[number], values["free_from"])
        now_ns = time.perf_counter_ns()
        if now_ns - self._polled_ns >= POLL_NS:
            self._polled_ns = now_ns
            self._poll()
            self._watch(now_ns)
            self._hasten()

    def close(self, status: str) -> None:
        """Answer what can no longer be taken."""
        for at, request in self._armed.items():
            text = f"the run ended ({status}) before step {at}"
            self.answer(request.number, requests.REFUSED, self._history.last_step, reason=text)
        while self._answers:
            self._write(*self._answers.popleft())

    def _write(self, number: int, values: dict[str, Any]) -> None:
        values |= {"pid": os.getpid(), "step_ns": self._history.pace_ns(RECENT_NS)}
        try:
            requests.replace(requests.request_file(self._run, number, self._rank), values)
        except OSError as error:
            tell(f"cannot answer the request for a window: {error.strerror or error}")

    def _poll(self) -> None:
        for request in requests.read_requests(self._run):
            if isinstance(request, Standing):
                self._watch_for(request, is_given=False)
            elif request.number not in self._settled and self._known.get(request.number) != request:
                is_new = request.number not in self._known
                self._known[request.number] = request
                if is_new:
                    self._write(request.number, {"state": requests.SEEN, "step": self._history.last_step + 1})
                if request.step is not None or request.is_withdrawn:
                    self._asked.append(request)
                    self.has_news = True

    def _step_ns(self) -> int | None:
        recent = self._history.recent_ns(RECENT_NS, LEAST_RECENT)
        return round(median(recent)) if recent else None

    # --- conditions -------------------------------------------------------------------------------

    def _watch_for(self, standing: Standing, is_given: bool) -> None:
        key = is_given, standing.number
        if self._rank != FIRST_RANK or key in self._watches:
            return
        self._watches[key] = Watch(parse(standing.when), standing.limit, self._state(0)), standing

    def _watch(self, now_ns: int) -> None:
        if self._given:
            for number, standing in enumerate(self._given):
                self._watch_for(Standing(**{**asdict(standing), "number": number}), is_given=True)
            self._given = []
        if not self._watches or not self._history.is_free:
            return
        state = self._state(now_ns)
        for key, (watch, wanted) in self._watches.items():
            is_pending = key in self._last_of and self._last_of[key] not in self._settled
            if not is_pending and watch.fires(state):
                values = {name: getattr(wanted, name) for name in Wanted.__dataclass_fields__}
                values["reason"] = watch.condition.text
                number = self._last_of[key] = requests.create(self._run, "request", values)
                self._propose(number, values, 0, 0)

    def _propose(self, number: int, values: dict[str, Any], attempt: int, free_from: int) -> None:
        """Propose a step for a window of a condition, each time further ahead."""
        if attempt == MOST_ATTEMPTS:
            self._settled.add(number)
        else:
            seconds = (MARGIN_SECONDS if self._num_ranks > 1 else 0.5) * 2**attempt
            margin = requests.margin_steps(self._history.pace_ns(RECENT_NS) or 1_000_000_000, seconds)
            step = max(self._history.last_step + 1, free_from) + margin
            self._own[number] = values, attempt + 1
            self._proposed[number] = step, seconds
            requests.replace(requests.request_file(self._run, number), {**values, "step": step})

    def _hasten(self) -> None:
        """Propose an earlier step for windows that are far away, because steps have become slower since."""
        pace_s = (self._history.pace_ns(RECENT_NS) or 0) / 1e9
        for number, (step, seconds) in list(self._proposed.items()):
            left = step - self._history.last_step
            if left <= 0 or number in self._settled:
                del self._proposed[number]
            elif requests.is_far(left, pace_s, seconds):
                values, attempt = self._own[number]
                self._propose(number, values, attempt - 1, 0)

    def _state(self, now_ns: int) -> State:
        block = self._history.last_block
        total_bytes = block.get("total_bytes")
        on_gpu = block.get("reserved_bytes") if total_bytes else None
        return State(
            now_ns=now_ns or time.perf_counter_ns(),
            step=self._history.last_step,
            step_ns=self._step_ns(),
            usual_ns=self._history.usual_ns(RECENT_NS, LEAST_USUAL),
            memory_bytes=block.get("resident_bytes") if on_gpu is None else on_gpu,
            total_bytes=_physical_bytes() if on_gpu is None else total_bytes,
        )


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
