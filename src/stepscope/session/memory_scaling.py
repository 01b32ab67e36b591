"""The memory of one source, or how it grows between two recordings of different lengths or batch sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.memory.scaling import Growth, growth
from stepscope.display import Shown
from stepscope.errors import UsageError
from stepscope.session.memory import MemoryReport
from stepscope.session.session import Session

SCHEMA_VERSION = 1


@dataclass(frozen=True, repr=False)
class MemoryAnalysis(Shown):
    """What `stepscope analyze --memory` found."""

    reports: tuple[MemoryReport, ...]
    growth: Growth | None

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """The object that `--json` prints (docs/memory.md)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "accounts": [report.to_json(most) for report in self.reports],
            "growth": None if self.growth is None else self.growth.to_json(most),
        }


def analyze_memory(sessions: Sequence[Session]) -> MemoryAnalysis:
    """Return the memory of one session; of two recordings that differ in length or batch, also how it grows."""
    if len(sessions) > 2:
        raise UsageError(f"--memory reads one path, or two recordings of two lengths: {len(sessions)} were named")
    if len(sessions) == 2 and not all(session.has_memory_window for session in sessions):
        kinds = " and a ".join(session.kind.value for session in sessions)
        raise UsageError(f"how memory grows is told from two recordings with a memory window: these are a {kinds}")
    reports = tuple(session.memory for session in sessions)
    grown = growth(sessions[0].allocations, sessions[1].allocations) if len(sessions) == 2 else None
    return MemoryAnalysis(reports, grown)
