"""Is one-time startup cost mistaken for a normal step?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.step_times import settling
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, duration, one_finding, plural

_FIRST_CALL = {"compile": "compiling, loading or planning kernels", "allocator": "allocating memory from the driver"}
_LEAST_SHARE = 0.1  # of a trace's only step; less may have other causes


def check(case: Case) -> list[Finding]:
    if case.clean_ns is not None:
        return _unsettled(case)
    # With several steps, the first is not among the typical ones.
    return _only_step(case) if case.account.steps.height == 1 else []


def _unsettled(case: Case) -> list[Finding]:
    found = settling(case.recording)
    if found is None or not case.is_worth(found.mean_ns - found.settled_ns):
        return []
    row = {"num_unsettled": found.num_unsettled, "num_steps": found.num_steps, "first_ns": found.first_ns,
           "settled_ns": found.settled_ns, "mean_ns": found.mean_ns, "median_ns": case.step_ns}  # fmt: skip
    num = int((case.recording.facts.get("windows") or {}).get("warmup") or 0) + found.num_unsettled
    return one_finding(
        sentence=f"Of {plural(found.num_steps, 'clean step')}, the first {_were(found.num_unsettled)} still warming "
        f"up: the first took {duration(found.first_ns, 3)}, those in the second half "
        f"{duration(found.settled_ns, 3)} each. The mean ({duration(found.mean_ns, 3)}) therefore includes warm-up.",
        fix=f"stepscope run --warmup {num} --clean {max(20, found.num_steps)} train.py",
        derived="no time is saved; the times in this recording are too high",
        confidence="medium",
        falsified_by="record with a longer warm-up; the finding is wrong if step times still fall during it",
        evidence=(Evidence("clean steps", [row]),),
    )


def _were(number: int) -> str:
    return "was" if number == 1 else f"{number} were"


def _only_step(case: Case) -> list[Finding]:
    if not case.has_gpu_work:
        return []
    first = case.stalls.filter(pl.col("kind").is_in(list(_FIRST_CALL)))
    first_ns = float(first.select(LENGTH).sum().item()) if first.height else 0.0
    saving_ns = case.host_saving_ns(first)
    if first_ns < _LEAST_SHARE * case.step_ns or not case.is_worth(saving_ns):
        return []
    kinds = first.group_by("kind").agg(LENGTH.sum()).sort("duration_ns", descending=True)
    parts = " and ".join(f"{duration(ns, 3)} {_FIRST_CALL[kind]}" for kind, ns in kinds.iter_rows())
    return one_finding(
        sentence=f"The trace has only one step, and it looks like the first of a run: it spends {parts} out of "
        f"{duration(case.step_ns, 3)}. Later steps are likely to be faster.",
        fix="torch.profiler.schedule(wait=2, warmup=2, active=3), with prof.step() at the end of each step",
        saving_ns=saving_ns,
        derived="the step replayed without this time; later steps are likely to be shorter by as much",
        confidence="medium",
        falsified_by="trace later steps; the finding is wrong if they spend as long on this",
        places=case.host_places(first),
        evidence=(Evidence("one-time costs", first.select("kind", "op", LENGTH).head(8).to_dicts()),),
    )
