"""The base of every fix: handles that remove it, and a count of what it changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from stepscope.recorder.patches import Handle, remove_all


class Change:
    """One fix. `start()` is called before the script runs, `use_roots()` once its root modules are known."""

    nothing_seen = "nothing of the kind was seen"
    """Why nothing was changed if the script never used what the fix is about."""

    def __init__(self, value: str | None) -> None:
        self.value = value
        self.changed: Counter[str] = Counter()  # what was changed, and how often
        self.left: Counter[str] = Counter()  # what was left unchanged and why, and how often
        self.handles: list[Handle] = []

    def start(self) -> None:
        """Apply what can be applied after torch is imported, before the script does anything."""

    def use_roots(self, roots: list[nn.Module]) -> None:
        """Change the modules that the script calls directly, after its second step."""

    def finish(self) -> None:
        """Count what can only be counted after the script has ended."""

    def remove(self) -> None:
        """Undo `start`."""
        remove_all(self.handles)

    def facts(self) -> dict[str, Any]:
        """Return what the fix did, as JSON values."""
        return {
            "value": self.value,
            "changed": {what: count for what, count in self.changed.items() if count},
            "left": dict(self.left),
            "nothing_seen": self.nothing_seen,
        }
