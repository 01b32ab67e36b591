"""What a trace says, in one or two sentences made from its numbers."""

from __future__ import annotations

from stepscope.analysis.rank import RankAccount
from stepscope.report.text import milliseconds, percent

WORTH_SAYING = 0.10
_MEANS = {
    "launch": "the host was inside ops and launches, and could not feed the GPU: launch-bound",
    "synchronisation": "the host was waiting for the GPU instead of launching ahead",
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
    "copy_cast": "copies and casts", "elementwise": "elementwise kernels", "norm": "normalisation",
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
    said = []
    if idle >= WORTH_SAYING:
        causes = account.idle_causes.sort("total_ns", descending=True).row(0, named=True)
        said.append(
            f"The GPU was idle {percent(idle)} of {milliseconds(time.window_ns)}; in {percent(causes['share'])} of "
            f"that {_MEANS[causes['cause']]}"
        )
    else:
        said.append(f"The GPU was busy {percent(1 - idle)} of {milliseconds(time.window_ns)}")
    exposed = time.exposed_communication_ns / time.window_ns
    if exposed >= WORTH_SAYING:
        said.append(f"{percent(exposed)} went to communication that no computing hid")
    largest = account.kernel_classes.row(0, named=True)
    said.append(f"most of its work is {_CLASSES[largest['class']]} ({percent(largest['share'])})")
    return "; ".join(said) + "."


def _without_gpu(account: RankAccount) -> str:
    phases = account.phases.sort("host_ns", descending=True).row(0, named=True)
    if not phases["host_ns"]:
        return "The trace has no GPU work and no ops to account for."
    return (
        "The trace has no GPU work: the host alone is accounted for. "
        f"Most of its time is {phases['phase']} ({percent(phases['host_share'])})."
    )
