"""What a trace says, in one or two sentences made from its numbers."""

from __future__ import annotations

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.formatting import duration, percent

WORTH_SAYING = 0.10
MUCH_SHORTER = 0.9
"""Of the steps' time, a GPU window of less leaves out idle time before its first event or after its last."""
IDLE_MEANS = {
    "launch": "the host was inside ops and launches, and could not feed the GPU: launch-bound",
    "synchronization": "the host was waiting for the GPU instead of launching ahead",
    "data": "the host was fetching data",
    "allocator": "the host was in the driver's allocator",
    "python": "the host ran Python outside every op",
    "compile": "the host was compiling, planning or loading code",
    "other_ranks": "the host was waiting for other ranks",
    "queued": "kernels were launched and did not start yet",
    "unknown": "the trace does not show what the host did",
}
_CLASSES = {
    "gemm": "matrix products", "attention_forward": "attention", "attention_backward": "attention",
    "copy_cast": "copies and casts", "elementwise": "elementwise kernels", "norm": "normalization",
    "softmax": "softmax", "reduction": "reductions", "optimizer": "the optimizer", "convolution": "convolutions",
    "communication": "communication", "embedding_index": "embeddings and indexing", "fft": "FFTs",
    "sort_scan": "sorts and scans", "memset_memcpy": "memory copies and fills", "triton_fused": "fused kernels",
    "other": "kernels of no known class",
}  # fmt: skip


def trace_verdict(account: RankAccount) -> str:
    """What matters most in one rank's account."""
    time = account.gpu_time
    if not time.window_ns:
        return _without_gpu(account)
    idle = time.idle_ns / time.window_ns
    said = [_how_busy(account)]
    if idle >= WORTH_SAYING:
        causes = account.idle_causes.sort("total_ns", descending=True).row(0, named=True)
        said.append(f"in {percent(causes['share'])} of that {IDLE_MEANS[causes['cause']]}")
    exposed = time.exposed_communication_ns / time.window_ns
    if exposed >= WORTH_SAYING:
        said.append(f"{percent(exposed)} went to communication that no computing hid")
    largest = account.kernel_classes.row(0, named=True)
    part = "most of its work" if largest["share"] > 0.5 else "the largest part of its work"
    said.append(f"{part} is {_CLASSES[largest['class']]} ({percent(largest['share'])})")
    return "; ".join(said) + "."


def _how_busy(account: RankAccount) -> str:
    """How much the GPU did; of the steps as well, where its own window leaves out much of them."""
    time = account.gpu_time
    idle, word = time.idle_ns / time.window_ns, "idle"
    steps_ns = int(account.steps["duration_ns"].sum())
    in_steps = 1 - int(account.steps["gpu_busy_ns"].sum()) / max(1, steps_ns)
    if idle < WORTH_SAYING:
        idle, in_steps, word = 1 - idle, 1 - in_steps, "busy"
    if time.window_ns >= MUCH_SHORTER * steps_ns:
        return f"The GPU was {word} {percent(idle)} of {duration(time.window_ns)}"
    return (
        f"The GPU was {word} {percent(in_steps)} of the steps' {duration(steps_ns)}. Of the "
        f"{duration(time.window_ns)} from its first event to its last it was {word} {percent(idle)}"
    )


def _without_gpu(account: RankAccount) -> str:
    no_work = "The trace has no GPU work"
    if account.is_cut_off:
        no_work = "The file is cut off before any GPU event, which come last, so that GPU work may be missing"
    phases = account.phases.sort("host_ns", descending=True).row(0, named=True)
    if not phases["host_ns"]:
        return f"{no_work}; there are no ops to account for."
    most = "Most" if phases["host_share"] > 0.5 else "The largest part"
    share = f"{phases['phase']} ({percent(phases['host_share'])})"
    return f"{no_work}: the host alone is accounted for. {most} of its time is {share}."
