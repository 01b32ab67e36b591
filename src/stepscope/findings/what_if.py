"""A what-if question in words: the step before and after a change."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import polars as pl

from stepscope.analysis.time.overhead import Overhead
from stepscope.analysis.time.replay import Change, Replay, Replayed
from stepscope.analysis.time.what_if import choose, stretches
from stepscope.display import Shown
from stepscope.errors import UsageError
from stepscope.session.case import Case

SCHEMA_VERSION = 1


@dataclass(frozen=True, repr=False)
class WhatIf(Shown):
    """A step as traced, as replayed, and as replayed with a change."""

    num_steps: int
    num_work: int  # number of GPU events in those steps
    traced: Replayed
    before: Replayed
    after: Replayed
    is_changed: bool
    notes: tuple[str, ...] = ()  # which of several traces this is, and whether it is complete

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain values (docs/whatif.md)."""

        def milliseconds(replayed: Replayed) -> dict[str, float]:
            return {name.replace("_ns", "_ms"): ns / 1e6 for name, ns in asdict(replayed).items()}

        return {
            "schema_version": SCHEMA_VERSION,
            "num_steps": self.num_steps,
            "num_work": self.num_work,
            "traced": milliseconds(self.traced),
            "before": milliseconds(self.before),
            "after": milliseconds(self.after),
            "saving_ms": (self.before.done_ns - self.after.done_ns) / 1e6,
            "notes": list(self.notes),
        }


def what_if(
    case: Case,
    scale: Sequence[tuple[str, float]] = (),
    drop_launches: Sequence[str] = (),
    host: float | None = None,
    waits: bool = True,
    clean: bool = False,
) -> WhatIf:
    """Return all steps of a trace replayed without and with a change (options: see `cli/diagnose.py`)."""
    for words, factor in [*scale, ("host", 1.0 if host is None else host)]:
        if not 0 <= factor < math.inf:
            raise UsageError(f"{words}: the factor must be 0 or greater, not {factor}.")
    replay = Replay(case.linked)
    overhead = case.overhead if clean else Overhead()
    durations: dict[int, float] = {}
    for words, factor in scale:
        for event, ns in choose(case.all_work, words).select("event", "duration_ns").iter_rows():
            durations[event] = durations.get(event, ns) * factor
    gone = [choose(case.all_work, words)["event"] for words in drop_launches]
    change = case.without(pl.concat(gone)) if gone else Change()
    if host is not None:
        change = replace(change, host=stretches(replay.host_stretches(), host))
    unwaited = frozenset() if waits else frozenset(replay.waits)
    change = replace(change, duration_ns=durations, unwaited=unwaited, overhead=overhead)
    before = replay.play(Change(overhead=overhead))
    return WhatIf(
        num_steps=replay.num_steps,
        num_work=len(replay.events),
        traced=replay.recorded,
        before=before,
        after=replay.play(change),
        is_changed=bool(durations or gone or unwaited or host is not None),
        notes=case.notes,
    )
