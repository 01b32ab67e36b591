"""The saving that a diagnosis predicts for a fix."""

from __future__ import annotations

from stepscope.analysis.comparison.verified import Expected
from stepscope.findings.diagnose import Diagnosis
from stepscope.findings.fixes import Chosen


def expected_of(diagnosis: Diagnosis, chosen: Chosen) -> Expected:
    """Return the saving of the finding with the fix's id, or why there is none."""
    if len(chosen.fixes) > 1:
        return _nothing("savings of several findings cannot be added")
    name = chosen.fixes[0].id
    finding = next((each for each in diagnosis.findings if each.id == name), None)
    if finding is not None:
        share = finding.saving_ns / diagnosis.step_ns if finding.saving_ns and diagnosis.step_ns else None
        return Expected(finding.saving_ns, share, finding.upper_bound, finding.confidence, None)
    unchecked = next((each.reason for each in diagnosis.unchecked if each.id == name), None)
    if unchecked is not None:
        return _nothing(f"diagnose could not check it: {unchecked}")
    if name in diagnosis.clean:
        return _nothing("diagnose found nothing to gain")
    return _nothing("no finding suggests it")


def _nothing(reason: str) -> Expected:
    return Expected(None, None, False, None, reason)
