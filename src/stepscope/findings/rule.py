"""What rules are written with: the case, findings with their evidence, and changes to replay."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.what_if import stretches
from stepscope.errors import ABOUT_GPUS, Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.session.case import LENGTH, Case
from stepscope.trace.compile_file import count_of, entries

__all__ = [
    "LENGTH", "RULES", "Case", "Change", "Evidence", "Finding", "Unavailable", "count_of",
    "entries", "on_gpu", "one_finding", "rule", "stretches",
]  # fmt: skip

P = ParamSpec("P")
Check = Callable[[Case], list[Finding]]
RULES: dict[str, Check] = {}


def rule(check: Check) -> Check:
    """Make a function a rule: its name is the rule's id, the first line of its docstring the rule's question."""
    RULES[check.__name__] = check
    return check


def on_gpu(check: Check) -> Check:
    """Make a function a rule about a fault that a CPU does not have."""

    @wraps(check)
    def checked(case: Case) -> list[Finding]:
        if case.is_on_cpu:
            raise Unavailable(ABOUT_GPUS)
        return check(case)

    return rule(checked)


def _listed(make: Callable[P, Finding]) -> Callable[P, list[Finding]]:
    return lambda *fields, **named: [make(*fields, **named)]


one_finding = _listed(Finding)  # makes a list of one finding, from its fields
