"""The dtype audit of a workload: built, cast and run once like a point of a sweep."""

from functools import partial
from typing import Any

from stepscope.errors import UsageError
from stepscope.recorder.precision.dtype_audit import BadAudit, audit_dtypes
from stepscope.sweep import memory, prepare
from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import CannotRun
from stepscope.sweep.run_knobs import has_backward
from stepscope.workloads.optimizers import make_optimizer
from stepscope.workloads.workload import Built, Workload


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
