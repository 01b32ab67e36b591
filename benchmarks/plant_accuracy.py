"""What `diagnose` makes of planted traces: place and expected saving of each cause beside the measured one.

python benchmarks/plant_accuracy.py FOLDER     as plant_traces.py left it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stepscope import diagnose
from stepscope.findings.diagnose import all_rules


def main(folder: Path) -> None:
    truth = json.loads((folder / "truth.json").read_text())
    print(
        "| plant | place | step: expected | measured | saving: expected | measured | error | told of the fixed one |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name, known in truth.items():
        if "error" in known:
            print(f"| {name} | | | | | | | {known['error'][:60]} |")
            continue
        slow = diagnose(folder / f"{name}.slow.json.gz", use_cache=False)
        fixed = diagnose(folder / f"{name}.fixed.json.gz", use_cache=False)
        ids = [finding.id for finding in slow.findings]
        rule = max((rule.id for rule in all_rules() if name.startswith(rule.id)), key=len, default=name)
        place = ids.index(rule) + 1 if rule in ids else None
        saved = known["slow_ms"] - known["fixed_ms"]
        expected = slow.findings[place - 1].saving_ns if place else None
        error = f"{expected / 1e6 / saved - 1:+.0%}" if expected is not None and saved > 0 else ""
        told = ", ".join(f"{finding.id} {(finding.saving_ns or 0) / 1e6:.1f}" for finding in fixed.findings)
        text = "–" if expected is None else f"{expected / 1e6:.2f}"
        print(
            f"| {name} | {place or 'missed: ' + ', '.join(ids[:2])} | {(slow.step_ns or 0) / 1e6:.2f} | "
            f"{known['slow_ms']:.2f} | {text} | {saved:.2f} | {error} | {told} |"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
