"""What a study has measured, read from its folder alone."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison.sweeps import OK, SweepSummary
from stepscope.document.model import Chart, Facts, Findings, Missing, Table, Text
from stepscope.document.text.sweeps import record_of, sweep_of
from stepscope.errors import RecordingError, TraceError, Unavailable
from stepscope.formatting import safe
from stepscope.trace.sweep_file import Sweep, is_sweep, read_sweep
from stepscope.workloads.knobs import nearest

if TYPE_CHECKING:
    from stepscope.session.source import Source

STUDY_FILE = "study.json"
TOML_FILE = "study.toml"
"""A copy of what a user declared in TOML."""
QUICK, FULL = "quick", "full"
_NAME = re.compile(r"[\w+-][\w.+-]*")
RECORDING, TRACE = "recording", "trace"
"""The fields of a row that name its recording and its trace, relative to the rows."""


class Rows:
    """Rows of one measure as flat records: knobs and figures by name, as `stepscope bench --json` has them."""

    def __init__(self, about: str, records: list[dict[str, Any]]) -> None:
        self.about = about
        self._records = records

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every row, those that failed too."""
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def ok(self) -> Rows:
        """Those that have a time to be compared."""
        return Rows(self.about, [record for record in self if record["status"] == OK])

    def where(self, **values: Any) -> Rows:
        """Rows with these values; a tuple or list lists several."""

        for name in values:
            if len(self) and not any(name in record for record in self):
                names = (known for record in self for known in record)
                raise Unavailable(f"{self.about} has no {name!r}: {nearest(name, names)}")

        def holds(record: Mapping[str, Any], name: str, value: Any) -> bool:
            return bool(
                record.get(name) in value if isinstance(value, (tuple, list, set)) else record.get(name) == value
            )

        kept = [r for r in self if all(holds(r, name, value) for name, value in values.items())]
        said = ", ".join(f"{name}={value}" for name, value in values.items())
        return Rows(f"{self.about} with {said}" if said else self.about, kept)

    def values(self, name: str) -> list[Any]:
        """What a knob takes in these rows, in order."""
        found = list(dict.fromkeys(record.get(name) for record in self))
        return sorted(found) if all(isinstance(value, (int, float)) for value in found) else found

    def one(self, **values: Any) -> dict[str, Any]:
        """The only row with these values; Unavailable where there is none, or several, or where it has no time."""
        found = self.where(**values)
        if len(found) != 1:
            number = f"there are {len(found)} rows" if len(found) else "there is no row"
            raise Unavailable(f"{number} of {found.about}")
        record = next(iter(found))
        if record["status"] != OK:
            raise Unavailable(f"{found.about}: {record['status']}, {record['reason']}")
        return record

    def needed(self) -> Rows:
        """These rows; Unavailable where there are none."""
        if not self._records:
            raise Unavailable(f"nothing was measured of {self.about}")
        return self


@dataclass(frozen=True)
class Recorded:
    """One point that was trained under `stepscope run`."""

    axes: Mapping[str, Any]
    status: str
    reason: str | None
    folder: Path | None
    """None where it left no recording."""

    @cached_property
    def source(self) -> Source:
        """Its recording, opened: card, analysis, findings, memory."""
        if self.folder is None or self.status != OK:
            raise Unavailable(f"{self.status}: {self.reason}")
        if not self.folder.exists():
            raise Unavailable(f"the recording {self.folder.name} is not here: not kept with the rows")
        from stepscope.session.source import Source  # needs the read side; measuring does not

        return Source(self.folder)


