"""A finding, and what a rule says when it has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Evidence:
    """Rows of a table, with the figures that the sentence was made from."""

    table: str
    """What the rows are of: `kernels`, `calls of aten::mm`, `host`…"""
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Finding:
    """One cause, what it costs, and what to change."""

    sentence: str
    """What is wrong, made from the figures."""
    fix: str
    """What to change, as something to type."""
    evidence: tuple[Evidence, ...]
    falsified_by: str
    """What one would see if it were not so."""
    saving_ns: float | None = None
    """Of a clean step; None where bytes are the cost, or where nobody can say."""
    saving_bytes: int | None = None
    """Of the peak."""
    derived: str = ""
    """How the saving was found."""
    upper_bound: bool = False
    """Whether the saving is the most that the fix could bring."""
    confidence: Confidence = "high"
    places: tuple[tuple[int, int], ...] = ()
    """Where to look in the trace: `start_ns` and `end_ns` on its clock, the best first, 20 at the most."""
    is_provable: bool = True
    """Whether the fix that `stepscope verify` has for the rule, where there is one, is the one that is meant."""
    id: str = ""
    """The rule's, given by `diagnose`."""

    def to_json(self) -> dict[str, Any]:
        """The object of `--json` (docs/diagnose.md)."""
        fields = asdict(self)
        saving_ns = fields.pop("saving_ns")
        order = ("id", "sentence", "saving_ms", "saving_bytes", "upper_bound", "confidence", "fix", "derived",
                 "falsified_by", "places", "evidence")  # fmt: skip
        fields["saving_ms"] = None if saving_ns is None else saving_ns / 1e6
        fields["places"] = [{"start_ns": start_ns, "end_ns": end_ns} for start_ns, end_ns in self.places]
        return {name: fields[name] for name in order}
