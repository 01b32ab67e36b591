"""Correct before fast: a variant against the reference in float64, before anything is timed.

Reference and variant are built at the workload's gate sizes with the same weights and the same batch. The reference
runs in float64 on the CPU: the truth. The variant runs as it will be timed: its device, dtype, back end, compiler;
but nothing is autotuned, since kernels tuned for the gate's sizes are not those that will be timed.

A deviation is ‖variant − truth‖ ÷ ‖truth‖ of one tensor (Frobenius norms; for a gradient the divisor is at least a
hundredth of an average gradient's norm, so that one that is zero in truth may be a little noise). It may be as large
as TOLERANCE says for the dtype or, where the arithmetic itself is rougher than that at these sizes (a router that
rounds the other way), SLACK times what the reference reaches in the same dtype on the same device.

An implementation of AdamW that is not torch's default is held against that in float64 too: two steps with the truth's
gradients (after one, neither beta has left a trace), and what they moved each parameter by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.sweep.prepare import (
    CannotRun,
    Contexts,
    build,
    cast,
    compiled,
    differentiable,
    make_batch,
    random_gradients,
    tensors_of,
    weights_dtype,
)
from stepscope.sweep.run_knobs import without_autotuning
from stepscope.workloads.optimizers import make_optimizer
from stepscope.workloads.workload import Batch, Built, Value, Workload

# dtype → (outputs and loss, gradients). Unit roundoffs: fp32 6e-8, tf32 5e-4, fp16 5e-4, bf16 4e-3; a gradient is a
# product of many roundings, and the widest sums of a gate are some thousands of terms.
TOLERANCE = {
    "fp32": (1e-4, 1e-3),
    "tf32": (1e-2, 3e-2),
    "fp16": (1e-2, 3e-2),
    "autocast_fp16": (1e-2, 3e-2),
    "autocast_bf16": (4e-2, 1e-1),
    "bf16": (4e-2, 1e-1),
}
SLACK = 3.0
CHECKED_OPTIMIZERS = ("fused", "handwritten")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """How far a variant is from the truth; JSON with `dataclasses.asdict`."""

    passed: bool
    deviations: dict[str, float | None]
    """outputs, loss, gradients, the optimizer's updates → the worst deviation of one tensor; None: not a number."""
    worst: str
    """The tensor furthest beyond its tolerance, or nearest to it, in words."""
    tolerances: dict[str, float]
    sizes: dict[str, Value]
    """The gate's sizes."""


def check(
    workload: Workload[Any], values: Mapping[str, Value], run: Mapping[str, Value], with_gradients: bool
) -> Gate:
    """The gate's verdict on the variant that `values` (preset included) and `run` describe."""
    run = without_autotuning(run)
    sized = {**values, **workload.gate}
    seed, device = int(run["seed"]), str(run["device"])
    reference_config = workload.config(**{**sized, **workload.reference})
    reference = build(workload, reference_config, seed, "cpu")
    batch = make_batch(reference, seed, "cpu")
    weights = {name: tensor.clone() for name, tensor in reference.module.state_dict().items()}
    reference.module.double()
    plain = {**run, "dtype": "fp32", "compile": "off", "sdpa": "free", "device": "cpu"}
    truth = _results(reference, cast(batch, torch.float64), plain, with_gradients)
    has_optimizer = run["mode"] == "step" and run["optimizer"] in CHECKED_OPTIMIZERS
    moved = _movable(reference, truth, weights_dtype(run)) if has_optimizer else {}
    if moved:
        truth["updates"] = _updates("adamw", moved, torch.float64, "cpu")

    def deviation_of(config: Any, run: Mapping[str, Value]) -> dict[str, dict[str, float]]:
        built = build(workload, config, seed, device)
        built.module.load_state_dict(weights)
        built.module.to(weights_dtype(run))
        found = _results(built, cast(batch, weights_dtype(run), device), run, with_gradients)
        if moved:
            found["updates"] = _updates(str(run["optimizer"]), moved, weights_dtype(run), device)
        return deviations(found, truth)

    found = deviation_of(workload.config(**sized), run)
    loose, looser = TOLERANCE[str(run["dtype"])]
    tolerances = {kind: looser if kind == "gradients" else loose for kind in found}
    if moved:
        tolerances["updates"] = TOLERANCE[str(run["dtype"]) if weights_dtype(run) is not torch.float32 else "fp32"][0]
    overflowed = []
    if _over(found, tolerances):
        rough = deviation_of(reference_config, {**run, "compile": "off", "sdpa": "free", "optimizer": "adamw"})
        for kind in tolerances:
            reached = SLACK * _worst(rough.get(kind, {}))
            if math.isfinite(reached):
                tolerances[kind] = max(tolerances[kind], reached)
            else:
                overflowed.append(kind)
    over = _over(found, tolerances)
    named = [(value / tolerances[kind], kind, name, value) for kind in found for name, value in found[kind].items()]
    _, kind, name, value = max(named, key=lambda entry: math.inf if math.isnan(entry[0]) else entry[0])
    return Gate(
        passed=not over,
        deviations={kind: _finite(_worst(found[kind])) for kind in found},
        worst=f"{name}: {value:.2g} of its norm, allowed is {tolerances[kind]:.2g}"
        + (f"; the reference's {kind} are no numbers in {run['dtype']} either" if kind in overflowed else ""),
        tolerances=tolerances,
        sizes=dict(workload.gate),
    )


