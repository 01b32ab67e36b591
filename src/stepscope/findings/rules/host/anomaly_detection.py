"""Does anomaly detection, or a NaN check of your own, run at every op?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.kernels.nan_checks import stack_writing_ops
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, duration, one_finding, stretches
from stepscope.findings.waiting import repeated_checks, starts_within


def check(case: Case) -> list[Finding]:
    checks = repeated_checks(case)
    if checks.is_empty():
        return []
    events = checks["events"].drop_nulls().explode().drop_nulls()
    waits = case.waits.filter(starts_within(case.waits, checks))
    is_autograd = checks["is_autograd"].sum() > checks.height / 2
    spent = checks.select("start_ns", "end_ns")
    traced = case.within(stack_writing_ops(case.linked))
    traced = traced if is_autograd else traced.clear()
    host = pl.concat([stretches(spent), traced]).sort("start_ns")
    host = host.filter((pl.col("start_ns") >= pl.col("end_ns").cum_max().shift(1)).fill_null(True))
    change = replace(case.without(events), host=host, unwaited=frozenset(waits["event"].to_list()))
    saving_ns = case.saving_ns(change)
    if not case.is_worth(saving_ns):
        return []
    who = "torch.autograd.detect_anomaly" if is_autograd else "The program"
    table = case.grouped(checks, "num_checks", "phase", "module", "is_autograd", time=LENGTH.alias("host_ns"))
    stacks_ns = case.total_ns(traced, LENGTH * (1 - pl.col("factor")))
    stacks = f", plus {duration(stacks_ns, 3)} to record a stack trace at {case.number_text(traced, 'forward op')}"
    stacks = stacks if traced.height else ""
    return one_finding(
        sentence=f"{who} runs {case.number_text(checks, 'NaN check')} per step and waits for each result: "
        f"{duration(case.total_ns(spent, LENGTH), 3)} of host time in a {duration(case.step_ns, 3)} step{stacks}.",
        fix="torch.autograd.set_detect_anomaly(False)" if is_autograd else "check only the loss, every 100 steps",
        saving_ns=saving_ns,
        derived="the step replayed without the checks, their kernels and the waits for them"
        + (", and with the usual time for ops that record a stack trace" if stacks else ""),
        falsified_by="turn the checks off; the finding is wrong if the step is not faster",
        places=case.host_places(spent),
        evidence=(Evidence("NaN checks", table.head(8).to_dicts()),),
    )
