"""Does the host do something else in a step than to feed the GPU: logging, checkpoints, garbage collection?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.waiting import place
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_COMES_BACK = 0.5
"""Of the steps, in how many it must be for a cost of every step; a checkpoint now and then is meant."""


def check(case: Case) -> list[Finding]:
    if case.work.is_empty():
        return []
    if not case.account.steps.height:
        raise Unavailable("nothing in the trace says where a step ends: call prof.step() after each")
    quiet = case.quiet_stretches.filter(pl.col("phase").ne_missing("optimizer"))
    if case.account.steps.height == 1:  # what comes after the only step's work may be the profiler that ends
        quiet = quiet.filter(pl.col("end_ns") <= case.work["start_ns"].max())
    saving_ns = case.saving_ns(Change(host=stretches(quiet))) if quiet.height else 0.0
    num_stalled = quiet["step"].n_unique()
    if not case.is_worth(saving_ns) or num_stalled < _COMES_BACK * case.num_steps:
        return []
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    table = (
        quiet.group_by("phase", "op", "caller")
        .agg((pl.len() / case.num_steps).alias("num_stretches"), length.sum() / case.num_steps)
        .sort("duration_ns", descending=True)
    )
    top = table.row(0, named=True)
    per_step = float(table["duration_ns"].sum())
    if str(top["op"]).startswith("aten::"):
        what, fix = f"in {top['op']} on the CPU", f"give {top['op']} a CUDA tensor, or do it in a DataLoader's worker"
    else:
        what = f"in {top['op']}" if top["op"] is not None else f"in {place(top)}, with no op running"
        fix = (
            "find it: python -m cProfile -s cumtime train.py; then log and save every 100 steps or from a thread, "
            "and gc.disable() with gc.collect() between epochs"
        )
    once = "; seen in one step alone, it may be first-call cost" if case.num_steps == 1 else ""
    return [
        Finding(
            sentence=f"The host is away for {duration(per_step, 3)} of a step of {duration(case.step_ns, 3)}, in "
            f"{plural(quiet.height / case.num_steps, 'stretch')}, mostly {what}; "
            f"the GPU has work for {duration(case.step.device_ns, 3)}{once}.",
            fix=fix,
            saving_ns=saving_ns,
            derived="the step replayed with these stretches gone",
            confidence="low" if once else "high" if top["op"] or top["caller"] else "medium",
            falsified_by="a step as long when logging, checkpoints and gc are off",
            places=case.host_places(quiet),
            evidence=(Evidence("quiet stretches of the host", table.head(8).to_dicts()),),
        )
    ]
