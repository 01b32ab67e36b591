"""Rules about the whole run: what changes from its first step to its last, and what interrupts it."""

from stepscope.findings import over_time
from stepscope.findings.rule import Case, Finding, rule


@rule
def drift(case: Case) -> list[Finding]:
    """Do steps become slower in the course of the run?"""
    return over_time.drift(case.run)


@rule
def memory_creep(case: Case) -> list[Finding]:
    """Does memory grow for as long as the run goes on?"""
    return over_time.memory_creep(case.run)


@rule
def checkpoint_cost(case: Case) -> list[Finding]:
    """Do checkpoints take a noticeable part of the run?"""
    return over_time.checkpoint_cost(case.run)


@rule
def evaluation_cost(case: Case) -> list[Finding]:
    """Do evaluations take a noticeable part of the run?"""
    return over_time.evaluation_cost(case.run)


@rule
def loss_anomaly(case: Case) -> list[Finding]:
    """Is the loss NaN or infinite, or does it jump?"""
    return over_time.loss_anomaly_findings(case.run)


@rule
def stalls(case: Case) -> list[Finding]:
    """Does training stop for garbage collections, or for no known reason?"""
    return over_time.stall_findings(case.run)
