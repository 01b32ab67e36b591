"""How long the parts of a clean step take on each rank, from the ranks' recordings."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from stepscope.analysis.ranks.rank_account import RankSummary
from stepscope.analysis.run.series import summed
from stepscope.analysis.time.phases import phase_of
from stepscope.errors import RecordingError
from stepscope.trace.recording import read_recording

_PHASES = ("data", "forward", "optimizer", "other")


def clean_times(summaries: Sequence[RankSummary]) -> pl.DataFrame | None:
    """Return each rank's host time per clean step by phase, without the backward, in which ranks wait; None unless
    every trace is in a recording with clean steps."""
    rows = []
    for each in summaries:
        try:
            clean = read_recording(Path(each.path).parent.parent).window("clean")
        except RecordingError:
            return None
        if not clean:
            return None
        belongs, sums = phase_of(clean), Counter[str | None]()
        for name, ns in summed(sample.host_ns for sample in clean).items():
            sums[belongs.get(name)] += ns
        rows.append({"rank": each.rank, **{f"{phase}_ns": sums[phase] / len(clean) for phase in _PHASES}})
    return pl.DataFrame(rows)
