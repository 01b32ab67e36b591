"""What a report looks at, opened once: a recording, a trace or a folder of ranks, and all that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from stepscope.analysis.memory.trace_events import trace_memory
from stepscope.analysis.ranks.all_ranks import Analysis
from stepscope.document.card import Card
from stepscope.errors import RecordingError, TraceError, Unavailable
from stepscope.findings.diagnose import Diagnosis, diagnose
from stepscope.session.case import Case, open_case
from stepscope.session.copies_view import CopiesReport, copies_report
from stepscope.session.memory_view import MemoryReport, memory_of_recording, memory_of_trace
from stepscope.trace.memory_file import MEMORY_FILE, read_memory
from stepscope.trace.recording import RECORDING_FILE


class Source:
    """Each result is worked out when a section asks for it, once. What is not there raises Unavailable, which says
    what to run to get it."""

    def __init__(
        self,
        path: Path,
        rank: int | None = None,
        ignored: Collection[str] = (),
        use_cache: bool = True,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.path = path
        self.is_recording = (path / RECORDING_FILE).is_file()
        self._ignored = ignored
        self.case: Case = open_case(path, rank, use_cache, progress)

    @cached_property
    def card(self) -> Card:
        """What `stepscope card` shows."""
        if not self.is_recording:
            raise Unavailable("a trace alone does not tell: it takes a recording, made by `stepscope run train.py`")
        return Card.of_recording(self.case.recording)

    @property
    def analysis(self) -> Analysis:
        """What `stepscope analyze` shows."""
        return self.case.analysis

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What `stepscope diagnose` shows."""
        return diagnose(self.case, self._ignored)

    @cached_property
    def copies(self) -> CopiesReport:
        """What `stepscope analyze --copies` shows."""
        return copies_report(self.case)

    @cached_property
    def memory(self) -> MemoryReport:
        """What `stepscope analyze --memory` shows."""
        allocations = self.allocations
        if self.has_memory_window:
            return memory_of_recording(self.path, allocations)
        return memory_of_trace(self.case.linked, allocations)

    @property
    def has_memory_window(self) -> bool:
        """Whether a recording tells the memory; else a trace does, or nothing."""
        return self.is_recording and (self.path / MEMORY_FILE).is_file()

    @cached_property
    def allocations(self) -> dict[str, Any]:
        """What `memory` is the account of: every allocation, in the structure of docs/memory.md."""
        if self.has_memory_window:
            try:
                return read_memory(self.path / MEMORY_FILE)
            except RecordingError as error:
                raise Unavailable(str(error).replace(str(self.path / MEMORY_FILE), MEMORY_FILE)) from None
        try:
            return trace_memory(self.case.linked)
        except TraceError as error:
            raise Unavailable(str(error).replace(str(self.case.linked.trace.path), "the trace")) from None
        except Unavailable:
            raise Unavailable(
                "the recording has neither a memory window nor a trace, as a run with --no-memory, or one that ended "
                "early, leaves it: `stepscope run train.py` records one"
            ) from None
