"""What a report looks at, opened once: a recording, a trace or a folder of ranks, and all that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path

from stepscope.analysis.traces import Analysis
from stepscope.errors import RecordingError, TraceError
from stepscope.findings.case import Case, open_case
from stepscope.findings.diagnose import Diagnosis, diagnose
from stepscope.findings.finding import CannotCheck
from stepscope.report.card import Card
from stepscope.report.memory import MemoryReport, memory_of_recording, memory_of_trace
from stepscope.trace.memory_file import MEMORY_FILE
from stepscope.trace.recording import RECORDING_FILE


class Source:
    """Each result is worked out when a section asks for it, once. What is not there raises CannotCheck, which says
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
            raise CannotCheck("a trace alone does not tell: it takes a recording, made by `stepscope run train.py`")
        return Card.of(self.path)

    @property
    def analysis(self) -> Analysis:
        """What `stepscope analyze` shows."""
        return self.case.analysis

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What `stepscope diagnose` shows."""
        return diagnose(self.case, self._ignored)

    @cached_property
    def memory(self) -> MemoryReport:
        """What `stepscope analyze --memory` shows."""
        try:
            if self.is_recording and (self.path / MEMORY_FILE).is_file():
                return memory_of_recording(self.path)
            return memory_of_trace(self.case.linked)
        except (RecordingError, TraceError) as error:
            raise CannotCheck(str(error)) from None
