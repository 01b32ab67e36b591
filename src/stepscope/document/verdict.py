"""The verdict: one sentence made from the numbers."""

from __future__ import annotations

from stepscope.analysis.time.phases import IDLE, UNATTRIBUTED
from stepscope.analysis.time.summary import Summary
from stepscope.formatting import milliseconds, percent, significant
from stepscope.trace.recording import Recording

# Below this a share is not worth a clause of the sentence.
WORTH_SAYING = 0.10


def verdict(recording: Recording, summary: Summary) -> str:
    """What the recording says, in one sentence."""
    if summary.step_ns is None:
        return _without_samples(recording, summary)
    noise = summary.step_ns.ci_high - summary.step_ns.ci_low
    sentence = f"A step takes {milliseconds(summary.step_ns.median, noise)}"
    if summary.throughput is not None:
        sentence += f" ({significant(summary.throughput.per_s)} {summary.throughput.unit}/s)"
    clauses = []
    shares = {row.name: row.share for row in summary.rows}
    if IDLE in shares:
        waits = max(summary.phases, key=lambda p: (p.device_ns or 0) - (p.gpu_busy_ns or 0))
        if shares[IDLE] >= WORTH_SAYING:
            clauses.append(f"the GPU waits for the host in {percent(shares[IDLE])} of it, most in {waits.name}")
        else:
            clauses.append(f"the GPU is busy in {percent(1 - shares[IDLE])} of it")
    parts = {name: share for name, share in shares.items() if name not in (IDLE, UNATTRIBUTED)}
    if parts:
        largest = max(parts, key=lambda name: parts[name])
        clauses.append(f"{largest} is the largest part ({percent(parts[largest])})")
        if largest != "data" and parts.get("data", 0.0) >= WORTH_SAYING:
            what = "waiting for data takes" if summary.data_is_named else "what comes before the forward takes"
            clauses.append(f"{what} {percent(parts['data'])}")
    if summary.mfu is not None:
        bound = "at least " if summary.flops is not None and summary.flops.hidden else ""
        what = "of the measured matmul rate" if summary.mfu.is_measured else "MFU"
        clauses.append(f"{bound}{percent(summary.mfu.share)} {what}")
    sentence += ": " + "; ".join(clauses) if clauses else ""
    return sentence + "."


def _without_samples(recording: Recording, summary: Summary) -> str:
    if summary.num_steps:
        windows = recording.facts.get("windows") or {}
        if not windows.get("clean"):
            return f"{summary.num_steps} step(s) were seen, and no clean window was asked for: no step time."
        return (
            f"Only {summary.num_steps} step(s) were seen, all of them warm-up ({windows.get('warmup')} asked for): "
            "too few to say how fast a step is; run longer or lower --warmup."
        )
    if not recording.facts.get("environment"):
        return "The script never imported torch: there was nothing to measure."
    num_children = recording.facts.get("num_child_processes") or 0
    if num_children:
        return (
            f"No step was seen in this process, which started {num_children} process(es) of its own: "
            "record where the training runs, with torchrun -m stepscope run or stepscope.record() in the worker."
        )
    return (
        "No step was seen in the main thread: no torch optimizer stepped there and no module was called. "
        "Call stepscope.step() at the end of your loop's body."
    )