class Stored:
    """A study's folder, opened for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = read_facts(folder)

    @property
    def mode(self) -> str:
        """`quick` or `full`."""
        return str(self.facts.get("mode"))

    def parts(self, answer: Callable[[Stored], Iterable[Any]]) -> tuple[Any, ...]:
        """The parts of an answer, as far as they can be had: what is missing is said in its place. Computed once."""
        if answer not in self._answers:
            parts: list[Any] = []
            try:
                # One by one: what came before something that is missing stays.
                for part in answer(self):
                    parts.append(_checked(part))
            except (Unavailable, RecordingError, TraceError) as reason:
                parts.append(Missing(f"Not measured: {reason}"))
            except (Exception, SystemExit) as error:  # a mistake in the answer, or an odd row: the rest stands
                place = traceback.extract_tb(error.__traceback__)[-1]
                said = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
                parts.append(Missing(f"Not answered: {safe(said, 300)}"))
            self._answers[answer] = tuple(parts)
        return self._answers[answer]

    def sweep(self, measure: str) -> Sweep:
        """The rows of a measure as written, and what they ran on; Unavailable where there are none."""
        path = self.folder / measure
        if not is_sweep(path):
            raise Unavailable(f"{measure} was not measured: --resume goes on with it")
        try:
            return read_sweep(path)
        except RecordingError as error:  # one that has no row yet among them
            raise Unavailable(str(error)) from None

    def rows(self, measure: str) -> Rows:
        """The rows of a measure, summarized."""
        if measure not in self._rows:
            self._rows[measure] = Rows(measure, [record_of(point) for point in self.summary(measure).points])
        return self._rows[measure]

    def summary(self, measure: str) -> SweepSummary:
        """A measure as `stepscope bench` sums it up. Computed once."""
        if measure not in self._summaries:
            sweep = self.sweep(measure)
            self._summaries[measure] = sweep_of(list(sweep.rows), sweep.environments)
        return self._summaries[measure]

    def recordings(self, measure: str, **values: Any) -> list[Recorded]:
        """The recordings of a measure, those with these values of knobs."""
        found = []
        for row in self.sweep(measure).rows:
            axes = {"preset": row.get("preset"), **row["config"], **row["run"]}
            if all(axes.get(name) == value for name, value in values.items()):
                found.append(self._recorded(measure, axes, row))
        return found

    def recording(self, measure: str, **values: Any) -> Recorded:
        """The first of them; Unavailable where there is none."""
        found = self.recordings(measure, **values)
        if not found:
            said = ", ".join(f"{name}={value}" for name, value in values.items())
            raise Unavailable(f"there is no recording of {measure}{' with ' if said else ''}{said}")
        return found[0]

    def traced(self, measure: str, record: Mapping[str, Any]) -> Source:
        """The trace of a row of a sweep that keeps them, opened."""
        key = f"{measure}/{record['hash']}"
        if key not in self._traces:
            name = {row["hash"]: row.get(TRACE) for row in self.sweep(measure).rows}.get(record["hash"])
            path = self.folder / measure / str(name)
            if not name or not path.is_file():
                raise Unavailable(f"the trace of {key} is not here: measured without one, or not kept with the rows")
            from stepscope.session.source import Source  # needs the read side; measuring does not

            self._traces[key] = Source(path)
        return self._traces[key]

    def _recorded(self, measure: str, axes: dict[str, Any], row: Mapping[str, Any]) -> Recorded:
        key = f"{measure}/{row['hash']}"
        if key not in self._recordings:
            name = row.get(RECORDING)
            folder = self.folder / measure / str(name) if name else None
            self._recordings[key] = Recorded(axes, str(row["status"]), row.get("reason"), folder)
        return self._recordings[key]

    @cached_property
    def _answers(self) -> dict[Callable[[Stored], Iterable[Any]], tuple[Any, ...]]:
        return {}

    @cached_property
    def _summaries(self) -> dict[str, SweepSummary]:
        return {}

    @cached_property
    def _rows(self) -> dict[str, Rows]:
        return {}

    @cached_property
    def _traces(self) -> dict[str, Source]:
        return {}

    @cached_property
    def _recordings(self) -> dict[str, Recorded]:
        return {}


def _checked(part: Any) -> Any:
    """A part of a report that can be written."""
    if not isinstance(part, (Chart, Facts, Findings, Missing, Table, Text)):
        raise TypeError(
            f"an answer yields parts of stepscope.document.model, such as Text, not {type(part).__name__}"
        )
    if isinstance(part, (Chart, Table)) and not _NAME.fullmatch(part.id):
        raise ValueError(f"the id {part.id!r} is to be the name of a file: letters, digits, - + _ and .")
    return part


def is_study(path: Path) -> bool:
    """Whether a path is a study's folder."""
    return (path / STUDY_FILE).is_file()


def read_facts(folder: Path) -> dict[str, Any]:
    """What study.json says; RecordingError in one line where it cannot be read."""
    try:
        facts = json.loads((folder / STUDY_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordingError(f"{folder / STUDY_FILE} cannot be read: {error}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("study"), str):
        raise RecordingError(f"{folder / STUDY_FILE} is of no study: it was changed by hand or damaged")
    return facts
