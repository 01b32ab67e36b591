"""Rules about the whole run: what changes from its first step to its last, and what interrupts it."""

from dataclasses import replace

from stepscope.findings.rule import Case, Finding, Unavailable, on_gpu, rule
from stepscope.formatting import plural

FEWEST_STEPS = 2  # that can show a change


def _found(case: Case, id: str) -> list[Finding]:
    _ = case.recording  # a bare trace has none, and need not import what follows
    from stepscope.findings.over_time import RULES

    found = RULES[id](case.run)
    if not found and case.run.num_steps < FEWEST_STEPS:
        raise Unavailable(f"The run has {plural(case.run.num_steps, 'step')}, too few to show a change over time.")
    return found


@rule
def drift(case: Case) -> list[Finding]:
    """Do steps become slower in the course of the run?"""
    found = _found(case, "drift")
    from stepscope.findings.over_time import unsure_drift

    if not found and (why := unsure_drift(case.run)):
        raise Unavailable(why)
    return found


@rule
def memory_creep(case: Case) -> list[Finding]:
    """Does memory grow for as long as the run goes on?"""
    found = _found(case, "memory_creep")
    from stepscope.analysis.run.memory_creep import LEAST_STEPS

    if not found and case.run.num_steps < LEAST_STEPS:
        raise Unavailable(f"The run has {plural(case.run.num_steps, 'step')}: growth needs {LEAST_STEPS} to show.")
    return found


@rule
def checkpoint_cost(case: Case) -> list[Finding]:
    """Do checkpoints take a noticeable part of the run?"""
    return _per_step(case, _found(case, "checkpoint_cost"), "checkpoint")


@rule
def evaluation_cost(case: Case) -> list[Finding]:
    """Do evaluations take a noticeable part of the run?"""
    return _per_step(case, _found(case, "evaluation_cost"), "evaluation")


@on_gpu
def evaluation_memory(case: Case) -> list[Finding]:
    """Does an evaluation need more memory than training?"""
    return _found(case, "evaluation_memory")


def _per_step(case: Case, findings: list[Finding], kind: str) -> list[Finding]:
    """Return findings whose saving is what the average step has of it: the first time may compile, or open files.

    What most steps have is no evaluation but a part of training, such as the targets of an off-policy learner.
    """
    loop = case.summary.loop
    if loop is not None and kind == "evaluation" and loop.in_step_ns.get(kind):
        return []
    share_ns = None if loop is None else loop.between_ns.get(kind, loop.in_step_ns.get(kind))
    return [replace(finding, saving_ns=share_ns or finding.saving_ns) for finding in findings]


@rule
def loss_anomaly(case: Case) -> list[Finding]:
    """Is the loss NaN or infinite, or does it jump?"""
    return _found(case, "loss_anomaly")


@rule
def stalls(case: Case) -> list[Finding]:
    """Does training stop for garbage collections, or for no known reason?"""
    return _found(case, "stalls")
