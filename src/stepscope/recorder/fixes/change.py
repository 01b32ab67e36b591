"""What every change has: handles that take it off again, and a count of what it touched."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from stepscope.recorder.patches import Handle, remove_all


class Change:
    """One change to a script. `start()` before the script runs, `use_roots()` once its root modules are known."""

    nothing_seen = "nothing of the kind was seen"
    """Why nothing was changed, where the script never came to what the change is about."""

    def __init__(self, value: str | None) -> None:
        self.value = value
        self.changed: Counter[str] = Counter()
        """What was changed, and how often: the proof that it took."""
        self.left: Counter[str] = Counter()
        """What was left as it was, with why, and how often."""
        self.handles: list[Handle] = []

    def start(self) -> None:
        """torch is here and the script has done nothing yet."""

    def use_roots(self, roots: list[nn.Module]) -> None:
        """The script's second step has ended: these modules it calls itself."""

    def finish(self) -> None:
        """The script has ended: count what can only be counted now."""

    def remove(self) -> None:
        """Put back what `start` replaced."""
        remove_all(self.handles)

    def facts(self) -> dict[str, Any]:
        """What it did, as JSON values."""
        return {
            "value": self.value,
            "changed": {what: count for what, count in self.changed.items() if count},
            "left": dict(self.left),
            "nothing_seen": self.nothing_seen,
        }
