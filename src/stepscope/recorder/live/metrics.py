"""The figures of a running recording, by the names that trackers show. docs/trackers.md defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stepscope.recorder import current
from stepscope.recorder.machine.environment import device_name, memory_facts

if TYPE_CHECKING:
    from stepscope.recorder.session import Session

PREFIX = "stepscope/"


def live_metrics(session: Session, is_exact: bool = True) -> dict[str, float]:
    """Return what is known so far about a recording that runs in this process, by name; empty before the first step.

    Reads what was noted when steps ended: it does not wait for the GPU. If `is_exact`, these are the figures of a run
    that ends here, with the evaluation after its last step. Else this leaves it to the writer's thread to add up the
    steps of free running, and lags behind it by up to half a second.
    """
    if is_exact or not session._samples.waits:
        session._samples.digest(waits=True)
    tally, probes = session._samples.tally, session._probes
    if not (recent := tally.recent()):
        return {}
    own_ns = fmean([step[0] for step in recent])
    tail = session._clock.since_last_step() if is_exact else None
    seconds = (own_ns + tally.between_ns(tail)) / 1e9
    found: dict[str, float | None] = {"steps": tally.num_steps, "step_time_ms": seconds * 1e3}
    for position, unit in ((1, "tokens"), (2, "samples")):
        counts = [step[position] for step in recent]
        found[f"{unit}_per_second"] = fmean(counts) / seconds if all(counts) and seconds else None
    found["mfu"] = _mfu(probes.facts.get("flops"), probes.device, own_ns)
    found["goodput"] = tally.goodput(tail)
    # After the clean window, the probes add to what the allocator has seen.
    memory = probes.facts.get("memory") or memory_facts(probes.device)
    found["timed_peak_memory_gib"] = memory.get("peak_allocated_bytes", memory["peak_resident_bytes"]) / 2**30
    return {PREFIX + name: value for name, value in found.items() if value is not None}


def _mfu(flops: dict[str, Any] | None, device: int | None, step_ns: float) -> float | None:
    """Return model FLOPs ÷ step time ÷ limit; None if the FLOPs are not counted yet, or the limit is unknown."""
    by_dtype: dict[str, int] | None = (flops or {}).get("model_flops_by_dtype")
    limits = _limits(current.peak_flops, device) if by_dtype and current.peak_flops is not None else None
    if not by_dtype or not limits or any(dtype not in limits for dtype in by_dtype) or not step_ns:
        return None
    return sum(num / limits[dtype] for dtype, num in by_dtype.items()) / (step_ns / 1e9)


@cache
def _limits(peak_flops: Callable[[str], Mapping[str, int] | None], device: int | None) -> Mapping[str, int] | None:
    return peak_flops(device_name(device))
