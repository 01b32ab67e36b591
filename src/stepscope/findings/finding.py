"""A finding: one cause, its cost, and the fix."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stepscope.formatting import duration, percent, safe, size

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Evidence:
    table: str  # title of the rows, such as `kernels` or `slow steps`
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class Finding:
    """One cause, its cost, and the fix."""

    sentence: str  # the problem, with its figures
    fix: str  # the change to make, as code where possible
    evidence: tuple[Evidence, ...]
    falsified_by: str  # how to check the finding, and what would disprove it
    saving_ns: float | None = None  # time saved per clean step; None if the saving is only memory, or unknown
    saving_bytes: int | None = None  # memory saved at the peak
    derived: str = ""  # how the saving was computed
    upper_bound: bool = False  # whether the saving is the most that the fix can achieve
    confidence: Confidence = "high"
    places: tuple[tuple[int, int], ...] = ()
    """Where to look in the trace, most relevant first: up to 20 pairs of `start_ns` and `end_ns` on its clock."""
    rows: tuple[str, ...] = ()  # rows of the ledger that it is about, other than GPU work that its fix changes
    claims: Mapping[str, float] = field(default_factory=dict)
    """Rows of the ledger that it explains, in ns per step; `saving_ns` is at most their sum. Set by `diagnose`."""
    group: str | None = None  # the fix that it shares with other findings, one of `findings/groups.py`
    is_provable: bool = True  # whether this finding's fix is the one that `stepscope verify` applies for the rule
    id: str = ""  # the rule's id, set by `diagnose`

    def __repr__(self) -> str:
        return f"<Finding {self.id}: {' '.join(saving_texts(self, None)).strip()}; {safe(self.sentence, 100)}>"

    def to_json(self) -> dict[str, Any]:
        """Return the object for `--json` (docs/diagnose.md)."""
        fields = asdict(self)
        saving_ns = fields.pop("saving_ns")
        order = ("id", "sentence", "saving_ms", "saving_bytes", "upper_bound", "confidence", "fix", "derived",
                 "falsified_by", "group", "claims", "places", "evidence")  # fmt: skip
        fields["claims"] = {f"{row}_ms": ns / 1e6 for row, ns in self.claims.items()}
        fields["saving_ms"] = None if saving_ns is None else saving_ns / 1e6
        fields["places"] = [{"start_ns": start_ns, "end_ns": end_ns} for start_ns, end_ns in self.places]
        return {name: fields[name] for name in order}


def saving_texts(finding: Finding, step_ns: float | None) -> tuple[str, str]:
    """Return what the fix saves and what that is of: `3.43 ms`, `per step (5.1 %)`."""
    most = "up to " if finding.upper_bound else ""
    memory = None if finding.saving_bytes is None else size(finding.saving_bytes)
    if finding.saving_ns is not None:
        share = f" ({percent(finding.saving_ns / step_ns)})" if step_ns else ""
        also = f" and {most}{memory} of the peak" if memory else ""
        return f"{most}{duration(finding.saving_ns, 3)}", f"per step{share}{also}"
    return (f"{most}{memory}", "of the peak") if memory else ("unknown", "")
