"""Does the host pause within each step: logging, checkpoints, garbage collection?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.stalls import quiet_stretches
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, duration, one_finding
from stepscope.findings.waiting import place

_LEAST_SHARE_OF_STEPS = 0.5  # an occasional checkpoint is intended


def check(case: Case) -> list[Finding]:
    if case.work.is_empty():
        return []
    if not case.account.steps.height:
        raise Unavailable("The trace does not mark where steps end. Call prof.step() at the end of each step.")
    silent = case.stalls.filter(pl.col("kind").is_in(["python", "launch"]))
    quiet = quiet_stretches(case.linked, silent).filter(pl.col("phase").ne_missing("optimizer"))
    if case.account.steps.height == 1:  # what follows the only step may be the profiler stopping
        quiet = quiet.filter(pl.col("end_ns") <= case.work["start_ns"].max())
    saving_ns = case.host_saving_ns(quiet)
    num_stalled = quiet["step"].n_unique()
    if not case.is_worth(saving_ns) or num_stalled < _LEAST_SHARE_OF_STEPS * case.num_steps:
        return []
    table = case.grouped(quiet, "num_stretches", "phase", "op", "caller")
    top = table.row(0, named=True)
    if str(top["op"]).startswith("aten::"):
        where, fix = (
            f"in {top['op']} on the CPU",
            f"pass {top['op']} a CUDA tensor, or move it to a DataLoader worker",
        )
    else:
        where = f"in {top['op']}" if top["op"] is not None else f"in {place(top)}, with no op running"
        fix = (
            "find it with python -m cProfile -s cumtime train.py; then log and save every 100 steps or from a "
            "thread, and use gc.disable() with gc.collect() between epochs"
        )
    once = " Only one step was traced, so this may be a one-time cost." if case.num_steps == 1 else ""
    return one_finding(
        sentence=f"The host launches nothing for {case.cost_text(float(table['duration_ns'].sum()))}, in "
        f"{case.number_text(quiet, 'pause')}, mostly {where}. The GPU has only "
        f"{duration(case.step.device_ns, 3)} of work.{once}",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without these pauses",
        confidence="low" if once else "high" if top["op"] or top["caller"] else "medium",
        falsified_by="turn off logging, checkpoints and gc; the finding is wrong if the step is not faster",
        places=case.host_places(quiet),
        evidence=(Evidence("pauses of the host", table.head(8).to_dicts()),),
    )
