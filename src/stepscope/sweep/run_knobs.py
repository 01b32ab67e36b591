"""The knobs that apply to any workload: how it is run, not what it computes."""

from collections.abc import Mapping

from stepscope.workloads.workload import Knob, Value

MODES = ("inference", "forward", "forward+backward", "step")
DTYPES = ("fp32", "tf32", "bf16", "fp16", "autocast_bf16", "autocast_fp16")
COMPILES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# max-autotune times a dozen kernels per matmul. That takes minutes, wasted on the gate's sizes.
WITHOUT_AUTOTUNING = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": "default"}
SDPA_BACKENDS = ("free", "flash", "efficient", "math", "cudnn")
OPTIMIZERS = ("adamw", "fused", "handwritten", "sgd")
# Modes that record CUDA graphs, on a GPU.
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")

RUN_KNOBS = tuple(
    Knob(name=name, kind=type(default), default=default, values=values, about=about)
    for name, default, values, about in (
        ("mode", "step", MODES, "what one sample runs: forward without autograd, forward, + backward, a full step"),
        ("dtype", "fp32", DTYPES, "fp32; TF32 matmuls; bf16 or fp16 weights and inputs; autocast over fp32 weights"),
        ("bf16_reduction", "auto", ("auto", "on", "off"), "may split bf16 matmuls (CUDA) accumulate in bf16"),
        ("compile", "off", COMPILES, "torch.compile mode of the module"),
        ("sdpa", "free", SDPA_BACKENDS, "backend that scaled_dot_product_attention must use; free: torch chooses"),
        ("optimizer", "adamw", OPTIMIZERS, "torch's default AdamW, fused AdamW, AdamW in plain Python, plain SGD"),
        ("warmup", 3, None, "warm-up passes, including the first call"),
        ("steps", 10, None, "measured passes"),
        ("seed", 0, None, "random seed of weights and data"),
        ("device", "cpu", ("cpu", "cuda"), "where it runs"),
    )
)
RUN_KNOB_NAMES = tuple(knob.name for knob in RUN_KNOBS)

LEAST = {"warmup": 1, "steps": 1, "seed": 0, "batch": 1, "seq_len": 1, "global_tokens": 0, "random_keys": 0}
"""The smallest value of knobs that count something; for other knobs see `least`."""


def least(knob: Knob, is_ours: bool) -> int | None:
    """Return the smallest allowed value of a knob; None if there is none.

    Integers of Stepscope's own workloads are counts: at least 1, or 0 where 0 is the default and means "none".
    """
    if knob.kind is not int:
        return None
    return LEAST.get(knob.name, min(1, int(knob.default)) if is_ours else None)


def without_autotuning(run: Mapping[str, Value]) -> dict[str, Value]:
    """Return the run knobs for the gate: compiled the same way, CUDA graphs included, but not autotuned.

    >>> without_autotuning({"compile": "max-autotune", "dtype": "fp32"})
    {'compile': 'reduce-overhead', 'dtype': 'fp32'}
    """
    mode = str(run["compile"])
    return {**run, "compile": WITHOUT_AUTOTUNING.get(mode, mode)}


def has_backward(run: Mapping[str, Value]) -> bool:
    return run["mode"] in ("forward+backward", "step")


def has_cuda_graphs(run: Mapping[str, Value]) -> bool:
    return run["compile"] in CUDA_GRAPH_MODES and run["device"] == "cuda"
