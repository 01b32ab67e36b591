"""Figures of a sweep's rows: distributions, rates, MFU, the best row for each computed result; flat records."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepscope.analysis.comparison.significance import MIN_SAMPLES
from stepscope.analysis.compiler.compile_summary import break_even
from stepscope.analysis.costs.flops import Utilization, utilization
from stepscope.analysis.time.statistics import Distribution, describe
from stepscope.devices import Ceilings, Device, find_device, load_ceilings
from stepscope.display import Shown

Limits = Callable[[str], tuple[Device | None, Ceilings | None]]  # device name → its vendor's and measured limits

OK = "ok"
# p90 − p10 above this share of the median: the machine or the workload was unstable.
NOISY_SHARE = 0.10
# Knobs that change how, not what, is computed, besides the workload's own.
IMPLEMENTATION_KNOBS = ("bf16_reduction", "compile", "sdpa", "optimizer", "checkpoint")
# The plainest value of each.
PLAINEST = {"bf16_reduction": "auto", "compile": "off", "sdpa": "free", "optimizer": "adamw", "checkpoint": 0}
# One update rule, three implementations.
ADAMW = ("adamw", "fused", "handwritten")
# Not determined by a preset, or worth showing beside it.
BESIDE_PRESET = (
    "workload", "batch", "seq_len", "mode", "dtype", "bf16_reduction", "compile", "sdpa", "optimizer", "warmup",
    "steps", "seed", "device",
)  # fmt: skip
# Not applicable to a workload that is a whole step of the user's loop.
NOT_OF_A_WHOLE_STEP = ("mode", "dtype", "compile", "sdpa", "optimizer")


@dataclass(frozen=True, kw_only=True)
class PointSummary:
    """One row: measurements and derived figures."""

    hash: str
    status: str
    reason: str | None
    axes: Mapping[str, Any]  # workload, preset and every applicable knob → value
    device_name: str | None
    time: Distribution | None  # nanoseconds per step: between CUDA events on a GPU, host time on a CPU
    host: Distribution | None  # nanoseconds that the host takes to issue a step; on a CPU, to complete it
    first_call_ns: int | None
    """Time of the first pass. It is not a cold start if the same process ran the gate before (no `run_by`)."""
    compile_ns: int | None  # compile time reported by torch, in the first call and in the warm-up
    tokens_per_s: float | None
    flops_counted: int | None  # model FLOPs per step, counted op by op, without recomputation
    flops_formula: int | None  # model FLOPs per step from the workload's formula
    flops_coverage: float | None
    """Counted ÷ formula. Below 1: kernels that hide their products. Above 1: work that the formula excludes."""
    flops_per_s: float | None  # model FLOPs (by formula if there is one, minus dropped work) ÷ median time
    mfu: Utilization | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_resident_bytes: int | None
    before_backward_bytes: int | None
    loss: float | None  # loss of the first call, before any weight update
    final_loss: float | None
    num_parameters: int | None
    num_active_parameters: int | None
    num_tokens: int | None
    num_kernels: int | None
    num_kernel_launches: int | None
    gpu_busy_share: float | None
    """GPU busy time in a traced pass ÷ the median of clean ones. Well below 1, the host is the bottleneck; up to a
    tenth below can also be a GPU at its power limit, which one pass does not reach."""
    max_batch: int | None
    facts: Mapping[str, float]
    compiler: Mapping[str, float]
    """figures of torch.compile (`compiler.num_graphs`, `compiler.num_recompiles` …); empty without it."""
    notes: tuple[str, ...]  # notes, such as a NaN loss or a failed instrument
    is_noisy: bool
    speedup: float | None = None  # median time per token (or step) of the plainest variant ÷ that of this row
    break_even_steps: float | None = None
    """Steps until compile time is recovered, compared with the row that differs only in `compile=off`: the first call
    minus a warm one (or the compile seconds if larger) ÷ the saving per step. None: never, or no such row."""
    loss_deviation: float | None = None
    """|loss − that of the plainest variant with the same result| ÷ the latter, of the first call."""
    differs: str | None = None  # how its result differs from the plainest variant's; None if it is the same
    is_best: bool = False  # the fastest row with the same result
    is_tied: bool = False
    """Not the best, but its 95 % interval overlaps the best one's; never set with fewer than 6 samples."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepSummary(Shown):
    """A whole sweep."""

    points: tuple[PointSummary, ...]
    varying: tuple[str, ...]  # axes that differ between rows, except those determined by the preset
    constants: Mapping[str, Any]  # axes that are the same in every row
    num_by_status: Mapping[str, int]


