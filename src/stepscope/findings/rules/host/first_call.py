"""Is first-call cost mistaken for the steady state?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.step_times import settling
from stepscope.analysis.time.whatif import stretches
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_FIRST_CALL = {"compile": "compiling, loading or planning kernels", "allocator": "asking the driver for memory"}
_MOST_OF_STEP = 0.1
"""Of the only step of a trace: below this it may be anything."""


def check(case: Case) -> list[Finding]:
    if case.clean_ns is not None:
        return _unsettled(case)
    # Of several steps the typical ones are those that are alike; without steps nothing says how many there are.
    return _only_step(case) if case.account.steps.height == 1 else []


def _unsettled(case: Case) -> list[Finding]:
    found = settling(case.recording)
    if found is None or not case.is_worth(found.mean_ns - found.settled_ns):
        return []
    row = {"num_unsettled": found.num_unsettled, "num_steps": found.num_steps, "first_ns": found.first_ns,
           "settled_ns": found.settled_ns, "mean_ns": found.mean_ns, "median_ns": case.step_ns}  # fmt: skip
    num = int((case.recording.facts.get("windows") or {}).get("warmup") or 0) + found.num_unsettled
    return [
        Finding(
            sentence=f"The first {found.num_unsettled} of {plural(found.num_steps, 'clean step')} had not settled: "
            f"the first took {duration(found.first_ns, 3)}, the last half {duration(found.settled_ns, 3)} each, so "
            f"that the mean ({duration(found.mean_ns, 3)}) is of warm-up too.",
            fix=f"stepscope run --warmup {num} --clean {max(20, found.num_steps)} train.py",
            saving_ns=None,
            derived="nothing is saved: the figures of this recording are too high",
            confidence="medium",
            falsified_by="step times that fall again after a longer warm-up",
            evidence=(Evidence("clean steps", [row]),),
        )
    ]


def _only_step(case: Case) -> list[Finding]:
    if not case.has_gpu_work:
        return []
    first = case.stalls.filter(pl.col("kind").is_in(list(_FIRST_CALL)))
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    total_ns = float(first.select(length).sum().item()) if first.height else 0.0
    saving_ns = case.saving_ns(Change(host=stretches(first))) if first.height else 0.0
    if total_ns < _MOST_OF_STEP * case.step_ns or not case.is_worth(saving_ns):
        return []
    kinds = first.group_by("kind").agg(length.sum()).sort("duration_ns", descending=True)
    parts = ", ".join(f"{duration(ns, 3)} {_FIRST_CALL[kind]}" for kind, ns in kinds.iter_rows())
    return [
        Finding(
            sentence=f"The trace has one step, and it looks like a first one: {parts}, of "
            f"{duration(case.step_ns, 3)}. What it shows is not the steady state.",
            fix="torch.profiler.schedule(wait=2, warmup=2, active=3), with prof.step() at the end of each step",
            saving_ns=saving_ns,
            derived="the step replayed with these stretches gone: what a later step is likely to be shorter by",
            confidence="medium",
            falsified_by="a trace of later steps with stretches as long",
            places=case.host_places(first),
            evidence=(Evidence("first-call stretches", first.select("kind", "op", length).head(8).to_dicts()),),
        )
    ]
