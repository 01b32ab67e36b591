"""A finding: one cause, its cost, and the fix."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stepscope.formatting import duration, duration_range, percent, safe, size

Confidence = Literal["high", "medium", "low"]
OVER_TIME = frozenset({"drift", "memory_creep", "checkpoint_cost", "evaluation_cost", "evaluation_memory",
                       "loss_anomaly", "stalls"})  # fmt: skip
"""The ids of findings about the whole run."""


@dataclass(frozen=True)
class Evidence:
    """Rows that a finding stands on."""

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
    saving_low_ns: float | None = None  # the saving is between these in 9 of 10 cases. Set by `diagnose`
    saving_high_ns: float | None = None
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
    other_fix: str = ""  # the fix that `stepscope verify` applies for it, if it is not the one with the rule's id
    id: str = ""  # the rule's id, set by `diagnose`

    def __repr__(self) -> str:
        return f"<Finding {self.id}: {' '.join(saving_texts(self, None)).strip()}; {safe(self.sentence, 100)}>"

    def to_json(self) -> dict[str, Any]:
        """Return the object for `--json` (docs/diagnose.md)."""
        fields = asdict(self)
        order = ("id", "sentence", "saving_ms", "saving_low_ms", "saving_high_ms", "saving_bytes", "upper_bound",
                 "confidence", "fix", "derived", "falsified_by", "group", "claims", "places", "evidence")  # fmt: skip
        fields["claims"] = {f"{row}_ms": ns / 1e6 for row, ns in self.claims.items()}
        for name in ("saving", "saving_low", "saving_high"):
            ns = fields.pop(f"{name}_ns")
            fields[f"{name}_ms"] = None if ns is None else ns / 1e6
        fields["places"] = [{"start_ns": start_ns, "end_ns": end_ns} for start_ns, end_ns in self.places]
        return {name: fields[name] for name in order}


def saving_texts(finding: Finding, step_ns: float | None) -> tuple[str, str]:
    """Return what the fix saves and what that is of: `2.40 to 5.15 ms`, `per step (expected: 3.43 ms, 5.1 %)`."""
    most = "up to " if finding.upper_bound else ""
    memory = None if finding.saving_bytes is None else size(finding.saving_bytes)
    if finding.saving_ns is None:
        return (f"{most}{memory}", "of the peak") if memory else ("unknown", "")
    also = f" and {most}{memory} of the peak" if memory else ""
    # What happens in some steps alone can be longer than a typical step.
    share = percent(finding.saving_ns / step_ns) if step_ns and finding.saving_ns <= step_ns else ""
    if finding.saving_low_ns is None or finding.saving_high_ns is None:
        return f"{most}{duration(finding.saving_ns, 3)}", f"per step{f' ({share})' if share else ''}{also}"
    expected = ", ".join(filter(None, (f"expected: {duration(finding.saving_ns, 3)}", share)))
    return duration_range(finding.saving_low_ns, finding.saving_high_ns), f"per step ({expected}){also}"