def known_limits(name: str) -> tuple[Device | None, Ceilings | None]:
    return find_device(name), load_ceilings(name)


def sweep_of(
    rows: Iterable[Mapping[str, Any]], environments: Mapping[str, Mapping[str, Any]], limits: Limits = known_limits
) -> SweepSummary:
    """Return the figures of a sweep's rows; `environments` by hash, as in sweep.json."""
    rows = list(rows)
    # Only a whole step of the user's own has unknown parts.
    whole = {row["workload"] for row in rows if "num_tokens" in row and "num_parameters" not in row}
    points = [_point(row, row["workload"] in whole, environments, limits) for row in rows]
    varying, constants = varying_axes([point.axes for point in points])
    if any(point.max_batch is not None for point in points):
        varying = tuple(name for name in varying if name != "batch")
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, (row, point) in enumerate(zip(rows, points)):
        groups.setdefault((point.device_name, *_group(row, point.axes)), []).append(index)
    for members in groups.values():
        row = rows[members[0]]
        compared = _compared([points[index] for index in members], row.get("reference") or {}, _alternatives(row))
        for index, point in zip(members, compared):
            points[index] = point
    counts = Counter(point.status for point in points)
    return SweepSummary(points=tuple(points), varying=varying, constants=constants, num_by_status=dict(counts))


_COPIED = (  # fields that a row has under the same name
    "reason", "first_call_ns", "compile_ns", "flops_counted", "flops_formula", "flops_coverage",
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes", "before_backward_bytes", "loss",
    "final_loss", "num_parameters", "num_active_parameters", "num_kernels", "num_kernel_launches", "max_batch",
)  # fmt: skip
_FIGURES = (  # fields that a record has under the same name
    "first_call_ns", "compile_ns", "tokens_per_s", "flops_counted", "flops_formula", "flops_coverage",
    "flops_per_s", "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes",
    "before_backward_bytes", "loss", "final_loss", "num_parameters", "num_active_parameters", "num_tokens",
    "num_kernels", "num_kernel_launches", "gpu_busy_share", "max_batch", "speedup", "break_even_steps",
    "loss_deviation", "differs", "is_best", "is_tied", "is_noisy",
)  # fmt: skip


def _point(
    row: Mapping[str, Any], whole: bool, environments: Mapping[str, Mapping[str, Any]], limits: Limits
) -> PointSummary:
    device_ns, host_ns = row.get("samples_device_ns"), row.get("samples_host_ns")
    time = describe(device_ns) if device_ns else None
    # On a CPU both are the same samples, and an interval takes milliseconds.
    host = time if host_ns == device_ns else describe(host_ns) if host_ns else None
    facts = row.get("facts") or {}
    flops = _model_flops(row, facts)
    tokens = row.get("num_tokens") or None
    name = environments.get(row.get("environment_hash", ""), {}).get("device_name")
    busy_ns = row.get("gpu_busy_ns")
    run = {knob: value for knob, value in row["run"].items() if not (whole and knob in NOT_OF_A_WHOLE_STEP)}
    mfu = None
    if time is not None and flops and name is not None:
        device, ceilings = limits(name)
        what = "model" if row.get("flops_formula") else "counted"
        mfu = utilization(_by_dtype(row, flops), time.median, device, ceilings, what)
    copied: dict[str, Any] = {name: row.get(name) for name in _COPIED}
    return PointSummary(
        **copied,
        hash=row["hash"],
        status=row["status"],
        axes={"workload": row["workload"], "preset": row.get("preset"), **row["config"], **run},
        device_name=name,
        time=time,
        host=host,
        tokens_per_s=tokens / (time.median / 1e9) if tokens and time else None,
        flops_per_s=flops / (time.median / 1e9) if flops and time else None,
        mfu=mfu,
        num_tokens=tokens,
        # At most 1: traced kernels take slightly longer than clean ones.
        gpu_busy_share=min(1.0, busy_ns / time.median) if time and busy_ns is not None else None,
        facts=facts,
        compiler=row.get("compiler") or {},
        notes=tuple(row.get("notes") or ()),
        is_noisy=time is not None and time.p90 - time.p10 > NOISY_SHARE * time.median,
    )


