"""Summary of a dtype audit: modules, ops by dtype, casts by purpose."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from stepscope.display import Shown

PHASES = ("forward", "backward", "optimizer")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ModuleGroup:
    """Modules of the same kind at the same place in several blocks: `layers.*.norm`."""

    name: str
    kind: str
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_modules: int


@dataclass(frozen=True)
class OpGroup:
    """Calls of one op in one phase with the same input and output dtype."""

    op: str
    phase: str
    inputs: tuple[str, ...]
    output: str | None
    num_calls: int


@dataclass(frozen=True)
class Stayed:
    """Forward ops that computed in float32 for one reason."""

    reason: str
    detail: str | None
    ops: tuple[str, ...]
    num_calls: int
    places: tuple[str, ...]  # lines of the program, or else modules


@dataclass(frozen=True)
class CastGroup:
    source: str
    target: str
    phase: str
    of: str
    by: str
    function: str | None
    num_by_micro_batch: tuple[int, ...]
    moved_bytes: int  # bytes read and written
    num_again: int  # casts that repeat one in the same forward
    again_bytes: int
    modules: tuple[str, ...]
    callers: tuple[str, ...]

    @property
    def num_casts(self) -> int:
        return sum(self.num_by_micro_batch)


@dataclass(frozen=True)
class WeightCasts:
    """Weights cast by autocast: each once per micro-batch, then reused in that forward."""

    num_parameters: int
    parameter_bytes: int
    num_casts: int
    cast_bytes: int  # bytes written in the first micro-batch
    num_uses: int  # uses by ops in all forwards
    num_repeated: int  # casts already made by an earlier micro-batch
    repeated_bytes: int  # bytes read and written by those


class DtypeAudit(Shown):
    """The result of a dtype audit. `facts` are its JSON values."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values (docs/precision.md)."""
        return {**self.facts, "weight_casts": vars(self.weight_casts), "cast_bytes": self.cast_bytes()}

    def module(self, name: str) -> Mapping[str, Any]:
        """Return one module's row: `inputs`, `outputs`, `parameters` are lists of dtypes."""
        found: Mapping[str, Any] = next(row for row in self.facts["modules"] if row["name"] == name)
        return found

    @property
    def modules(self) -> list[ModuleGroup]:
        """Called modules, grouped if they differ only in their block's number."""

        def key(row: Row) -> tuple[Any, ...]:
            dtypes = (tuple(row[name]) for name in ("parameters", "inputs", "outputs"))
            return (numberless(row["name"]), row["kind"], *dtypes)

        return [
            ModuleGroup(name, kind, parameters, inputs, outputs, len(rows))
            for (name, kind, parameters, inputs, outputs), rows in _grouped(self.facts["modules"], key)
        ]

    @property
    def ops(self) -> list[OpGroup]:
        """Ops by phase and dtype, the most frequent first."""

        def key(row: Row) -> tuple[Any, ...]:
            return row["op"].removeprefix("aten."), row["phase"], tuple(row["inputs"]), row["output"]

        found = [
            OpGroup(op, phase, inputs, output, _sum(rows, "num_calls"))
            for (op, phase, inputs, output), rows in _grouped(self.facts["ops"], key)
        ]
        return sorted(found, key=lambda one: -one.num_calls)

    @property
    def stayed(self) -> list[Stayed]:
        """Ops that computed in float32 despite a lower dtype, by reason, the most frequent first."""
        if self.facts["low_dtype"] is None:
            return []
        stayed = [row for row in self.facts["ops"] if row["reason"] is not None]
        found = [
            Stayed(
                reason,
                detail,
                ops=_distinct(row["op"].removeprefix("aten.") for row in rows),
                num_calls=_sum(rows, "num_calls"),
                places=_distinct(row["caller"] or row["module"] for row in rows),
            )
            for (reason, detail), rows in _grouped(stayed, itemgetter("reason", "detail"))
        ]
        return sorted(found, key=lambda one: -one.num_calls)

    @property
    def casts(self) -> list[CastGroup]:
        """Casts by purpose, the most bytes first."""
        purpose = ("source", "target", "phase", "of", "by", "function")
        found = [
            CastGroup(
                **dict(zip(purpose, values)),
                num_by_micro_batch=tuple(map(sum, zip(*(row["num_by_micro_batch"] for row in rows)))),
                moved_bytes=_sum(rows, "read_bytes", "written_bytes"),
                num_again=_sum(rows, "num_again"),
                again_bytes=_sum(rows, "again_bytes"),
                modules=_distinct(numberless(row["module"]) for row in rows if row["module"]),
                callers=_distinct(row["caller"] for row in rows),
            )
            for values, rows in _grouped(self.facts["casts"], itemgetter(*purpose))
        ]
        return sorted(found, key=lambda one: -one.moved_bytes)

    def cast_bytes(self, **only: str) -> int:
        """Return bytes moved by casts per step; `phase="forward"`, `of="weight"`, `by="autocast"` filter."""
        return sum(
            one.moved_bytes for one in self.casts if all(getattr(one, name) == value for name, value in only.items())
        )

    @property
    def weight_casts(self) -> WeightCasts:
        """Weight casts by autocast."""
        rows = [row for row in self.facts["casts"] if row["of"] == "weight" and row["by"] == "autocast"]
        num_casts = sum(sum(row["num_by_micro_batch"]) for row in rows)
        num_first = sum(row["num_by_micro_batch"][0] for row in rows)
        # A row's casts have one source line, so every micro-batch moves as much.
        firsts = [(row, row["num_by_micro_batch"][0] / sum(row["num_by_micro_batch"])) for row in rows]
        repeated = sum((row["read_bytes"] + row["written_bytes"]) * (1 - share) for row, share in firsts)
        known = self.facts["weight_casts"]
        return WeightCasts(
            num_parameters=known["num_parameters"],
            parameter_bytes=known["parameter_bytes"],
            num_casts=num_casts,
            cast_bytes=round(sum(row["written_bytes"] * share for row, share in firsts)),
            num_uses=known["num_uses"],
            num_repeated=num_casts - num_first,
            repeated_bytes=round(repeated),
        )


def numberless(name: str) -> str:
    """Return a module's name with its block numbers starred; a name of only numbers stays.

    >>> numberless("layers.11.attention.q"), numberless("0")
    ('layers.*.attention.q', '0')
    """
    words = name.split(".")
    return name if all(map(str.isdigit, words)) else ".".join("*" if word.isdigit() else word for word in words)


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))


def _grouped(
    rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]
) -> Iterable[tuple[tuple[Any, ...], list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups.items()


def _sum(rows: Iterable[Row], *names: str) -> int:
    return sum(row[name] for row in rows for name in names)
