"""Figures that the note "CS336 Assignment 2: Systems" published, by model and length.

Its models are those of the workload `cs336`: batch 4, a vocabulary of 10,000, float32 without TF32.
"""

_COLUMNS = (
    "forward_ms", "forward_backward_ms",  # means after five warm-up passes, with the graph kept
    "cold_forward_ms", "cold_forward_backward_ms",  # without warm-up, means over 15 passes
    "profiled_forward_ms",  # the profiler's averages, which include the first call
    "inference_top_share", "forward_top_share", "backward_top_share",  # of the longest kernel, always a product
    "other_top_share",  # of the longest kernel of a forward that is not a matrix product
    "inference_gemm_share", "training_gemm_share",  # products among the ten largest kernels; inference with a graph
    "softmax_per_matmul",
    # fp32 ÷ bf16 autocast: means of host time without synchronization, called medians; attention: its scores.
    "bf16_forward", "bf16_forward_backward", "bf16_attention",
)  # fmt: skip
_FIGURES = """
small    128  10.9   55.8   66.8   83.0   75.04  0.582  0.583  0.170  0.019  0.880  0.593  0.459  0.96  0.81  1.35
small    256  11.9   60.7   69.4   84.5   82.42  0.525  0.526  0.240  0.023  0.846  0.611  0.529     -     -     -
small    512  18.1   61.3   75.8   92.8   81.12  0.721  0.710  0.256  0.040  0.800  0.535  0.498     -     -     -
small   1024  47.4  158.3  100.6  189.3  108.34  0.408  0.413  0.152  0.131  0.537  0.310  1.376     -     -     -
medium   128  21.8  101.2   79.6  130.5   93.19  0.486  0.492  0.294  0.021  0.870  0.589  0.480  0.92  0.85  1.27
medium   256  28.0  106.9   89.5  137.8   98.42  0.566  0.562  0.257  0.022  0.854  0.635  0.509     -     -     -
medium   512  49.7  178.1  108.6  212.4  117.96  0.505  0.488  0.269  0.053  0.771  0.551  0.739     -     -     -
large    128  39.2  164.7  100.8  199.5  113.67  0.561  0.555  0.296  0.017  0.896  0.594  0.620  0.94  0.87  2.02
large    256  56.2  207.6  117.9  241.2  128.50  0.600  0.596  0.252  0.020  0.878  0.647  0.509     -     -     -
xl       128  65.4      -  127.9      -  141.89  0.604      -      -  0.015  0.912      -  0.533  0.98     -  3.07
2.7B     128  83.8      -  143.2      -  154.74  0.932      -      -  0.010  0.944      -  0.550  0.25     -  3.34
"""


def note(column: str) -> dict[str, float]:
    """Return a column's figures by model and length; times, which end in `_ns`, in nanoseconds."""
    rows = [line.split() for line in _FIGURES.strip().splitlines()]
    at, scale = _COLUMNS.index(column.replace("_ns", "_ms")), 1e6 if column.endswith("_ns") else 1.0
    return {f"{model} {length}": float(row[at]) * scale for model, length, *row in rows if row[at] != "-"}


OUT_OF_MEMORY = (
    "medium 1024", "large 512", "large 1024", "xl 128", "xl 256", "xl 512", "xl 1024",
    "2.7B 128", "2.7B 256", "2.7B 512", "2.7B 1024",
)  # fmt: skip
"""Forward and backward did not fit its 32 GB."""
PROFILED_OVER_BENCHMARKED = " to ".join(
    f"{pick(ns / note('forward_ns')[model] for model, ns in note('profiled_forward_ns').items()):.1f}"
    for pick in (min, max)
)
SQUARE_TENSORS = {"naive": 3, "builtin": 2, "custom": 1, "flash": 0}
"""Tensors of seq_len × seq_len that attention keeps for the backward."""
