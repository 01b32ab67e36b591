"""Which rank is the slowest so far, without a message between ranks: each writes its time, and reads the others'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from stepscope.recorder.files import CONTROL_FOLDER, run_and_rank
from stepscope.recorder.history.requests import read_object, replace

WAITS = "backward"
"""The phase in which ranks wait for each other's gradients. All ranks' steps take the same time, so the slowest rank
is the one that takes longest outside it."""
_NAME = re.compile(r"pace\.(rank\d+)\.json")


class Pace:
    """The time that this rank takes by itself in the timed steps.

    Ranks meet in every step. So a rank that has ended the step after `publish` finds what all others published, if
    they have one disk. If not, the slowest of those it sees is chosen: a trace too many, never none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own_ns: dict[int, int] = {}  # by step

    def add(self, step: int, phases_ns: Mapping[str, int]) -> None:
        """Take a timed step; its times on the GPU replace those on the host."""
        self._own_ns[step] = sum(ns for name, ns in phases_ns.items() if name != WAITS)

    def add_device(self, step: int, phases_ns: Mapping[str, int]) -> None:
        if step in self._own_ns:
            self.add(step, phases_ns)

    def publish(self) -> None:
        if self._own_ns:
            run, rank = run_and_rank(self._folder)
            (run / CONTROL_FOLDER).mkdir(exist_ok=True)
            replace(run / CONTROL_FOLDER / f"pace.{rank}.json", {"own_ns": round(median(self._own_ns.values()))})

    def slowest(self) -> tuple[bool, str]:
        """Return whether this rank is the slowest, and why as a sentence."""
        run, own = run_and_rank(self._folder)
        found: dict[str, int] = {}
        for path in (run / CONTROL_FOLDER).glob("pace.rank*.json"):
            name, written = _NAME.fullmatch(path.name), read_object(path)
            if name is not None and written is not None and isinstance(written.get("own_ns"), int):
                found[name[1]] = written["own_ns"]
        if own not in found:
            return True, "no step was timed before it, so the slowest rank is unknown and every rank traces"
        slowest = max(found, key=lambda rank: (found[rank], rank))
        ms = {rank: f"{ns / 1e6:.1f} ms" for rank, ns in found.items()}
        text = f"only the slowest of {len(found)} traces: {slowest} takes {ms[slowest]} per step outside {WAITS}"
        return own == slowest, text if own == slowest else f"{text}, this one {ms[own]}"