def _model_flops(row: Mapping[str, Any], facts: Mapping[str, float]) -> int | None:
    """Return model FLOPs per step by formula, minus dropped work; else as counted."""
    formula: int | None = row.get("flops_formula")
    if not formula:
        return row.get("flops_counted")
    passes = 3 if row["run"].get("mode") in ("forward+backward", "step") else 1
    return formula - passes * round(facts.get("dropped_flops", 0))


def _by_dtype(row: Mapping[str, Any], flops: int) -> dict[str, int]:
    """Return FLOPs by dtype as counted; all in the row's dtype if nothing was counted."""
    counted = {dtype: value for dtype, value in (row.get("flops_counted_by_dtype") or {}).items() if value}
    total = sum(counted.values())
    if not total:
        return {str(row["run"].get("dtype")).removeprefix("autocast_"): flops}
    return {dtype: round(flops * value / total) for dtype, value in counted.items()}


def varying_axes(axes: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the axes that differ between points (except those determined by the preset), and the constant ones."""
    names = list(dict.fromkeys(name for values in axes for name in values))
    seen = {name: [values.get(name) for values in axes] for name in names}
    constants = {name: values[0] for name, values in seen.items() if len(set(values)) == 1}
    varying = [name for name in names if name not in constants]
    if "preset" in varying:
        presets = seen["preset"]
        own = {name for name in varying if len(set(zip(seen[name], presets))) > len(set(presets))}
        varying = [name for name in varying if name in own or name in ("preset", *BESIDE_PRESET)]
    return tuple(varying), constants


def _alternatives(row: Mapping[str, Any]) -> Mapping[str, Sequence[Sequence[Any]]]:
    """Return each knob's values grouped by equal result, the plainest first."""
    return {"optimizer": (ADAMW,), **(row.get("alternatives") or {})}


def _group(row: Mapping[str, Any], axes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the group of comparable rows: they differ only in how they compute, or in declared alternatives.

    Rows that differ in seed, warm-up or number of samples are repetitions, and not compared.
    """
    left_out = {*IMPLEMENTATION_KNOBS, *(row.get("reference") or {}), *_alternatives(row)}
    if row.get("max_batch") is not None:
        left_out.add("batch")
    return tuple(sorted((name, str(value)) for name, value in axes.items() if name not in left_out))


def _compared(
    group: Sequence[PointSummary],
    reference: Mapping[str, Any],
    alternatives: Mapping[str, Sequence[Sequence[Any]]],
) -> list[PointSummary]:
    """Return the group's ok rows with speed-ups and differences, the best for each result, and ties."""
    times = {index: point.time for index, point in enumerate(group) if point.status == OK and point.time is not None}
    compared = list(group)
    plain = {**PLAINEST, **{name: values[0][0] for name, values in alternatives.items()}, **reference}
    # The plainest row must be plain only in what the group varies.
    varied = {name: value for name, value in plain.items() if len({point.axes.get(name) for point in group}) > 1}
    plainest = next((i for i in times if all(group[i].axes.get(n) == value for n, value in varied.items())), None)
    computed = [_computed(point, alternatives) for point in group]
    rivals_of: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index in times:
        rivals_of.setdefault(tuple(computed[index].items()), []).append(index)
    eager = {frozenset(point.axes.items()): point.time for point in reversed(group) if point.status == OK}

    def cost(index: int) -> float:
        # Per token if there are tokens: rows of a batch search have different batches.
        tokens = group[index].num_tokens
        return times[index].median / tokens if tokens else times[index].median

    def meets(index: int, best: int) -> bool:
        time, other = times[index], times[best]
        if min(time.num_samples, other.num_samples) < MIN_SAMPLES:
            return False
        return cost(index) * time.ci_low / time.median <= cost(best) * other.ci_high / other.median

    def against(index: int, plainest: int) -> dict[str, Any]:
        this, other, loss, plain_loss = computed[index], computed[plainest], group[index].loss, group[plainest].loss
        parts = [f"{this[name]} against {other[name]}" for name in this if this[name] != other.get(name)]
        deviation = None
        if this == other and index != plainest and loss is not None and plain_loss:
            deviation = abs(loss - plain_loss) / abs(plain_loss)
        return {"loss_deviation": deviation, "differs": "; ".join(parts) or None}

    for rivals in rivals_of.values():
        best = min(rivals, key=cost)
        has_ways = len({tuple(group[other].axes.get(name) for name in plain) for other in rivals}) > 1
        for index in rivals:
            compared[index] = replace(
                group[index],
                speedup=cost(plainest) / cost(index) if plainest is not None and varied else None,
                break_even_steps=_break_even_steps(group[index], eager),
                **({} if plainest is None else against(index, plainest)),
                is_best=index == best and has_ways,
                is_tied=index != best and has_ways and meets(index, best),
            )
    return compared


def _break_even_steps(
    point: PointSummary, times: Mapping[frozenset[tuple[str, Any]], Distribution | None]
) -> float | None:
    """Return when a compiled point has made up for compiling; `times` are those of its group, by axes."""
    if point.axes.get("compile") == "off" or point.compile_ns is None or point.time is None:
        return None
    eager = times.get(frozenset({**point.axes, "compile": "off"}.items()))
    if eager is None:
        return None
    spent_ns = max(point.compile_ns, (point.first_call_ns or 0) - point.time.median)
    steps = break_even(spent_ns / 1e9, point.time.median, eager.median)
    return steps if steps is not None and math.isfinite(steps) else None


def _computed(point: PointSummary, alternatives: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, str]:
    """Return the row's result as text, as far as rows of one group can differ in it."""
    found = {}
    for name, sets in alternatives.items():
        value = point.axes.get(name)
        if name == "optimizer" and point.axes.get("mode") != "step":
            continue
        found[name] = f"{name}={' or '.join(map(str, next((same for same in sets if value in same), (value,))))}"
    dropped = point.facts.get("dropped_share", 0) > 0
    return {**found, "dropped": "some dropped" if dropped else "none dropped"}


def record_of(point: PointSummary) -> dict[str, Any]:
    """Return a point as one flat record; times in nanoseconds, sizes in bytes."""
    figures: dict[str, Any] = {"status": point.status, "reason": point.reason}
    for prefix, distribution in (("time", point.time), ("host", point.host)):
        for name in ("median", "p10", "p90", "mean", "std", "ci_low", "ci_high"):
            figures[f"{prefix}_{name}_ns"] = None if distribution is None else round(getattr(distribution, name))
    figures["num_samples"] = None if point.time is None else point.time.num_samples
    figures |= {name: getattr(point, name) for name in _FIGURES}
    figures["notes"] = "; ".join(point.notes) or None
    figures["mfu_share"] = None if point.mfu is None else point.mfu.share
    figures["mfu_limit"] = None if point.mfu is None else point.mfu.limit
    figures["device_name"] = point.device_name
    figures.update({f"fact_{name}": value for name, value in point.facts.items()})
    figures.update({name.replace(".", "_"): value for name, value in point.compiler.items()})
    # A knob may have the name of a figure, such as hydra's `loss`.
    axes = {f"knob_{name}" if name in figures else name: value for name, value in point.axes.items()}
    return {"hash": point.hash, **axes, **figures}


def sweep_json(sweep: SweepSummary) -> dict[str, Any]:
    """Return the sweep as plain values (docs/bench.md)."""
    return {
        "num_by_status": dict(sweep.num_by_status),
        "varying": list(sweep.varying),
        "constants": dict(sweep.constants),
        "points": [record_of(point) for point in sweep.points],
    }


def hash_of(sweep: SweepSummary) -> str:
    return hashlib.sha256("".join(point.hash for point in sweep.points).encode("utf-8", "replace")).hexdigest()[:12]
