"""Dtypes of a point: an audit of one step, and what a comparison measures besides time, each in its own pass."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from stepscope.errors import UsageError
from stepscope.recorder.precision.dtype_audit import BadAudit, audit_dtypes
from stepscope.sweep import measure, memory, prepare
from stepscope.sweep.checks.gate import finite, nan_as_infinity
from stepscope.sweep.grid import Point
from stepscope.sweep.prepare import Pass
from stepscope.sweep.protocol import CannotRun
from stepscope.sweep.run_knobs import has_backward
from stepscope.workloads.optimizers import make_optimizer
from stepscope.workloads.workload import Built, Value, Workload

NAME = "precision"
CAST = "aten::_to_copy"
FLOATING = ("float", "double", "c10::Half", "c10::BFloat16")  # dtypes as the profiler names them
NUM_PROFILED = 3
FIRST_SCALE = 2.0**16  # the initial scale of a GradScaler, halved whenever a gradient overflows


def questions(
    workload: Workload[Any], config: Mapping[str, Value], run: Mapping[str, Value], run_once: Pass
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the measurements, each under the note for the row if it fails; each returns fields of the row."""
    device = str(run["device"])
    return {
        "phases could not be timed": lambda: {
            "phase_ms": measure.Phases(device).medians_ms(run_once, int(run["steps"]))
        },
        "memory by owner could not be tracked": lambda: {"memory_by_owner": memory_by_owner(run_once, device)},
        "work by op could not be traced": lambda: work_by_op(run_once, device),
        "the deviation from fp32 could not be measured": lambda: {"deviation": deviation(workload, config, run)},
    }


def memory_by_owner(run_once: Pass, device: str) -> dict[str, int]:
    """Return the bytes of tensors at the peak of one pass of the uncompiled module, by owner."""
    allocations = measure.ledger_of(run_once).memory()["allocations"]
    return at_peak([one for one in allocations if one["device"].startswith(device)])


def at_peak(allocations: list[dict[str, Any]]) -> dict[str, int]:
    """Return bytes by owner when the total is largest; `born` is None for tensors that existed before.

    >>> small = {"bytes": 4, "owner": "parameter", "born": None, "died": None}
    >>> at_peak([small, {"bytes": 2, "owner": "temporary", "born": 0, "died": 1}])
    {'parameter': 4, 'temporary': 2}
    """
    changes = [(one["born"] if one["born"] is not None else -1, one["bytes"]) for one in allocations]
    changes += [(one["died"], -one["bytes"]) for one in allocations if one["died"] is not None]
    total = most = 0
    peak = -1
    for event, num_bytes in sorted(changes, key=lambda change: change[0]):
        total += num_bytes
        if total > most:
            most, peak = total, event
    by_owner: Counter[str] = Counter()
    for one in allocations:
        if (one["born"] is None or one["born"] <= peak) and (one["died"] is None or one["died"] > peak):
            by_owner[one["owner"]] += one["bytes"]
    return dict(by_owner.most_common())


def work_by_op(run_once: Pass, device: str) -> dict[str, Any]:
    """Return `work` by op, kernel and whether it is a cast, and `num_casts`.

    Times are medians of NUM_PROFILED profiled passes: GPU time, or the host's self time on a CPU.
    """
    passes = [_profiled(run_once, device) for _ in range(NUM_PROFILED)]
    keys = dict.fromkeys(key for totals, _ in passes for key in totals)
    work = []
    for op, kernel, is_cast in keys:
        found = [totals.get((op, kernel, is_cast), (0, 0.0)) for totals, _ in passes]
        calls, microseconds = (statistics.median(values) for values in zip(*found))
        figures = {"num_calls": round(calls), "duration_ns": round(microseconds * 1000)}
        work.append({"op": op, "kernel": kernel, "is_cast": is_cast, **figures})
    work.sort(key=lambda one: -one["duration_ns"])
    return {"work": work, "num_casts": passes[-1][1]}


def _profiled(run_once: Pass, device: str) -> tuple[dict[tuple[str, str, bool], tuple[int, float]], int]:
    """Return (op, kernel, is a cast) → (calls, microseconds), and the number of casts."""
    measure.synchronize(device)
    with measure.profiler(device, record_shapes=True) as profiler:
        run_once()
        measure.synchronize(device)
    # Floating-point tensors, not masks or an optimizer's scalars.
    casts = {
        event.correlation_id()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == CAST and event.dtypes()[:1] and event.dtypes()[0] in FLOATING and any(event.shapes()[:1])
    }
    totals: dict[tuple[str, str, bool], tuple[int, float]] = {}
    for event in profiler.events():
        if device == "cuda":
            pieces = [(kernel.name, kernel.duration) for kernel in event.kernels]
        else:
            pieces = [("", event.self_cpu_time_total)] if event.name.startswith("aten::") else []
        for kernel, microseconds in pieces:
            key = (event.name, kernel, _is_cast(event, casts))
            calls, total = totals.get(key, (0, 0.0))
            totals[key] = (calls + 1, total + microseconds)
    return totals, len(casts)


def _is_cast(event: Any, casts: set[int]) -> bool:
    while event is not None:
        if event.id in casts and event.name == CAST:
            return True
        event = event.cpu_parent
    return False


