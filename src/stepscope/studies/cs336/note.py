"""Figures that the note "CS336 Assignment 2: Systems" published, by model and length. Times are nanoseconds.

Its models are those of the workload `cs336`: batch 4, a vocabulary of 10,000, float32 without TF32.
"""

from __future__ import annotations

from collections.abc import Mapping


def _ns(milliseconds: Mapping[str, float]) -> dict[str, float]:
    return {key: value * 1e6 for key, value in milliseconds.items()}


FORWARD_NS = _ns({
    "small 128": 10.9, "small 256": 11.9, "small 512": 18.1, "small 1024": 47.4,
    "medium 128": 21.8, "medium 256": 28.0, "medium 512": 49.7,
    "large 128": 39.2, "large 256": 56.2, "xl 128": 65.4, "2.7B 128": 83.8,
})  # fmt: skip
"""Mean after five warm-up passes, with the graph kept."""
FORWARD_BACKWARD_NS = _ns({
    "small 128": 55.8, "small 256": 60.7, "small 512": 61.3, "small 1024": 158.3,
    "medium 128": 101.2, "medium 256": 106.9, "medium 512": 178.1, "large 128": 164.7, "large 256": 207.6,
})  # fmt: skip
COLD_FORWARD_NS = _ns({
    "small 128": 66.8, "small 256": 69.4, "small 512": 75.8, "small 1024": 100.6,
    "medium 128": 79.6, "medium 256": 89.5, "medium 512": 108.6,
    "large 128": 100.8, "large 256": 117.9, "xl 128": 127.9, "2.7B 128": 143.2,
})  # fmt: skip
"""Without warm-up, a mean over 15 passes."""
COLD_FORWARD_BACKWARD_NS = _ns({
    "small 128": 83.0, "small 256": 84.5, "small 512": 92.8, "small 1024": 189.3,
    "medium 128": 130.5, "medium 256": 137.8, "medium 512": 212.4, "large 128": 199.5, "large 256": 241.2,
})  # fmt: skip
OUT_OF_MEMORY = (
    "medium 1024", "large 512", "large 1024", "xl 128", "xl 256", "xl 512", "xl 1024",
    "2.7B 128", "2.7B 256", "2.7B 512", "2.7B 1024",
)  # fmt: skip
"""Forward and backward did not fit its 32 GB."""
PROFILED_FORWARD_NS = _ns({
    "small 128": 75.04, "small 256": 82.42, "small 512": 81.12, "small 1024": 108.34,
    "medium 128": 93.19, "medium 256": 98.42, "medium 512": 117.96,
    "large 128": 113.67, "large 256": 128.50, "xl 128": 141.89, "2.7B 128": 154.74,
})  # fmt: skip
"""The profiler's averages of the same forward, which include the first call."""
PROFILED_OVER_BENCHMARKED = " to ".join(
    f"{pick(ns / FORWARD_NS[model] for model, ns in PROFILED_FORWARD_NS.items()):.1f}" for pick in (min, max)
)
TOP_KERNEL_SHARE = {
    "inference": {
        "small 128": 0.582, "small 256": 0.525, "small 512": 0.721, "small 1024": 0.408,
        "medium 128": 0.486, "medium 256": 0.566, "medium 512": 0.505,
        "large 128": 0.561, "large 256": 0.600, "xl 128": 0.604, "2.7B 128": 0.932,
    },
    "forward": {
        "small 128": 0.583, "small 256": 0.526, "small 512": 0.710, "small 1024": 0.413,
        "medium 128": 0.492, "medium 256": 0.562, "medium 512": 0.488, "large 128": 0.555, "large 256": 0.596,
    },
    "backward": {
        "small 128": 0.170, "small 256": 0.240, "small 512": 0.256, "small 1024": 0.152,
        "medium 128": 0.294, "medium 256": 0.257, "medium 512": 0.269, "large 128": 0.296, "large 256": 0.252,
    },
}  # fmt: skip
"""Share of the longest kernel, always a matrix product."""
TOP_OTHER_SHARE = {
    "small 128": 0.019, "small 256": 0.023, "small 512": 0.040, "small 1024": 0.131,
    "medium 128": 0.021, "medium 256": 0.022, "medium 512": 0.053,
    "large 128": 0.017, "large 256": 0.020, "xl 128": 0.015, "2.7B 128": 0.010,
}  # fmt: skip
"""Share of the longest kernel of a forward that is not a matrix product."""
INFERENCE_GEMM_SHARE = {
    "small 128": 0.880, "small 256": 0.846, "small 512": 0.800, "small 1024": 0.537,
    "medium 128": 0.870, "medium 256": 0.854, "medium 512": 0.771,
    "large 128": 0.896, "large 256": 0.878, "xl 128": 0.912, "2.7B 128": 0.944,
}  # fmt: skip
"""Matrix products among the ten largest kernels, of a forward that kept its graph."""
TRAINING_GEMM_SHARE = {
    "small 128": 0.593, "small 256": 0.611, "small 512": 0.535, "small 1024": 0.310,
    "medium 128": 0.589, "medium 256": 0.635, "medium 512": 0.551, "large 128": 0.594, "large 256": 0.647,
}  # fmt: skip
SOFTMAX_PER_MATMUL = {
    "small 128": 0.459, "small 256": 0.529, "small 512": 0.498, "small 1024": 1.376,
    "medium 128": 0.480, "medium 256": 0.509, "medium 512": 0.739,
    "large 128": 0.620, "large 256": 0.509, "xl 128": 0.533, "2.7B 128": 0.550,
}  # fmt: skip
BF16_SPEEDUP = {
    "forward": {"small": 0.96, "medium": 0.92, "large": 0.94, "xl": 0.98, "2.7B": 0.25},
    "forward+backward": {"small": 0.81, "medium": 0.85, "large": 0.87},
}
"""fp32 ÷ bf16 autocast at 128 tokens: means of host time without synchronization, called medians."""
BF16_ATTENTION_SPEEDUP = {"small 128": 1.35, "medium 128": 1.27, "large 128": 2.02, "xl 128": 3.07, "2.7B 128": 3.34}
"""The same for the scores of attention."""
SQUARE_TENSORS = {"naive": 3, "builtin": 2, "custom": 1, "flash": 0}
"""Tensors of seq_len × seq_len that attention keeps for the backward."""
EINSUM_CAST_BYTES = 50 * 2**20
"""The largest new allocation under autocast, attributed to einsum."""
