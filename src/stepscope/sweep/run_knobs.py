"""The knobs that the sweep applies to any workload: how it is run, not what it is."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.workloads.workload import Knob, Value

MODES = ("inference", "forward", "forward+backward", "step")
DTYPES = ("fp32", "tf32", "bf16", "fp16", "autocast_bf16", "autocast_fp16")
COMPILES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# max-autotune times a dozen kernels for each product: minutes, for the gate's sizes, which nobody times.
WITHOUT_AUTOTUNING = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": "default"}
SDPA_BACKENDS = ("free", "flash", "efficient", "math", "cudnn")
OPTIMIZERS = ("adamw", "fused", "handwritten", "sgd")

RUN_KNOBS = (
    Knob(
        name="mode",
        kind=str,
        default="step",
        values=MODES,
        about="what one sample is: no graph and no loss; a forward with its graph; with backward; with the optimizer",
    ),
    Knob(
        name="dtype",
        kind=str,
        default="fp32",
        values=DTYPES,
        about="fp32; fp32 with TF32 products; bf16 or fp16 weights and inputs; autocast over fp32 weights",
    ),
    Knob(
        name="bf16_reduction",
        kind=str,
        default="auto",
        values=("auto", "on", "off"),
        about="whether split bf16 products may be summed in bf16 (CUDA): torch's default, allowed, forbidden",
    ),
    Knob(name="compile", kind=str, default="off", values=COMPILES, about="torch.compile of the module, by mode"),
    Knob(
        name="sdpa",
        kind=str,
        default="free",
        values=SDPA_BACKENDS,
        about="back end that scaled_dot_product_attention must take; free: torch chooses",
    ),
    Knob(
        name="optimizer",
        kind=str,
        default="adamw",
        values=OPTIMIZERS,
        about="AdamW as torch chooses it, its fused kernel, one parameter at a time in Python, or plain SGD",
    ),
    Knob(name="warmup", kind=int, default=3, values=None, about="passes before the first sample, the first call one"),
    Knob(name="steps", kind=int, default=10, values=None, about="samples"),
    Knob(name="seed", kind=int, default=0, values=None, about="of weights and data"),
    Knob(name="device", kind=str, default="cpu", values=("cpu", "cuda"), about="where it runs"),
)
RUN_KNOB_NAMES = tuple(knob.name for knob in RUN_KNOBS)

LEAST = {"warmup": 1, "steps": 1, "seed": 0, "batch": 1, "seq_len": 1, "global_tokens": 0, "random_keys": 0}
"""The smallest value of a knob that counts something; of others see `least`."""


def least(knob: Knob, is_ours: bool) -> int | None:
    """The smallest value a knob can have; None where any will do.

    Whole numbers of Stepscope's own workloads count things: 1, or 0 where that is the default and means none.
    """
    if knob.kind is not int:
        return None
    return LEAST.get(knob.name, min(1, int(knob.default)) if is_ours else None)


def without_autotuning(run: Mapping[str, Value]) -> dict[str, Value]:
    """The run knobs as the gate takes them: compiled in the same way, CUDA graphs included, but not tuned.

    >>> without_autotuning({"compile": "max-autotune", "dtype": "fp32"})
    {'compile': 'reduce-overhead', 'dtype': 'fp32'}
    """
    mode = str(run["compile"])
    return {**run, "compile": WITHOUT_AUTOTUNING.get(mode, mode)}