def deviation(workload: Workload[Any], config: Mapping[str, Value], run: Mapping[str, Value]) -> dict[str, Any]:
    """Return how far loss, outputs and gradients are from fp32 with the same weights, batch and device.

    A deviation is ‖found − fp32‖ ÷ ‖fp32‖ over all parameters; `largest` is the same for the largest element.
    """
    plain = {**run, "dtype": "fp32", "compile": "off", "sdpa": "free"}
    prepare.apply_settings(plain)
    try:
        truth = _results(workload, config, plain)
    finally:
        prepare.apply_settings(run)
    found = _results(workload, config, run) if run["dtype"] != "fp32" else truth
    facts: dict[str, Any] = {"loss_fp32": truth["loss"], "loss": found["loss"], "loss_scale": found["scale"]}
    for kind in ("outputs", "gradients"):
        if truth[kind]:
            facts[kind] = _compared(found[kind], truth[kind])
    return facts


def _compared(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    squares = of_truth = largest = highest = 0.0
    worst: tuple[float, str] = (0.0, "")
    for name, exact in truth.items():
        exact = exact.double()
        difference = found[name].double() - exact
        square, norm = float(difference.square().sum()), float(exact.square().sum())
        squares, of_truth = squares + square, of_truth + norm
        largest = max(largest, float(difference.abs().max()), key=nan_as_infinity)
        highest = max(highest, float(exact.abs().max()))
        share = math.sqrt(square / norm) if norm else (math.inf if square else 0.0)
        worst = max(worst, (share, name), key=lambda entry: nan_as_infinity(entry[0]))
    return {
        "relative": finite(math.sqrt(squares / of_truth)) if of_truth else None,
        "largest": finite(largest / highest) if highest else None,
        "worst": worst[1],
        "worst_relative": finite(worst[0]),
        "num_not_finite": sum(int((~tensor.isfinite()).sum()) for tensor in found.values()),
    }


def _results(workload: Workload[Any], config: Mapping[str, Value], run: Mapping[str, Value]) -> dict[str, Any]:
    """Return loss, outputs and gradients of one pass from the seed, in float32 on the CPU."""
    seed, device = int(run["seed"]), str(run["device"])
    built = prepare.build(workload, workload.config(**config), seed, device)
    batch, module = prepare.cast_to_point(built, run), built.module.train(run["mode"] != "inference")
    contexts, with_backward = prepare.Contexts(run), has_backward(run)
    scale = FIRST_SCALE if run["dtype"] == "autocast_fp16" and with_backward else 1.0
    while True:
        torch.manual_seed(seed + 3)
        for parameter in module.parameters():
            parameter.grad = None
        with torch.set_grad_enabled(with_backward), contexts():
            out = module(**batch)
        if with_backward:
            prepare.backward(out, contexts, seed, scale)
        found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        if scale == 1.0 or all(bool(gradient.isfinite().all()) for gradient in found.values()):
            break
        scale /= 2
    loss = prepare.scalar_loss(out)
    outputs = prepare.tensors_of(out) if loss is None else []
    return {
        "loss": None if loss is None else finite(float(loss.detach())),
        "scale": scale,
        "outputs": {f"output {i}": tensor.detach().to("cpu", torch.float32) for i, tensor in enumerate(outputs)},
        "gradients": {name: gradient.to("cpu", torch.float32) / scale for name, gradient in found.items()},
    }


def audit_point(workload: Workload[Any], point: Point, num_micro_batches: int) -> dict[str, Any]:
    """Return the audit facts of a point (`dtype_audit.py`); UsageError if it cannot run here."""
    run = dict(point.run)
    device, seed, mode = str(run["device"]), int(run["seed"]), str(run["mode"])
    try:
        prepare.check_machine(run)
        prepare.apply_settings(run)
        built = prepare.build(workload, workload.config(**point.config), seed, device)
        if not isinstance(built, Built):
            raise UsageError(
                f"{workload.name} is a complete training step. For an audit, return (module, batch function)."
            )
        batch, contexts = dict(prepare.cast_to_point(built, run)), prepare.Contexts(run)
        built.module.train(mode != "inference")

        def logits() -> Any:
            try:
                return built.module(**prepare.without_targets(batch))
            except TypeError:  # a user's own module may require its targets
                return ()

        facts = audit_dtypes(
            prepare.users_own(built.module),
            lambda: built.module(**batch),
            inputs=batch,
            autocast=prepare.AUTOCAST.get(str(run["dtype"])),
            contexts=contexts,
            backward=lambda out: prepare.backward(out, contexts, seed),
            optimizer=partial(make_optimizer, str(run["optimizer"])) if mode == "step" else None,
            logits=logits if "targets" in batch else None,
            num_micro_batches=num_micro_batches,
            has_backward=has_backward(run),
        )
    except (CannotRun, BadAudit) as error:
        raise UsageError(str(error)) from None
    except Exception as error:
        if memory.read_error(error) is None:
            raise
        raise UsageError(
            f"Out of memory: {str(error).splitlines()[0]}. An audit does not need a large batch: --set batch=1"
        ) from None
    return {
        **facts,
        "workload": point.workload,
        "preset": point.preset,
        "dtype": run["dtype"],
        "mode": mode,
        "config": dict(point.config),
    }
