"""The precision settings of torch during the timed steps, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MATMUL = {"highest": "float32 matrix products run in float32", "high": "float32 matrix products may use TF32",
           "medium": "float32 matrix products may use TF32 or bf16"}  # fmt: skip


def precision_words(settings: Mapping[str, Any], on_gpu: bool) -> tuple[str, str]:
    """Return what applies to float32 products, and the other settings.

    >>> precision_words({"float32_matmul_precision": "high", "cuda.matmul.allow_tf32": True}, on_gpu=True)
    ('float32 matrix products may use TF32', 'float32_matmul_precision high')
    """
    said = str(settings.get("float32_matmul_precision"))
    value = _MATMUL.get(said, f"float32_matmul_precision {said}")
    if not on_gpu:
        return value, f"float32_matmul_precision {said}"
    if (is_tf32 := settings.get("cuda.matmul.allow_tf32")) is not None and is_tf32 != (said != "highest"):
        value = _MATMUL["high" if is_tf32 else "highest"]  # torch.backends.cuda.matmul.fp32_precision has its own say
    rest = [f"float32_matmul_precision {said}"]
    if (cudnn := settings.get("cudnn.allow_tf32")) is not None:
        rest.append(f"cuDNN {'with' if cudnn else 'without'} TF32")
    for low in ("bf16", "fp16"):
        allowed = settings.get(f"cuda.matmul.allow_{low}_reduced_precision_reduction")
        if allowed is not None:
            rest.append(f"split {low} products summed in {low if allowed else 'fp32'}")
    return value, ", ".join(rest)
