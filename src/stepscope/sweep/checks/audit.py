"""The dtype audit of a workload: built, cast and run as a point of a sweep would be, once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from stepscope.errors import UsageError
from stepscope.recorder.precision.dtype_audit import BadAudit, audit_dtypes
from stepscope.sweep import memory, prepare
from stepscope.sweep.grid import Point
from stepscope.workloads.optimizers import make_optimizer
from stepscope.workloads.workload import Built, Workload


def audit_point(workload: Workload[Any], point: Point, num_micro_batches: int) -> dict[str, Any]:
    """The facts of the audit of a point (`dtype_audit.py`); UsageError where it cannot run here."""
    run = dict(point.run)
    device, seed, mode = str(run["device"]), int(run["seed"]), str(run["mode"])
    try:
        prepare.check_machine(run)
        prepare.apply_settings(run)
        built = prepare.build(workload, workload.config(**point.config), seed, device)
        if not isinstance(built, Built):
            raise UsageError(
                f"{workload.name} is a whole step of your own: for an audit, return (module, batch function)"
            )
        built.module.to(prepare.weights_dtype(run)).train(mode != "inference")
        batch = dict(prepare.cast(prepare.make_batch(built, seed, device), prepare.weights_dtype(run)))
        contexts = prepare.Contexts(run)

        def backward(out: Any) -> None:
            if isinstance(out, torch.Tensor) and out.dim() == 0:
                out.backward()
                return
            outputs = prepare.differentiable(out)
            with contexts.attention():
                torch.autograd.backward(outputs, prepare.random_gradients(outputs, seed))

        def optimizer(parameters: Iterable[torch.Tensor]) -> Any:
            return make_optimizer(str(run["optimizer"]), list(parameters))

        def logits() -> Any:
            try:
                return built.module(**{name: tensor for name, tensor in batch.items() if name != "targets"})
            except TypeError:  # a module of the user's own may want its targets
                return ()

        facts = audit_dtypes(
            prepare.users_own(built.module),
            lambda: built.module(**batch),
            inputs=batch,
            autocast=prepare.AUTOCAST.get(str(run["dtype"])),
            contexts=contexts,
            backward=backward,
            optimizer=optimizer if mode == "step" else None,
            logits=logits if "targets" in batch else None,
            num_micro_batches=num_micro_batches,
            has_backward=mode in ("forward+backward", "step"),
        )
    except (prepare.CannotRun, BadAudit) as error:
        raise UsageError(str(error)) from None
    except Exception as error:
        shortage = memory.read_error(error)
        if shortage is None:
            raise
        raise UsageError(
            f"out of memory: {str(error).splitlines()[0]}; an audit needs no large batch: --set batch=1"
        ) from None
    return {
        **facts,
        "workload": point.workload,
        "preset": point.preset,
        "dtype": run["dtype"],
        "mode": mode,
        "config": dict(point.config),
    }
