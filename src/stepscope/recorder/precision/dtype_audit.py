"""Records every dtype in one forward, backward and optimizer step of any model.

The model stays unchanged: gradients, buffers and the random state are restored, and the optimizer works on copies of
the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from stepscope.recorder.clock import BACKWARD, FORWARD, OPTIMIZER, OTHER
from stepscope.recorder.ledger.storages import tensors_in
from stepscope.recorder.model import parameter_facts
from stepscope.recorder.precision import autocast_policy
from stepscope.recorder.precision.dtype_calls import Functions, ModuleDtypes, NormCall, logits_in, short, tensors_of
from stepscope.recorder.precision.dtype_ledger import DtypeLedger, OpKey
from stepscope.recorder.precision.settings import precision_settings

SCHEMA_VERSION = 1

# Why an op of a forward computed in float32.
FP32_LIST, PROMOTE_LIST, PROMOTION = "autocast_fp32_list", "autocast_promote_list", "type_promotion"
AUTOCAST_OFF, INPUTS, NORM_MISMATCH = "autocast_off", "inputs", "norm_mismatch"


class BadAudit(ValueError):
    """The request cannot be audited."""


def audit_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: torch.dtype | None,
    loss: Callable[[Any], torch.Tensor] | None,
    optimizer: Callable[[Iterable[torch.Tensor]], Any] | None,
    num_micro_batches: int,
) -> dict[str, Any]:
    """Return the audit of a module that is called with these arguments."""
    if not isinstance(module, nn.Module):
        raise BadAudit(f"audit needs a torch.nn.Module, not {type(module).__name__}")
    if autocast is not None and autocast not in (torch.bfloat16, torch.float16):
        raise BadAudit(f"autocast={autocast!r} is not supported: use torch.bfloat16, torch.float16, or leave it out")
    if num_micro_batches < 1:
        raise BadAudit(f"micro_batches={num_micro_batches} must be 1 or more")
    facts = audit_dtypes(
        module,
        lambda: module(*args, **kwargs),
        inputs=(args, kwargs),
        loss=loss,
        autocast=autocast,
        optimizer=optimizer or torch.optim.AdamW,
        num_micro_batches=num_micro_batches,
    )
    return {**facts, "workload": type(module).__name__}


def audit_dtypes(
    module: nn.Module,
    forward: Callable[[], Any],
    *,
    inputs: Any = (),
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    contexts: Callable[[], AbstractContextManager[Any]] | None = None,
    backward: Callable[[Any], None] | None = None,
    optimizer: Callable[[Iterable[torch.Tensor]], Any] | None = None,
    logits: Callable[[], Any] | None = None,
    num_micro_batches: int = 1,
    has_backward: bool = True,
) -> dict[str, Any]:
    """Return the audit as JSON values (docs/precision.md). `forward()` calls the module.

    `contexts` replaces the autocast context around each forward. `loss` turns the forward's result into a scalar;
    without it, backward starts from ones. `logits` is an additional forward that returns the logits.
    """
    parameters = [*module.parameters(), *module.buffers(), *tensors_in(inputs)]
    device_type = parameters[0].device.type if parameters else "cpu"
    if contexts is None:
        contexts = (lambda: torch.autocast(device_type, dtype=autocast)) if autocast is not None else nullcontext
    phase: list[str] = [FORWARD]
    micro_batches = range(num_micro_batches)
    functions, modules = Functions(device_type), ModuleDtypes(module)
    ledger = DtypeLedger(module, [], lambda: phase[-1], functions, device_type, autocast)
    found: dict[str, Any] = {"logits": None, "loss": None, "gradients": [], "optimizer_state": []}
    found_logits = None
    with _as_it_was(module, inputs):
        if logits is not None:
            with torch.no_grad(), contexts():
                found_logits = logits_in(logits())
        modules.start()
        ledger.start()
        ledger.note_batch(tensors_in(inputs))
        try:
            for micro_batch in micro_batches:
                ledger.micro_batch = micro_batch
                phase.append(FORWARD)
                with functions, contexts():
                    out = forward()
                    out = out if loss is None else loss(out)
                number = _loss_in(out)
                found["loss"] = None if number is None else short(number.dtype)
                if has_backward:
                    phase.append(BACKWARD)
                    start = out if number is None else number
                    if not any(tensor.requires_grad for tensor in tensors_of(start)):
                        raise BadAudit("the module's output needs no gradient, so there is no backward to audit")
                    ledger.backward_begins(tensors=start)
                    with functions:
                        (backward or _backward)(start)
                phase.append(OTHER)
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            found["gradients"] = _by_dtype(gradients)
            if optimizer is not None and gradients:
                stepper = optimizer(_copies(module))
                phase.append(OPTIMIZER)
                with functions:
                    stepper.step()
                phase.append(OTHER)
                state = [tensor for state in stepper.state.values() for tensor in tensors_in(dict(state))]
                found["optimizer_state"] = _by_dtype(state)
        finally:
            ledger.stop()
            modules.stop()
    made = modules.logits if found_logits is None else found_logits.dtype
    found["logits"] = None if made is None else short(made)
    weights = {parameter.dtype for parameter in module.parameters()}
    low = autocast or next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in weights), None)
    return {
        "schema_version": SCHEMA_VERSION,
        "torch": str(torch.__version__),
        "device": device_type,
        "autocast": None if autocast is None else short(autocast),
        "low_dtype": None if low is None else short(low),
        "num_micro_batches": num_micro_batches,
        "settings": precision_settings(),
        "parameters": parameter_facts(module.parameters())["bytes_by_dtype"],
        **found,
        "modules": [row for row in modules.rows.values() if row["num_calls"]],
        "ops": [_op_row(key, count, device_type, autocast) for key, count in ledger.ops.items()],
        "casts": [
            {**vars(key), "num_by_micro_batch": [count.num_by_micro_batch.get(n, 0) for n in micro_batches],
             "read_bytes": count.read_bytes, "written_bytes": count.written_bytes, "num_again": count.num_again,
             "again_bytes": count.again_bytes}
            for key, count in ledger.casts.items()
        ],
        "weight_casts": {
            "num_parameters": len(ledger.weights_cast),
            "parameter_bytes": sum(ledger.weights_cast.values()),
            "num_uses": ledger.num_weight_uses,
        },
        "norms": _norm_rows(functions.norms, device_type, autocast),
        "flops_by_dtype": ledger.flops(compiled=False)["model_flops_by_dtype"],
        "error": ledger.error,
    }  # fmt: skip


def _op_row(key: OpKey, count: Any, device_type: str, autocast: torch.dtype | None) -> dict[str, Any]:
    reason, detail = _why_float32(key, device_type, autocast)
    return {**vars(key), "inputs": list(key.inputs), **vars(count), "reason": reason, "detail": detail}


def _why_float32(key: OpKey, device_type: str, autocast: torch.dtype | None) -> tuple[str | None, str | None]:
    """Return why an op of the forward computed in float32, and a related name; (None, None) if it did not."""
    if key.phase != FORWARD or (key.output != "float32" and key.inputs != ("float32",)):
        return None, None
    if autocast is not None:
        names = [key.op.removeprefix("aten."), *([key.function] if key.function else [])]
        name = autocast_policy.listed_name(device_type, names)
        policy = None if name is None else autocast_policy.policy(device_type, name, autocast)
        if not key.autocast:
            return AUTOCAST_OFF, None
        if policy == autocast_policy.FLOAT32:
            return FP32_LIST, name
        if policy == autocast_policy.WIDEST:
            return PROMOTE_LIST, name
    if key.is_mixed_norm:
        return NORM_MISMATCH, key.function
    return (PROMOTION if len(key.inputs) > 1 else INPUTS), key.origin


def _norm_rows(calls: list[NormCall], device_type: str, autocast: torch.dtype | None) -> list[dict[str, Any]]:
    """Return the norms whose weight and input differ in dtype, and whether that prevents a fused kernel."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for call in calls:
        is_listed = call.autocast and autocast is not None
        if not call.is_mixed or (
            is_listed and autocast_policy.policy(device_type, call.function, autocast) == autocast_policy.FLOAT32
        ):
            continue  # or autocast gives both the same dtype
        key = (call.function, call.input, call.weight, call.is_fused)
        row = rows.get(key)
        if row is None:
            has_fused = _has_fused(call.function, call.input, device_type)
            row = rows[key] = {
                "function": call.function, "input": short(call.input), "weight": short(call.weight or call.input),
                "is_fused": call.is_fused, "loses_fused": has_fused and not call.is_fused, "num_calls": 0,
                "ops": call.ops, "module": call.module, "caller": call.caller,
            }  # fmt: skip
        row["num_calls"] += 1
    return list(rows.values())


