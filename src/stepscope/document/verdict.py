"""The verdict on a recording or a trace: one or two sentences made from its figures. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analysis.time.loop_time import DATA
from stepscope.analysis.time.phases import IDLE, UNATTRIBUTED
from stepscope.analysis.time.summary import Summary
from stepscope.formatting import duration, milliseconds, percent, plural, significant
from stepscope.trace.recording import RECORDING_FILE, Recording

if TYPE_CHECKING:
    from stepscope.analysis.ranks.rank_account import RankAccount

WORTH_SAYING = 0.10
"""A smaller share is not worth a clause of the sentence."""
DIFFERS = 0.05
"""If the average step differs by more of the typical one than this, the sentence says why."""
MUCH_SHORTER = 0.9
"""If the GPU's window is a smaller part of the steps, it leaves out idle time before its first event or after its
last."""
_IDLE_MEANS = {
    "launch": "the host was in ops and kernel launches and could not keep up: launch-bound",
    "synchronization": "the host waited for the GPU instead of launching ahead",
    "data": "the host was loading data",
    "allocator": "the host was in the driver's allocator",
    "python": "the host ran Python outside of ops",
    "compile": "the host was compiling, planning or loading code",
    "other_ranks": "the host waited for other ranks",
    "queued": "kernels were launched but had not started yet",
    "unknown": "the trace does not show what the host did",
}


def verdict(recording: Recording, summary: Summary) -> str:
    """Return how long a recorded step takes and what most of it is."""
    if summary.step_ns is None:
        return _without_samples(recording, summary)
    noise = summary.step_ns.ci_high - summary.step_ns.ci_low
    typical = milliseconds(summary.step_ns.median, noise)
    what_else, step = _average_and_typical(summary, typical), typical
    if summary.loop is not None:  # the average, as the throughput is of it
        step = rounded(summary.loop.step_ns) if what_else else milliseconds(summary.loop.step_ns, noise)
    sentence = f"A step takes {step}{' on average' * bool(what_else)}"
    if what_else and summary.loop is not None and summary.loop.num_left_out:
        sentence += f" in the last {plural(summary.loop.num_measured, 'undisturbed step')}"
    if summary.throughput is not None:
        sentence += f" ({significant(summary.throughput.per_s)} {summary.throughput.unit}/s)"
    sentence += what_else
    clauses = []
    shares = {row.name: row.share for row in summary.rows}
    if IDLE in shares and shares[IDLE] < WORTH_SAYING:
        clauses.append(f"the GPU is busy {percent(1 - shares[IDLE])} of it")
    elif IDLE in shares:
        waits = max(summary.phases, key=lambda phase: (phase.device_ns or 0) - (phase.gpu_busy_ns or 0))
        clauses.append(f"the GPU is idle {percent(shares[IDLE])} of it, mostly in {waits.name}")
    parts = {name: share for name, share in shares.items() if name not in (IDLE, UNATTRIBUTED)}
    if parts:
        largest = max(parts, key=lambda name: parts[name])
        clauses.append(f"{largest} is the largest part ({percent(parts[largest])})")
        if largest != "data" and parts.get("data", 0.0) >= WORTH_SAYING:
            what = "waiting for data takes" if summary.data_is_named else "the time before the forward takes"
            clauses.append(f"{what} {percent(parts['data'])}")
    if summary.mfu is not None:
        bound = "at least " if summary.flops is not None and summary.flops.hidden else ""
        what = "of the measured matmul rate" if summary.mfu.is_measured else "MFU"
        clauses.append(f"{bound}{percent(summary.mfu.share)} {what}")
    return sentence + (": " + "; ".join(clauses) if clauses else "") + "."


def _average_and_typical(summary: Summary, typical: str) -> str:
    """Return how a typical step leads to the average; empty if they differ by less than 5 %."""
    loop, step = summary.loop, summary.step_ns
    if loop is None or step is None or abs(loop.step_ns - step.median) <= DIFFERS * step.median:
        return ""
    between_ns = sum(loop.between_ns.values())
    rest = loop.step_ns - between_ns - step.median
    if rest < -DIFFERS * step.median:
        others = f" than the other {rounded(loop.step_ns - between_ns)}" if between_ns > DIFFERS * step.median else ""
        timed = plural(summary.num_clean, "timed step")
        beside = f", {rounded(between_ns)} of it between steps" if others else ""
        return f"{beside}; the {timed} were slower{others}, {typical} typically. Of a timed step"
    added = sorted(loop.between_ns.items(), key=lambda item: -item[1])
    texts = [f"{rounded(ns)} for {named_between(name)}" for name, ns in added if ns > DIFFERS * step.median]
    if rest > DIFFERS * step.median:
        texts.append(f"{rounded(rest)} more because some steps are slower")
    rest_text = " and ".join(texts) or "the rest for what lies between steps"
    return f": {typical} typically, and {rest_text}. Of a typical step"


def named_between(row: str) -> str:
    """Return what a loop does between steps, for people.

    >>> named_between("data"), named_between("evaluation")
    ('starting the DataLoader', 'evaluation')
    """
    return "starting the DataLoader" if row == DATA else row


def rounded(ns: float) -> str:
    """Return a mean of few steps with the digits it is worth."""
    return milliseconds(ns, DIFFERS * ns)


def _without_samples(recording: Recording, summary: Summary) -> str:
    if summary.num_steps:
        windows, seen = recording.facts.get("windows") or {}, plural(summary.num_steps, "step")
        if not windows.get("clean"):
            return f"The step time is unknown: {seen} recorded, but no clean steps were requested."
        return (
            f"The step time is unknown: {seen} recorded, all within the {windows.get('warmup')} warm-up steps. "
            "Run longer, or lower --warmup."
        )
    if any(warning.startswith(RECORDING_FILE) for warning in recording.warnings):
        return f"The step time is unknown: {RECORDING_FILE} is damaged (see the warnings)."
    if not recording.facts.get("environment"):
        if recording.status == "interrupted":
            return "Nothing was measured: the script has not imported torch yet, or was stopped before."
        return "Nothing was measured: the script never imported torch. Name the script that trains."
    if recording.status == "interrupted" and recording.facts.get("finished_at"):
        return "The script was interrupted before its first step. Let it run longer."
    if recording.status == "failed":
        if needs_launcher(recording):
            return "The script ended before its first step: it is one of several ranks and expects to be launched."
        code = recording.facts.get("exit_code")
        how = "" if code is None else f", with exit code {code}: its own message says why"
        return f"The script ended before its first step{how}. Run it again once that is fixed."
    if num_children := recording.facts.get("num_child_processes") or 0:
        return (
            f"No step was found in this process or in the {plural(num_children, 'process', 'processes')} it started. "
            "Call stepscope.record() in the one that trains."
        )
    return (
        "No step was found: no optimizer stepped, no parameter changed after a backward, and no module was called. "
        "Call stepscope.step() at the end of your loop."
    )


def needs_launcher(recording: Recording) -> bool:
    """Return whether a script failed because nothing told it its rank, as torchrun does."""
    return "environment variable RANK expected" in (recording.facts.get("exception") or "")


def trace_verdict(account: RankAccount) -> str:
    time = account.gpu_time
    if not time.window_ns:
        return _without_gpu(account)
    clauses = [_how_busy(account)]
    if time.idle_ns / time.window_ns >= WORTH_SAYING:
        cause = account.idle_causes.sort("total_ns", descending=True).row(0, named=True)
        clauses.append(f"for {percent(cause['share'])} of that {_IDLE_MEANS[cause['cause']]}")
    exposed = time.exposed_communication_ns / time.window_ns
    if exposed >= WORTH_SAYING:
        clauses.append(f"{percent(exposed)} went to communication that no compute overlapped")
    largest = account.kernel_classes.row(0, named=True)
    part = "most of its work" if largest["share"] > 0.5 else "the largest part of its work"
    clauses.append(f"{part} is in {class_name(largest['class'])} kernels ({percent(largest['share'])})")
    return "; ".join(clauses) + "."


def class_name(name: str) -> str:
    """Return a class of kernels for people.

    >>> class_name("copy_cast"), class_name("other")
    ('copy cast', 'unclassified')
    """
    return "unclassified" if name == "other" else name.replace("_", " ")


def _how_busy(account: RankAccount) -> str:
    time = account.gpu_time
    idle, word = time.idle_ns / time.window_ns, "idle"
    steps_ns = int(account.steps["duration_ns"].sum())
    in_steps = 1 - int(account.steps["gpu_busy_ns"].sum()) / max(1, steps_ns)
    if idle < WORTH_SAYING:
        idle, in_steps, word = 1 - idle, 1 - in_steps, "busy"
    if time.window_ns >= MUCH_SHORTER * steps_ns:
        return f"The GPU was {word} {percent(idle)} of {duration(time.window_ns)}"
    return (
        f"The GPU was {word} {percent(in_steps)} of the steps ({duration(steps_ns)}). From its first to its last "
        f"event ({duration(time.window_ns)}) it was {word} {percent(idle)}"
    )


def _without_gpu(account: RankAccount) -> str:
    cut_off = "The trace file is cut off before any GPU event, so GPU work may be missing"
    no_work = cut_off if account.is_cut_off else "The trace has no GPU work"
    phases = account.phases.sort("host_ns", descending=True).row(0, named=True)
    if not phases["host_ns"]:
        return f"{no_work} and no ops."
    most = "Most" if phases["host_share"] > 0.5 else "The largest part"
    return f"{no_work}. {most} of the host time is {phases['phase']} ({percent(phases['host_share'])})."
