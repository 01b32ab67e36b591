"""What `diagnose` makes of planted traces: place and expected saving of each cause beside the measured one.

    python benchmarks/plant_accuracy.py FOLDER     as plant_traces.py left it

"measured" is clean, without a profiler: the median, with its quartiles where the truth has them. "traces" is the
difference of the two traced steps, both replayed without the profiler: what the traces themselves can tell of a host
that was faster or slower when the clean steps were taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stepscope import diagnose
from stepscope.findings.diagnose import all_rules

COLUMNS = (
    "plant", "place", "step: expected", "measured", "saving: expected", "measured", "error", "traces", "error",
    "told of the fixed one",
)  # fmt: skip


def main(folder: Path) -> None:
    truth = json.loads((folder / "truth.json").read_text())
    print_row(*COLUMNS)
    print_row(*("---" if name.startswith(("plant", "told")) else "---:" for name in COLUMNS))
    for name, known in truth.items():
        if "error" in known:
            print_row(name, *[""] * (len(COLUMNS) - 2), known["error"][:60])
            continue
        slow = diagnose(folder / f"{name}.slow.json.gz", use_cache=False)
        fixed = diagnose(folder / f"{name}.fixed.json.gz", use_cache=False)
        ids = [finding.id for finding in slow.findings]
        rule = max((rule.id for rule in all_rules() if name.startswith(rule.id)), key=len, default=name)
        place = ids.index(rule) + 1 if rule in ids else None
        expected_ns = slow.findings[place - 1].saving_ns if place else None
        saved_ms, spread = measured(known)
        traced_ms = ((slow.step_ns or 0) - (fixed.step_ns or 0)) / 1e6
        told = ", ".join(f"{finding.id} {(finding.saving_ns or 0) / 1e6:.1f}" for finding in fixed.findings)
        print_row(
            name, place or "missed: " + ", ".join(ids[:2]), f"{(slow.step_ns or 0) / 1e6:.2f}",
            f"{known['slow_ms']:.2f}", "–" if expected_ns is None else f"{expected_ns / 1e6:.2f}",
            f"{saved_ms:.2f}{spread}", error(expected_ns, saved_ms),
            f"{traced_ms:.2f}", error(expected_ns, traced_ms), told,
        )  # fmt: skip


def measured(known: dict[str, Any]) -> tuple[float, str]:
    """What the fix saved in milliseconds, and the quartiles of that as text."""
    if "saving_quartiles_ms" not in known:
        return known["slow_ms"] - known["fixed_ms"], ""
    low, middle, high = known["saving_quartiles_ms"]
    return middle, f" ({low:.1f}–{high:.1f})"


def error(expected_ns: float | None, saved_ms: float) -> str:
    return f"{expected_ns / 1e6 / saved_ms - 1:+.0%}" if expected_ns is not None and saved_ms > 0 else ""


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