def _has_fused(function: str, dtype: torch.dtype, device_type: str) -> bool:
    """Return whether a small norm of one dtype runs as a fused op on this device, by running one."""
    functions = Functions(device_type)
    norm = nn.Module()
    ledger = DtypeLedger(norm, [], lambda: FORWARD, functions, device_type, None)
    x = torch.ones(2, 8, dtype=dtype, device=device_type, requires_grad=True)
    weight = torch.ones(8, dtype=dtype, device=device_type, requires_grad=True)
    ledger.start()
    try:
        with functions:
            getattr(nn.functional, function)(x, (8,), weight)
    finally:
        ledger.stop()
    return any(call.is_fused for call in functions.norms)


def _backward(out: Any) -> None:
    outputs = [tensor for tensor in tensors_of(out) if tensor.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])


def _copies(module: nn.Module) -> list[torch.Tensor]:
    """Return copies of the parameters that have a gradient, with the gradient."""
    copies: list[torch.Tensor] = []
    for parameter in module.parameters():
        if parameter.grad is not None:
            copy = nn.Parameter(parameter.detach().clone())
            copy.grad = parameter.grad
            copies.append(copy)
    return copies


def _loss_in(out: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor without dimensions."""
    return next((tensor for tensor in tensors_of(out) if tensor.is_floating_point() and not tensor.dim()), None)


@contextmanager
def _as_it_was(module: nn.Module, inputs: Any) -> Iterator[None]:
    """Restore gradients, buffers and the random state afterward."""
    tensors = [*module.parameters(), *(t for t in tensors_in(inputs) if t.is_leaf)]
    gradients = [(tensor, tensor.grad) for tensor in tensors]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})
    for tensor in tensors:
        tensor.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.shape == value.shape:
                    buffer.copy_(value)


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        row = rows.setdefault(short(tensor.dtype), {"dtype": short(tensor.dtype), "num_tensors": 0, "bytes": 0})
        row["num_tensors"] += 1
        row["bytes"] += tensor.numel() * tensor.element_size()
    return sorted(rows.values(), key=lambda row: -row["bytes"])
