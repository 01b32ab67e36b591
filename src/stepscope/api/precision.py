"""`stepscope.audit` and `stepscope.configure_precision`: dtypes of a module, and torch's precision switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError, need_torch

if TYPE_CHECKING:
    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.recorder.precision.settings import PrecisionChange


def audit(
    module: Any,
    *inputs: Any,
    named_inputs: Mapping[str, Any] | None = None,
    autocast: Any = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    micro_batches: int = 1,
) -> DtypeAudit:
    """Return the dtype of everything in one step of a module, like `stepscope bench --check dtypes`.

    The module is called with `inputs` and `named_inputs`, under autocast in the dtype `autocast`; `loss` turns its
    output into a scalar. `optimizer` (default: AdamW) gets copies of the parameters, so the module does not change.

    >>> audit(model, tokens, autocast=torch.bfloat16).cast_bytes()  # doctest: +SKIP
    """
    need_torch()
    import torch

    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.recorder.precision.dtype_audit import BadAudit, audit_dtypes

    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"audit needs a torch.nn.Module, not {type(module).__name__}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise UsageError(
            f"autocast={autocast!r} is not supported: use torch.bfloat16, torch.float16, or leave it out"
        )
    if micro_batches < 1:
        raise UsageError(f"micro_batches={micro_batches} must be 1 or more")
    named = dict(named_inputs or {})
    try:
        facts = audit_dtypes(
            module,
            lambda: module(*inputs, **named),
            inputs=(inputs, named),
            loss=loss,
            autocast=autocast,
            optimizer=optimizer or torch.optim.AdamW,
            num_micro_batches=micro_batches,
        )
    except BadAudit as error:
        raise UsageError(str(error)) from None
    return DtypeAudit({**facts, "workload": type(module).__name__})


def configure_precision(
    *,
    allow_tf32: bool | None = None,
    allow_bf16_reduced_precision_reduction: bool | None = None,
    allow_fp16_reduced_precision_reduction: bool | None = None,
    matmul_precision: str | None = None,
) -> PrecisionChange:
    """Return the change that was made to torch's precision switches; arguments left out stay as they are.

    Print it to see old and new values, call `undo()`, or use it as a context manager that undoes it. `allow_tf32`
    covers matrix products and cuDNN's convolutions; `matmul_precision` ("highest", "high", "medium") is
    `torch.set_float32_matmul_precision`.

    >>> with configure_precision(allow_tf32=True):  # doctest: +SKIP
    ...     train()
    """
    need_torch()
    from stepscope.recorder.precision.settings import configure_precision as configure

    reductions = {
        "allow_bf16_reduced_precision_reduction": allow_bf16_reduced_precision_reduction,
        "allow_fp16_reduced_precision_reduction": allow_fp16_reduced_precision_reduction,
    }
    try:
        return configure(allow_tf32, matmul_precision, reductions)
    except ValueError as error:
        raise UsageError(str(error)) from None
