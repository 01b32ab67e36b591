"""A clock for the recorder that a test sets."""

import time
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def recorder_uses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], int]], None]]:
    """Return a function that gives the recorder another clock until the test ends."""
    from stepscope.recorder import clock as recorder_clock
    from stepscope.recorder.usual import notes, steps

    def renew() -> None:
        if notes.Notes is not notes.PythonNotes:
            notes.use_compiled()

    def use(clock: Callable[[], int]) -> None:
        for module in (time, steps, notes):
            monkeypatch.setattr(module, "perf_counter_ns", clock)
        monkeypatch.setattr(recorder_clock.Clock.__init__, "__defaults__", (clock,))
        renew()

    yield use
    monkeypatch.undo()
    renew()
