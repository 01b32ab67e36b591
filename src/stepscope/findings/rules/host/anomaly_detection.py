"""Is NaN looked for at every op: `detect_anomaly`, or checks of one's own, left on?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.time.whatif import stretches
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.waiting import repeated_checks, starts_within
from stepscope.formatting import duration, plural
from stepscope.session.case import Case


def check(case: Case) -> list[Finding]:
    checks = repeated_checks(case)
    if checks.is_empty():
        return []
    events = checks["events"].drop_nulls().explode().drop_nulls()
    waits = case.waits.filter(starts_within(case.waits, checks))
    is_autograd = checks["is_autograd"].sum() > checks.height / 2
    spent = checks.select("start_ns", "end_ns")
    traced = case.stack_writing_ops if is_autograd else case.stack_writing_ops.clear()
    host = pl.concat([stretches(spent), traced]).sort("start_ns")
    host = host.filter((pl.col("start_ns") >= pl.col("end_ns").cum_max().shift(1)).fill_null(True))
    change = replace(case.without(events), host=host, unwaited=frozenset(waits["event"].to_list()))
    saving_ns = case.saving_ns(change)
    if not case.is_worth(saving_ns):
        return []
    count = checks.height / case.num_steps
    spent_ns = float((spent["end_ns"] - spent["start_ns"]).sum()) / case.num_steps
    who = "torch.autograd.detect_anomaly looks" if is_autograd else "the program looks"
    named = "torch.autograd.set_detect_anomaly(False)" if is_autograd else "check the loss alone, every 100 steps"
    table = (
        checks.with_columns(pl.col("phase", "module").cast(pl.String))
        .group_by("phase", "module", "is_autograd")
        .agg(
            (pl.len() / case.num_steps).alias("num_checks"),
            ((pl.col("end_ns") - pl.col("start_ns")).sum() / case.num_steps).alias("host_ns"),
        )
        .sort("host_ns", descending=True)
    )
    stacks_ns = float(((traced["end_ns"] - traced["start_ns"]) * (1 - traced["factor"])).sum()) / case.num_steps
    stacks = (
        f", and a stack written down at {plural(traced.height / case.num_steps, 'op')} of the forward for "
        f"{duration(stacks_ns, 3)} more"
        if traced.height
        else ""
    )
    return [
        Finding(
            sentence=f"{who} for NaN {plural(count, 'time')} a step and waits for the answer: "
            f"{duration(spent_ns, 3)} of the host{stacks}, in a step of {duration(case.step_ns, 3)}.",
            fix=named,
            saving_ns=saving_ns,
            derived="the step replayed without the checks, their kernels and the waits for them"
            + (", and with a usual time for ops that write a stack down" if stacks else ""),
            confidence="high",
            falsified_by="a step as long with the checks off",
            places=case.host_places(spent),
            evidence=(Evidence("checks for NaN", table.head(8).to_dicts()),),
        )
    ]
