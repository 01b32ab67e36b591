"""FLOPs of a step, active parameters, and the share of the device's limit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.devices import Ceilings, Device

# Ops that move or fill data. The recorder leaves them out; recordings of earlier versions have them.
_MOVES = (
    "aten.copy_", "aten._to_copy", "aten.clone", "aten.empty", "aten.empty_like", "aten.new_empty",
    "aten.empty_strided", "aten.new_empty_strided", "aten.zeros", "aten.zero_", "aten.zeros_like", "aten.new_zeros",
    "aten.ones", "aten.ones_like", "aten.fill_", "aten.full", "aten.full_like", "aten.arange", "aten.cat",
    "aten.stack", "aten.index", "aten.index_select", "aten.gather", "aten.embedding", "aten.detach",
    "aten.lift_fresh", "aten._foreach_copy_", "aten.randint", "aten.randperm", "aten._local_scalar_dense",
    "aten._unsafe_view",
)  # fmt: skip
_LIBRARIES_THAT_MOVE = ("profiler.", "prim.")


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step, counted op by op in the memory window."""

    model_flops: int  # required by the model: no recomputation, causal attention counted as half
    hardware_flops: int  # executed, including recomputation
    recomputed_flops: int
    model_flops_by_dtype: Mapping[str, int]
    hardware_flops_by_dtype: Mapping[str, int]
    has_backward: bool
    formula_flops: int | None  # 6·N·tokens (2·N·tokens without a backward) plus attention, as a cross-check
    num_active_parameters: int | None
    """Parameters per token on average; a routed expert counts in proportion to its tokens."""
    uncounted_ops: tuple[str, ...]  # ops that compute but have no formula, the most elements first
    num_uncounted_calls: int
    hidden: str | None  # why the count is a lower bound, or None


@dataclass(frozen=True)
class Utilization:
    """FLOPs ÷ time ÷ limit."""

    share: float
    flops_per_s: float
    is_measured: bool  # whether the limit was measured, instead of the vendor's dense peak
    limit: str  # the limit as text
    source: str  # source of the limit
    formula: str


def step_flops(facts: Mapping[str, Any], trace: Mapping[str, Any] | None, num_tokens: int | None) -> StepFlops:
    """Return one step's FLOPs from the ledger's facts; `num_tokens` of the step they were counted in."""
    by_op = facts["by_op"]
    hardware_by_dtype: dict[str, int] = {}
    for entry in by_op:
        hardware_by_dtype[entry["dtype"]] = hardware_by_dtype.get(entry["dtype"], 0) + entry["flops"]
    model_by_dtype = {dtype: int(flops) for dtype, flops in facts["model_flops_by_dtype"].items()}
    has_backward = any(entry["phase"] == "backward" and not entry["recomputed"] for entry in by_op)
    active = matmul_active = None
    if num_tokens:
        shares = [(w, _active_share(w, num_tokens)) for w in facts["weights"]]
        active = round(sum(w["num_elements"] * share for w, share in shares))
        only_looked_up = [w["looked_up"] and not w["forward_flops"] for w, _ in shares]
        matmul_active = sum(w["num_elements"] * s for (w, s), skip in zip(shares, only_looked_up) if not skip)
    passes = 3 if has_backward else 1
    ops = [entry for entry in facts["uncounted"] if entry["op"] not in _MOVES]
    uncounted = [entry for entry in ops if not entry["op"].startswith(_LIBRARIES_THAT_MOVE)]
    return StepFlops(
        model_flops=sum(model_by_dtype.values()),
        hardware_flops=sum(hardware_by_dtype.values()),
        recomputed_flops=sum(entry["flops"] for entry in by_op if entry["recomputed"]),
        model_flops_by_dtype=model_by_dtype,
        hardware_flops_by_dtype=hardware_by_dtype,
        has_backward=has_backward,
        formula_flops=(
            round(passes * (2 * matmul_active * num_tokens + facts["forward_activation_flops"]))
            if num_tokens and matmul_active is not None and not facts["compiled"]  # there, weights are read unseen
            else None
        ),
        num_active_parameters=active,
        uncounted_ops=tuple(entry["op"] for entry in uncounted),
        num_uncounted_calls=sum(entry["num_calls"] for entry in uncounted),
        hidden=_hidden(facts, trace),
    )


def _active_share(weight: Mapping[str, Any], num_tokens: int) -> float:
    if not weight["forward_flops"] or not weight["num_elements"]:
        return 1.0 if weight.get("used", True) else 0.0  # an expert without tokens
    share: float = weight["forward_flops"] / (2 * weight["num_elements"] * num_tokens)
    return min(1.0, share)


def _hidden(facts: Mapping[str, Any], trace: Mapping[str, Any] | None) -> str | None:
    if facts.get("error"):
        return f"an op could not be counted ({facts['error']})"
    if facts.get("hidden_products"):
        return f"{', '.join(map(str, facts['hidden_products'][:3]))} multiplies weights but has no formula"
    if facts["compiled"] and trace and trace.get("num_graph_launches"):
        return "CUDA graphs replay kernels without their ops"
    if facts["compiled"] and trace and trace.get("num_template_kernels"):
        return "matrix products inside Triton templates are not visible as ops"
    return None


def utilization(
    flops_by_dtype: Mapping[str, int],
    step_ns: float,
    device: Device | None,
    ceilings: Ceilings | None,
    what: str,
) -> Utilization | None:
    """Return the share of the limit that a step reaches; None if the limit for one of its dtypes is unknown.

    With several dtypes, the limit is the sum of the times each would need at its own peak.
    """
    limits: Mapping[str, int]
    if device is not None:
        limits, kind, source = device.peak_flops, f"dense peak of {device.name}", device.source
    elif ceilings is not None:
        limits, kind = ceilings.matmul_flops, f"matmul rate measured on {ceilings.name}"
        source = f"stepscope doctor --measure, {ceilings.measured_at}, torch {ceilings.torch_version}"
    else:
        return None
    total = sum(flops_by_dtype.values())
    if not total or any(dtype not in limits for dtype in flops_by_dtype) or step_ns <= 0:
        return None
    seconds_at_limit = sum(flops / limits[dtype] for dtype, flops in flops_by_dtype.items())
    largest_first = sorted(flops_by_dtype, key=lambda dtype: -flops_by_dtype[dtype])
    rates = ", ".join(f"{dtype} {limits[dtype] / 1e12:.4g} TFLOP/s" for dtype in largest_first)
    return Utilization(
        share=seconds_at_limit / (step_ns / 1e9),
        flops_per_s=total / (step_ns / 1e9),
        is_measured=device is None,
        limit=f"{rates}, {kind}",
        source=source,
        formula=f"{what} FLOPs ÷ step time ÷ limit",
    )