def _results(
    built: Built, batch: Batch, run: Mapping[str, Value], with_gradients: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """outputs, loss, gradients → name → tensor in float64 on the CPU."""
    contexts = Contexts(run)
    module = compiled(built.module, run)
    results: dict[str, dict[str, torch.Tensor]] = {}
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    with torch.no_grad(), contexts():
        outputs = tensors_of(module(**inputs))
    results["outputs"] = {f"output {index}": truthful(tensor) for index, tensor in enumerate(outputs)}
    if "targets" not in batch and not with_gradients:
        return results
    with torch.set_grad_enabled(with_gradients), contexts():
        out = module(**batch)
    is_loss = isinstance(out, torch.Tensor) and out.dim() == 0
    if is_loss:
        results["loss"] = {"loss": truthful(out)}
    if with_gradients:
        starts = [out] if is_loss else differentiable(out)
        gradients = None if is_loss else random_gradients(starts, int(run["seed"]))
        with contexts.attention():
            torch.autograd.backward(starts, gradients)
        results["gradients"] = gradients_of(built.module, batch)
    return results


def gradients_of(module: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Name → gradient of each parameter and input, in float64 on the CPU."""
    # None is zero: an expert that got no token, in one variant; multiplied by nothing, in another.
    return {
        f"gradient of {name}": truthful(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        for name, tensor in (*module.named_parameters(), *batch.items())
        if tensor.requires_grad
    }


def _movable(
    reference: Built, truth: Mapping[str, Mapping[str, torch.Tensor]], dtype: torch.dtype
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name → a parameter and its gradient, rounded to the dtype they will have: every optimizer's same start."""
    gradients = truth.get("gradients", {})
    return {
        name: (parameter.detach().to(dtype), gradients[f"gradient of {name}"].to(dtype))
        for name, parameter in reference.module.named_parameters()
        if f"gradient of {name}" in gradients
    }


def _updates(
    optimizer: str, moved: Mapping[str, tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    """By how much two steps of the optimizer move each parameter, in float64 on the CPU."""
    parameters = {name: torch.nn.Parameter(start.to(device, dtype, copy=True)) for name, (start, _) in moved.items()}
    try:
        stepper = make_optimizer(optimizer, parameters.values())
    except RuntimeError as error:
        raise CannotRun(f"optimizer={optimizer}: {str(error).splitlines()[0]}") from None
    for scale in (1.0, -0.5):
        for name, parameter in parameters.items():
            parameter.grad = scale * moved[name][1].to(device, dtype)
        stepper.step()
    return {f"update of {name}": truthful(parameters[name]) - truthful(start) for name, (start, _) in moved.items()}


def truthful(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64 on the CPU."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", wide)


def deviations(found: Any, truth: Any) -> dict[str, dict[str, float]]:
    """Kind → name of a tensor → how far it is from the truth, by the truth's norm."""
    result: dict[str, dict[str, float]] = {}
    for kind, tensors in truth.items():
        if found.get(kind, {}).keys() != tensors.keys():
            missing = sorted(tensors.keys() ^ found.get(kind, {}).keys())
            result[kind] = {f"{missing[0]} is on one side only": math.inf}
            continue
        norms = {name: float(tensor.norm()) for name, tensor in tensors.items()}
        average = math.sqrt(sum(norm * norm for norm in norms.values()) / max(1, len(norms)))
        floor = average / 100 if kind in ("gradients", "updates") else 0.0
        result[kind] = {
            name: _deviation(found[kind][name], tensor, max(norms[name], floor)) for name, tensor in tensors.items()
        }
    return result


def _deviation(found: torch.Tensor, truth: torch.Tensor, divisor: float) -> float:
    if found.shape != truth.shape:
        return math.inf
    difference = float((found - truth).norm())
    return 0.0 if difference == 0 else difference / divisor if divisor else math.inf


def _worst(deviations: Mapping[str, float]) -> float:
    return max(deviations.values(), key=lambda value: math.inf if math.isnan(value) else value, default=0.0)


def _over(found: Mapping[str, Mapping[str, float]], tolerances: Mapping[str, float]) -> bool:
    return any(not value <= tolerances[kind] for kind in found for value in found[kind].values())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
