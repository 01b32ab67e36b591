"""Checks a variant against the reference in float64 before anything is timed.

Reference and variant are built at the workload's gate sizes with the same weights and batch. The reference runs in
float64 on the CPU. The variant runs as it will be timed (device, dtype, backend, compiler) but without autotuning:
kernels tuned for the gate's sizes are not the ones that will be timed.

A deviation is ‖variant − reference‖ ÷ ‖reference‖ of one tensor, in Frobenius norms. For a gradient the divisor is at
least 1 % of the average gradient norm, so that a gradient of zero tolerates some noise. The limit is TOLERANCE for
the dtype or, if the arithmetic itself is less exact at these sizes (a router that rounds the other way), SLACK times
the deviation of the reference in the same dtype on the same device.

An AdamW that is not torch's default is checked too: two steps with the reference's gradients (one step does not
involve the betas), compared by how far they move each parameter.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.sweep import prepare
from stepscope.sweep.prepare import build, cast, scalar_loss, tensors_of, weights_dtype
from stepscope.sweep.run_knobs import without_autotuning
from stepscope.workloads.workload import Batch, Built, Value, Workload

# dtype → (outputs and loss, gradients). Unit roundoffs: fp32 6e-8, tf32 5e-4, fp16 5e-4, bf16 4e-3. Gradients
# accumulate many roundings, and the widest sums of a gate have thousands of terms.
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

Tensors = dict[str, dict[str, torch.Tensor]]
"""Kind (outputs, loss, gradients, updates) → name → tensor, in float64 on the CPU."""
Deviations = dict[str, dict[str, float]]  # kind → name of a tensor → its deviation


@dataclass(frozen=True, kw_only=True)
class Gate:
    """How far a variant is from the reference; JSON with `dataclasses.asdict`."""

    passed: bool
    deviations: dict[str, float | None]
    """Kind (outputs, loss, gradients, updates) → the worst deviation of one tensor; None if it is not a number."""
    worst: str  # the tensor that exceeds its tolerance most, or comes closest to it, as text
    tolerances: dict[str, float]
    sizes: dict[str, Value]  # the gate's sizes


def check(
    workload: Workload[Any], values: Mapping[str, Value], run: Mapping[str, Value], with_gradients: bool
) -> Gate:
    """Return the verdict on the variant that `values` (preset included) and `run` describe."""
    run = without_autotuning(run)
    sized = {**values, **workload.gate}
    seed, device = int(run["seed"]), str(run["device"])
    reference_config = workload.config(**{**sized, **workload.reference})
    reference = build(workload, reference_config, seed, "cpu")
    batch = prepare.make_batch(reference, seed, "cpu")
    weights = {name: tensor.clone() for name, tensor in reference.module.state_dict().items()}
    reference.module.double()
    plain = {**run, "dtype": "fp32", "compile": "off", "sdpa": "free", "device": "cpu"}
    truth = _results(reference, cast(batch, torch.float64), plain, with_gradients)
    has_optimizer = run["mode"] == "step" and run["optimizer"] in CHECKED_OPTIMIZERS
    # Each parameter and its gradient, rounded to the dtype they will have: the same start for all.
    gradients = truth.get("gradients", {}) if has_optimizer else {}
    moved = {
        name: (parameter.detach().to(weights_dtype(run)), gradients[f"gradient of {name}"].to(weights_dtype(run)))
        for name, parameter in reference.module.named_parameters()
        if f"gradient of {name}" in gradients
    }
    if moved:
        truth["updates"] = _updates("adamw", moved, torch.float64, "cpu")

    def deviation_of(config: Any, run: Mapping[str, Value]) -> Deviations:
        built = build(workload, config, seed, device)
        built.module.load_state_dict(weights)
        built.module.to(weights_dtype(run))
        found = _results(built, cast(batch, weights_dtype(run), device), run, with_gradients)
        if moved:
            found["updates"] = _updates(str(run["optimizer"]), moved, weights_dtype(run), device)
        return deviations(found, truth)

    found = deviation_of(workload.config(**sized), run)
    tolerances = tolerances_of(str(run["dtype"]), found)
    if moved:
        tolerances["updates"] = TOLERANCE[str(run["dtype"]) if weights_dtype(run) is not torch.float32 else "fp32"][0]
    overflowed = []
    if not furthest(found, tolerances)[0] <= 1:  # NaN fails too
        rough = deviation_of(reference_config, {**run, "compile": "off", "sdpa": "free", "optimizer": "adamw"})
        for kind in tolerances:
            reached = SLACK * max(rough.get(kind, {}).values(), key=nan_as_infinity, default=0.0)
            if math.isfinite(reached):
                tolerances[kind] = max(tolerances[kind], reached)
            else:
                overflowed.append(kind)
    share, kind, name, value = furthest(found, tolerances)
    either = f"; the reference's {kind} are not finite in {run['dtype']} either" if kind in overflowed else ""
    return Gate(
        passed=share <= 1,
        deviations=worst_by_kind(found),
        worst=f"{name}: {value:.2g} of its norm, allowed {tolerances[kind]:.2g}{either}",
        tolerances=tolerances,
        sizes=dict(workload.gate),
    )


def _results(built: Built, batch: Batch, run: Mapping[str, Value], with_gradients: bool) -> Tensors:
    contexts = prepare.Contexts(run)
    module = prepare.compiled(built.module, run)
    results: Tensors = {}
    with torch.no_grad(), contexts():
        outputs = tensors_of(module(**prepare.without_targets(batch)))
    results["outputs"] = {f"output {index}": in_float64(tensor) for index, tensor in enumerate(outputs)}
    if "targets" not in batch and not with_gradients:
        return results
    with torch.set_grad_enabled(with_gradients), contexts():
        out = module(**batch)
    if (loss := scalar_loss(out)) is not None:
        results["loss"] = {"loss": in_float64(loss)}
    if with_gradients:
        prepare.backward(out, contexts, int(run["seed"]))
        results["gradients"] = gradients_of(built.module, batch)
    return results


def gradients_of(module: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter and input by name, in float64 on the CPU."""
    # None counts as zero: an expert without tokens gets no gradient in one variant and a zero gradient in another.
    return {
        f"gradient of {name}": in_float64(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        for name, tensor in (*module.named_parameters(), *batch.items())
        if tensor.requires_grad
    }


def _updates(
    optimizer: str, moved: Mapping[str, tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    """Return how far two optimizer steps move each parameter, in float64 on the CPU."""
    parameters = {name: torch.nn.Parameter(start.to(device, dtype, copy=True)) for name, (start, _) in moved.items()}
    stepper = prepare.optimizer_of(optimizer, parameters.values())
    for scale in (1.0, -0.5):
        for name, parameter in parameters.items():
            parameter.grad = scale * moved[name][1].to(device, dtype)
        stepper.step()
    return {
        f"update of {name}": in_float64(parameters[name]) - in_float64(start) for name, (start, _) in moved.items()
    }


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def deviations(found: Tensors, truth: Tensors) -> Deviations:
    """Return how far each tensor is from the reference, relative to the reference's norm."""
    result: Deviations = {}
    for kind, tensors in truth.items():
        if found.get(kind, {}).keys() != tensors.keys():
            missing = sorted(tensors.keys() ^ found.get(kind, {}).keys())
            result[kind] = {f"{missing[0]} exists on one side only": math.inf}
            continue
        norms = {name: float(tensor.norm()) for name, tensor in tensors.items()}
        average = math.sqrt(sum(norm * norm for norm in norms.values()) / max(1, len(norms)))
        floor = average / 100 if kind in ("gradients", "updates") else 0.0
        result[kind] = {}
        for name, tensor in tensors.items():
            is_alike, divisor = found[kind][name].shape == tensor.shape, max(norms[name], floor)
            difference = float((found[kind][name] - tensor).norm()) if is_alike else math.inf
            result[kind][name] = difference / divisor if divisor else math.inf if difference else 0.0
    return result


def tolerances_of(dtype: str, kinds: Iterable[str]) -> dict[str, float]:
    output, gradient = TOLERANCE[dtype]
    return {kind: gradient if kind == "gradients" else output for kind in kinds}


def furthest(found: Deviations, tolerances: Mapping[str, float]) -> tuple[float, str, str, float]:
    """Return deviation ÷ tolerance (at most 1 passes), kind, name and deviation of the worst tensor."""
    entries = [(value / tolerances[kind], kind, name, value) for kind in found for name, value in found[kind].items()]
    return max(entries, key=lambda entry: nan_as_infinity(entry[0]))


def worst_by_kind(found: Deviations) -> dict[str, float | None]:
    """Return the largest deviation of each kind; None if it is not finite."""
    return {kind: finite(max(found[kind].values(), key=nan_as_infinity, default=0.0)) for kind in found}


def nan_as_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
