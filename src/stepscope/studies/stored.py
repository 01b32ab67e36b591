"""Reads back what a study measured: rows, recordings and traces, from its folder alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.analysis.comparison.sweeps import OK, SweepSummary, record_of, sweep_of
from stepscope.border import COUNT, PLAIN, TEXT, NotOfSchema, check, read_json
from stepscope.errors import RecordingError, Unavailable
from stepscope.trace.kind import STUDY_FILE, Kind, kind_of
from stepscope.trace.sweep_file import Sweep, read_sweep
from stepscope.workloads.users_code import nearest

if TYPE_CHECKING:
    from stepscope.session import Session

TOML_FILE = "study.toml"
KEPT_FILE = "kept_tables.json"
"""Of a published study: columns of the tables that need recordings or traces, which are too large to publish."""
QUICK, FULL = "quick", "full"
RECORDING, TRACE = "recording", "trace"  # fields of a row that name its recording and its trace, relative to the rows
Made = TypeVar("Made")


class Rows:
    """Flat records: knobs and figures by name, as `stepscope bench --json` has them."""

    def __init__(self, about: str, records: Iterable[Mapping[str, Any]]) -> None:
        self.about = about
        self._records = [dict(record) for record in records]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every row, including failed ones."""
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.needed()._records[place]

    @property
    def ok(self) -> Rows:
        """Return the rows with a time that may be compared."""
        return Rows(self.about, [record for record in self if record.get("status", OK) == OK])

    def where(self, **values: Any) -> Rows:
        """Return the rows with these values. A tuple or list gives alternatives."""
        for name in values:
            if len(self) and not any(name in record for record in self):
                names = (known for record in self for known in record)
                raise Unavailable(f"{self.about} has no {name!r}: {nearest(name, names)}")
        choices = {
            name: value if isinstance(value, (tuple, list, set)) else (value,) for name, value in values.items()
        }
        kept = [row for row in self if all(row.get(name) in some for name, some in choices.items())]
        said = ", ".join(f"{name}={value}" for name, value in values.items())
        return Rows(f"{self.about} with {said}" if said else self.about, kept)

    def values(self, name: str) -> list[Any]:
        """Return the distinct values of a knob, numbers sorted."""
        found = list(dict.fromkeys(record.get(name) for record in self))
        return sorted(found) if all(isinstance(value, (int, float)) for value in found) else found

    def one(self, **values: Any) -> dict[str, Any]:
        """Return the only row with these values. Raise Unavailable if it is not the only one, or has no time."""
        found = self.where(**values)
        if len(found) != 1:
            number = f"there are {len(found)} rows" if len(found) else "there is no row"
            raise Unavailable(f"{number} of {found.about}")
        if found[0].get("status", OK) != OK:
            raise Unavailable(f"{found.about}: {found[0]['status']}, {found[0]['reason']}")
        return found[0]

    def most(self, name: str) -> dict[str, Any]:
        return max(self.needed(), key=lambda record: record[name])

    def least(self, name: str) -> dict[str, Any]:
        return min(self.needed(), key=lambda record: record[name])

    def beside(self, same: Iterable[str], **base: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (row, base row) for every other row with a time, where the knobs in `same` are equal."""
        names, bases = tuple(same), self.ok.where(**base)
        others = [row for row in self.ok if any(row.get(name) != value for name, value in base.items())]
        return [(row, one) for row in others for one in bases if all(row[name] == one[name] for name in names)]

    def needed(self) -> Rows:
        """Return these rows. Raise Unavailable if there are none."""
        if not self._records:
            raise Unavailable(f"nothing was measured of {self.about}")
        return self


@dataclass(frozen=True)
class Recorded:
    axes: dict[str, Any]
    status: str
    reason: str | None
    folder: Path | None  # None if it left no recording

    @cached_property
    def source(self) -> Session:
        """Its recording, opened: card, analysis, findings, memory."""
        if self.folder is None or self.status != OK:
            raise Unavailable(f"{self.status}: {self.reason}")
        return self.opened()

    def opened(self) -> Session:
        """Return the recording, also of a run that crashed."""
        if self.folder is None or not self.folder.exists():
            raise Unavailable(f"the recording {self.folder and self.folder.name} is not here")
        from stepscope.session import open_session  # needs the read side; measuring does not

        return open_session(self.folder)


class Stored:
    """A study's folder, opened for reading. Everything is computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = read_facts(folder)
        self._made: dict[Hashable, Any] = {}

    @property
    def mode(self) -> str:
        return str(self.facts.get("mode"))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what `make` returns, called once per key."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                self._made[key] = error
        if isinstance(self._made[key], Exception):
            raise self._made[key]
        made: Made = self._made[key]
        return made

    def sweep(self, measure: str) -> Sweep:
        """Return the rows of a measure as written, and what they ran on."""
        path = self.folder / measure
        if not path.is_dir() or kind_of(path) is not Kind.SWEEP:
            raise Unavailable(f"{measure} was not measured: --resume measures it")
        try:
            return self.once(("sweep", measure), lambda: read_sweep(path))
        except RecordingError as error:  # also if it has no row yet
            raise Unavailable(str(error)) from None

    def summary(self, measure: str) -> SweepSummary:
        sweep = self.sweep(measure)
        return self.once(("summary", measure), lambda: sweep_of(list(sweep.rows), sweep.environments))

    def rows(self, of: Any) -> Rows:
        """Return the records of a measure (by id), of a table, or of a function of Stored."""
        is_table = not isinstance(of, str) and not callable(of)
        return self.once(("table", of.id) if is_table else ("rows", of), lambda: self._rows(of))

    def _rows(self, of: Any) -> Rows:
        if isinstance(of, str):
            return Rows(of, [record_of(point) for point in self.summary(of).points])
        if callable(of):
            return Rows(getattr(of, "__name__", "rows"), of(self))
        try:
            rows = Rows(of.id, self.rows(of.rows))
            if not len(rows) and of.if_empty:
                raise Unavailable(of.if_empty)
            return rows
        except Unavailable:
            kept = self.kept.get(of.id)
            if kept is None:
                raise
            return Rows(of.id, [dict(zip(kept, values)) for values in zip(*kept.values())])

    @cached_property
    def kept(self) -> dict[str, dict[str, list[Any]]]:
        """Columns of the tables that a published study keeps, by id; empty for any other."""
        path = self.folder / KEPT_FILE
        try:
            found: dict[str, dict[str, list[Any]]] = read_json(path)
            check(found, {"*": {"*": [PLAIN]}})
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RecordingError(f"{path} cannot be read: {error}") from None
        return found

    def recordings(self, measure: str, **values: Any) -> list[Recorded]:
        """Return the recordings of a measure, those with these values of knobs."""

        def recorded(row: Mapping[str, Any]) -> Recorded:
            folder = self.folder / measure / str(row[RECORDING]) if row.get(RECORDING) else None
            axes = {"preset": row.get("preset"), **row["config"], **row["run"]}
            return Recorded(axes, str(row["status"]), row.get("reason"), folder)

        every = self.once(("recordings", measure), lambda: [recorded(row) for row in self.sweep(measure).rows])
        return [one for one in every if all(one.axes.get(name) == value for name, value in values.items())]

    def recording(self, measure: str, **values: Any) -> Recorded:
        found = self.recordings(measure, **values)
        if not found:
            said = ", ".join(f"{name}={value}" for name, value in values.items())
            raise Unavailable(f"there is no recording of {measure}{' with ' if said else ''}{said}")
        return found[0]

    def traced(self, measure: str, record: Mapping[str, Any]) -> Session:
        """Return the trace of a row of a sweep that keeps traces, opened."""
        name = {row["hash"]: row.get(TRACE) for row in self.sweep(measure).rows}.get(record["hash"])
        path = self.folder / measure / str(name)
        if not name or not path.is_file():
            raise Unavailable(f"the trace of {measure}/{record['hash']} is not here")
        from stepscope.session import open_session  # needs the read side; measuring does not

        return self.once(("trace", path), lambda: open_session(path))


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of study.json. Raise RecordingError if it cannot be read."""
    try:
        facts: dict[str, Any] = read_json(folder / STUDY_FILE)
        check(facts, {"study": TEXT, "num_points~": {"*": COUNT}, "commands~": [TEXT], "*": PLAIN})
    except NotOfSchema as error:
        raise RecordingError(
            f"{folder / STUDY_FILE} does not describe a study ({error}): it was edited or damaged"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordingError(f"{folder / STUDY_FILE} cannot be read: {error}") from None
    return facts
