"""What `stepscope improve` tries, and what a ledger promises of each change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stepscope.analysis.comparison.micro_batches import MICRO_BATCH, most_micro_batches, why_not_applied
from stepscope.analysis.comparison.verification import flops_by_dtype
from stepscope.errors import StepscopeError
from stepscope.findings.fixes import FIXES

if TYPE_CHECKING:
    from stepscope.trace.recording import Recording

TRIES = (
    "waiting_for_data", "memory_layout", "autocast", "sdpa", MICRO_BATCH, "cudnn_benchmark", "unfused_optimizer",
    "threads", "fp32_matmul", "pageable_copies", "attention_backend=cudnn", "expandable_segments", "launch_bound",
    "compile", "compile=max-autotune-no-cudagraphs",
)  # fmt: skip
"""The order without a ledger: what usually saves most first, what compiles last, with CUDA graphs before without."""
COMPILERS = ("compile", "launch_bound")  # one replaces the other
NEED_GPU = ("launch_bound", "attention_backend", "compile=max-autotune-no-cudagraphs")
PHASE_OF = {"waiting_for_data": "data", "unfused_optimizer": "optimizer"}
"""Changes that can save at most one phase of a step."""
COMPILE_S = {"compile": 30.0, "launch_bound": 30.0, "compile=max-autotune-no-cudagraphs": 180.0}
"""What compiling may add to a run, before one was measured."""
NUM_TRACED = 2
FIXED_ORDER, BY_PROMISE = "the fixed order", "the order of what promises most per second"
ENVIRONMENT = ("other_process", "throttling", "unclaimed_time")  # findings without a change in the script
LARGE_SHARE = 0.25  # of a step: a phase that long is looked at first
LOWER_PRECISION_SHARE = 0.25
"""What bfloat16 is expected to save of the GPU's time in float32: between nothing and half of it."""


def is_compiler(text: str) -> bool:
    return text.partition("=")[0] in COMPILERS


def replaces(text: str, other: str) -> bool:
    """Return whether one change takes the place of another: one of its own values, or what compiles too."""
    return text.partition("=")[0] == other.partition("=")[0] or (is_compiler(text) and is_compiler(other))


def following(text: str, survey: Recording) -> str | None:
    """Return what to try after a change that was kept: micro-batches twice as large again; None if nothing."""
    name, _, value = text.partition("=")
    growth = 2 * int(value or 2)
    is_next = name == MICRO_BATCH and most_micro_batches(survey) % growth == 0
    return f"{MICRO_BATCH}={growth}" if is_next else None


def phase_share(recording: Recording, phase: str) -> float | None:
    """Return the share of a phase in the timed steps, on the GPU's clock if there is one, or the host's if longer."""
    shares = []
    for name in ("host_ns", "device_ns"):
        parts = [getattr(sample, name) for sample in recording.window("clean")]
        if parts and all(parts) and sum(sum(each.values()) for each in parts):
            names = (phase, "before_forward") if phase == "data" else (phase,)
            named = sum(each.get(one, 0) for each in parts for one in names)
            shares.append(named / sum(sum(each.values()) for each in parts))
    return max(shares, default=None)


def is_gpu(recording: Recording) -> bool:
    return recording.facts.get("environment", {}).get("device") == "cuda"


def refusals(survey: Recording) -> dict[str, str]:
    """Return why changes cannot pay, from a run of the unchanged script that looked at what each would change."""
    refused: dict[str, str] = {
        facts["id"]: "; ".join(facts["left"]) or facts["nothing_seen"]
        for facts in survey.facts.get("fixes", ())
        if not facts["changed"]
    }
    left = {facts["id"]: facts["left"] for facts in survey.facts.get("fixes", ())}
    if MICRO_BATCH in refused or most_micro_batches(survey) < 2:
        refused[MICRO_BATCH] = why_not_applied(survey, left.get(MICRO_BATCH, ()))
    if "compile" in refused:
        refused |= dict.fromkeys(COMPILERS, refused["compile"])
    if not is_gpu(survey):
        refused |= dict.fromkeys(NEED_GPU, "no GPU was used")
    return refused


class Promises:
    """What changes promise on top of the best, by the ledger of the run that was last looked at.

    `survey` is the unchanged script, whose FLOPs were counted by dtype.
    """

    def __init__(self, survey: Recording, reads_traces: bool) -> None:
        self._survey = survey
        self.num_traced = NUM_TRACED if reads_traces else 0
        self.shares: dict[str, float] = {}  # change → the share of a step that it promises to save
        self.by_hand: dict[str, float] = {}  # the same by finding, of those whose fix is a change in the script

    def num_traced_with(self, fixes: str) -> int:
        """Return how many steps to trace in a run that is timed before that; 0 if so few timed steps are not enough.

        Steps after a trace are slower on a GPU, and before it, batches that workers had prefetched are used up.
        """
        prefetched = (self._survey.facts.get("steps") or {}).get("num_prefetched")
        is_short = is_gpu(self._survey) and (prefetched or "waiting_for_data" in fixes)
        return 0 if is_short else self.num_traced

    def look(self, changes: Sequence[str], best: Recording) -> str | None:
        """Take `shares` from a run of the best; return why its ledger could not be computed.

        Without a ledger, only the phases of a step say how much some changes can save.
        """
        by_finding, problem = {}, None
        try:
            by_finding = _expected(self._survey, best) if self.num_traced else {}
        except StepscopeError as error:
            problem = str(error)
        known = {*FIXES, *(name for fix in FIXES.values() for name in fix.findings), *ENVIRONMENT}
        self.by_hand = {name: share for name, share in by_finding.items() if name not in known}
        for name, phase in PHASE_OF.items():
            if (share := phase_share(best, phase) or 0.0) > LARGE_SHARE:
                by_finding.setdefault(name, share)
        self.shares = {}
        for text in changes:
            fix = FIXES[text.partition("=")[0]]
            share = sum(by_finding.get(name, 0.0) for name in (fix.id, *fix.findings))
            if share and not text.startswith("compile="):
                self.shares[text] = min(1.0, share)
        return problem

    def ordered(self, changes: Iterable[str], run_s: float) -> list[str]:
        """Return changes, what promises most per second first; last what compiles and promises nothing."""
        rates = {text: self.shares.get(text, 0.0) / (run_s + COMPILE_S.get(text, 0.0)) for text in changes}
        return sorted(rates, key=lambda text: (-rates[text], is_compiler(text)))


def _expected(survey: Recording, best: Recording) -> dict[str, float]:
    """Return what diagnose expects to save, as a share of the step, by finding."""
    from stepscope.findings.diagnose import diagnose
    from stepscope.session import open_session

    diagnosis = diagnose(open_session(best.folder).case)
    promised: dict[str, float] = {}
    if not diagnosis.average_ns:
        return promised
    for each in diagnosis.findings:
        if each.saving_ns:
            promised[each.id] = max(promised.get(each.id, 0.0), each.saving_ns / diagnosis.average_ns)
    flops = flops_by_dtype(survey)
    if "fp32_matmul" not in promised and diagnosis.gpu_busy_share and sum(flops.values()):
        float32_share = (flops.get("fp32", 0.0) + flops.get("tf32", 0.0)) / sum(flops.values())
        promised["autocast"] = LOWER_PRECISION_SHARE * float32_share * diagnosis.gpu_busy_share
    return promised
