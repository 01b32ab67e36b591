"""The knobs that apply to any workload: how it is run, not what it computes."""

from __future__ import annotations

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


def _choice(name: str, default: str, values: tuple[str, ...], about: str) -> Knob:
    return Knob(name=name, kind=str, default=default, values=values, about=about)


def _integer(name: str, default: int, about: str) -> Knob:
    return Knob(name=name, kind=int, default=default, values=None, about=about)


RUN_KNOBS = (
    _choice(
        "mode",
        "step",
        MODES,
        "what one sample runs: forward without autograd; forward; forward and backward; a full training step",
    ),
    _choice(
        "dtype",
        "fp32",
        DTYPES,
        "fp32; fp32 with TF32 matmuls; bf16 or fp16 weights and inputs; autocast over fp32 weights",
    ),
    _choice(
        "bf16_reduction",
        "auto",
        ("auto", "on", "off"),
        "whether split bf16 matmuls may accumulate in bf16 (CUDA): torch's default, allowed, forbidden",
    ),
    _choice("compile", "off", COMPILES, "torch.compile mode of the module"),
    _choice("sdpa", "free", SDPA_BACKENDS, "backend that scaled_dot_product_attention must use; free: torch chooses"),
    _choice(
        "optimizer", "adamw", OPTIMIZERS, "torch's default AdamW, fused AdamW, AdamW in plain Python, or plain SGD"
    ),
    _integer("warmup", 3, "warm-up passes, the first call included"),
    _integer("steps", 10, "measured passes"),
    _integer("seed", 0, "random seed of weights and data"),
    _choice("device", "cpu", ("cpu", "cuda"), "where it runs"),
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
    """Return whether a pass in this mode runs a backward pass."""
    return run["mode"] in ("forward+backward", "step")


def has_cuda_graphs(run: Mapping[str, Value]) -> bool:
    """Return whether a pass with these knobs replays CUDA graphs."""
    return run["compile"] in CUDA_GRAPH_MODES and run["device"] == "cuda"
