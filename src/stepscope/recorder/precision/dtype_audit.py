"""Records every dtype in one forward, backward and optimizer step of any model.

The model stays unchanged: gradients, buffers and the random state are restored, and the optimizer works on copies of
the parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from stepscope.recorder.clock import BACKWARD, FORWARD, OPTIMIZER, OTHER
from stepscope.recorder.model import parameter_facts
from stepscope.recorder.precision import autocast_policy
from stepscope.recorder.precision.dtype_ledger import (
    DtypeLedger,
    Functions,
    ModuleDtypes,
    NormCall,
    logits_in,
    short,
    tensors_of,
)
from stepscope.recorder.precision.settings import precision_settings
from stepscope.recorder.values import tensors_in

SCHEMA_VERSION = 1

# Why an op of a forward computed in float32.
FP32_LIST, PROMOTE_LIST, PROMOTION = "autocast_fp32_list", "autocast_promote_list", "type_promotion"
AUTOCAST_OFF, INPUTS, NORM_MISMATCH = "autocast_off", "inputs", "norm_mismatch"


class BadAudit(ValueError):
    """The request cannot be audited."""


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
    functions, modules = Functions(device_type), ModuleDtypes(module)
    ledger = DtypeLedger(module, [], lambda: phase[-1], functions, device_type, autocast, num_micro_batches)
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
            for micro_batch in range(num_micro_batches):
                ledger.micro_batch = micro_batch
                phase.append(FORWARD)
                with functions, contexts():
                    out = forward()
                    out = out if loss is None else loss(out)
                scalars = (each for each in tensors_of(out) if each.is_floating_point() and not each.dim())
                number = next(scalars, None)
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
    for row in ledger.ops.values():
        row["reason"], row["detail"] = _why_float32(row, device_type, autocast)
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
        "ops": list(ledger.ops.values()),
        "casts": list(ledger.casts.values()),
        "weight_casts": {
            "num_parameters": len(ledger.weights_cast),
            "parameter_bytes": sum(ledger.weights_cast.values()),
            "num_uses": ledger.num_weight_uses,
        },
        "norms": _norm_rows(functions.norms, device_type, autocast),
        "flops_by_dtype": ledger.flops(compiled=False)["model_flops_by_dtype"],
        "error": ledger.error,
    }


def _why_float32(
    row: dict[str, Any], device_type: str, autocast: torch.dtype | None
) -> tuple[str | None, str | None]:
    """Return why an op of the forward computed in float32, and a related name; (None, None) if it did not."""
    if row["phase"] != FORWARD or (row["output"] != "float32" and row["inputs"] != ["float32"]):
        return None, None
    if autocast is not None:
        if not row["autocast"]:
            return AUTOCAST_OFF, None
        names = [row["op"].removeprefix("aten."), *([row["function"]] if row["function"] else [])]
        name = autocast_policy.listed_name(device_type, names)
        policy = None if name is None else autocast_policy.policy(device_type, name, autocast)
        if policy == autocast_policy.FLOAT32:
            return FP32_LIST, name
        if policy == autocast_policy.WIDEST:
            return PROMOTE_LIST, name
    if row["is_mixed_norm"]:
        return NORM_MISMATCH, row["function"]
    return (PROMOTION if len(row["inputs"]) > 1 else INPUTS), row["origin"]


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
    ledger = DtypeLedger(nn.Module(), [], lambda: FORWARD, functions, device_type, None)
    x, weight = (torch.ones(*s, 8, dtype=dtype, device=device_type, requires_grad=True) for s in ((2,), ()))
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
    given = [parameter for parameter in module.parameters() if parameter.grad is not None]
    copies: list[torch.Tensor] = [nn.Parameter(parameter.detach().clone()) for parameter in given]
    for copy, parameter in zip(copies, given):
        copy.grad = parameter.grad
    return copies


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
