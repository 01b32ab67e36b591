"""A workload in several dtypes: time, memory, deviation from fp32, and which kernel class causes the difference."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stepscope.analysis.kernels.kernel_classes import classify
from stepscope.analysis.kernels.kernel_name_tables import VIEWS
from stepscope.analysis.time.statistics import Distribution, describe

REFERENCE = "fp32"
CAST = "cast"
# Smaller changes, as a share of the reference's work, are ignored.
LEAST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class DtypeRow:
    """One dtype; unmeasured values are empty or None."""

    dtype: str
    status: str
    reason: str | None
    time: Distribution | None  # nanoseconds per step: device time on a GPU, host time on a CPU
    phase_ns: Mapping[str, int] = field(default_factory=dict)  # medians, measured in separate passes
    peak_bytes: int | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # tensors alive at the peak, by owner
    class_ns: Mapping[str, int] = field(default_factory=dict)
    """Work of one profiled step by kernel class, casts separate from copies."""
    num_casts: int | None = None
    loss: float | None = None
    loss_difference: float | None = None  # loss − fp32 loss in the first step
    gradient_deviation: float | None = None  # ‖gradient − gradient in fp32‖ ÷ ‖gradient in fp32‖, over all parameters
    gradient_largest: float | None = None  # largest element difference ÷ largest element in fp32
    output_deviation: float | None = None  # the same for outputs, if the workload returns no loss
    num_not_finite: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DtypeComparison:
    """The dtypes of one configuration, fp32 first."""

    workload: str
    preset: str | None
    mode: str
    device: str
    device_name: str | None
    config: Mapping[str, Any]
    rows: tuple[DtypeRow, ...]

    @property
    def reference(self) -> DtypeRow | None:
        """fp32, if it was measured."""
        return next((row for row in self.rows if row.dtype == REFERENCE and row.time is not None), None)

    def slowdown(self, row: DtypeRow) -> float | None:
        """Return median time ÷ fp32 median time; None if either is unknown."""
        times = self._times(row)
        return times[0].median / times[1].median if times else None

    def is_different(self, row: DtypeRow) -> bool:
        """Return whether the 95 % intervals of both medians are disjoint."""
        times = self._times(row)
        return times is not None and (times[0].ci_low > times[1].ci_high or times[0].ci_high < times[1].ci_low)

    def _times(self, row: DtypeRow) -> tuple[Distribution, Distribution] | None:
        reference = self.reference
        return (row.time, reference.time) if reference and reference.time and row.time else None

    def changes(self, row: DtypeRow) -> list[tuple[str, int]]:
        """Return by how many ns kernel classes take longer than in fp32 (or less), the largest change first."""
        reference = self.reference
        if reference is None or not row.class_ns or not reference.class_ns:
            return []
        total = sum(reference.class_ns.values())
        names = {*row.class_ns, *reference.class_ns}
        found = [(name, row.class_ns.get(name, 0) - reference.class_ns.get(name, 0)) for name in names]
        kept = [(name, ns) for name, ns in found if abs(ns) >= LEAST_SHARE * total]
        return sorted(kept, key=lambda one: (-abs(one[1]), one[0]))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values (docs/precision.md)."""
        rows = [{**asdict(row), "slowdown": self.slowdown(row)} for row in self.rows]
        names = ("workload", "preset", "mode", "device", "device_name")
        return {**{name: getattr(self, name) for name in names}, "config": dict(self.config), "rows": rows}


def compare_dtypes(
    rows: Iterable[Mapping[str, Any]], environments: Mapping[str, Mapping[str, Any]]
) -> list[DtypeComparison]:
    """Return the rows of a sweep grouped so that each group differs only in dtype, fp32 first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        others = {name: value for name, value in row["run"].items() if name != "dtype"}
        key = repr((row["workload"], sorted(row["config"].items()), sorted(others.items())))
        groups.setdefault(key, []).append(row)
    return [_comparison(group, environments) for group in groups.values()]


def _comparison(rows: Sequence[Mapping[str, Any]], environments: Mapping[str, Mapping[str, Any]]) -> DtypeComparison:
    first = rows[0]
    made = sorted(map(_row, rows), key=lambda row: row.dtype != REFERENCE)
    hashes = [row["environment_hash"] for row in rows if row.get("environment_hash") in environments]
    return DtypeComparison(
        workload=first["workload"],
        preset=first["preset"],
        mode=first["run"]["mode"],
        device=first["run"]["device"],
        device_name=environments[hashes[0]].get("device_name") if hashes else None,
        config=first["config"],
        rows=tuple(made),
    )


def _row(row: Mapping[str, Any]) -> DtypeRow:
    measured = row.get("precision") or {}
    samples = row.get("samples_device_ns")
    deviation = measured.get("deviation") or {}
    loss, loss_fp32 = deviation.get("loss"), deviation.get("loss_fp32")
    gradients, outputs = deviation.get("gradients") or {}, deviation.get("outputs") or {}
    return DtypeRow(
        dtype=row["run"]["dtype"],
        status=row["status"],
        reason=row.get("reason"),
        time=describe(samples) if samples else None,
        phase_ns={name.removesuffix("_ms"): round(ms * 1e6) for name, ms in (measured.get("phase_ms") or {}).items()},
        peak_bytes=row.get("peak_allocated_bytes"),
        memory_bytes=measured.get("memory_by_owner") or {},
        class_ns=class_ns(measured.get("work") or []),
        num_casts=measured.get("num_casts"),
        loss=loss if deviation else row.get("loss"),
        loss_difference=None if loss is None or loss_fp32 is None else loss - loss_fp32,
        gradient_deviation=gradients.get("relative"),
        gradient_largest=gradients.get("largest"),
        output_deviation=outputs.get("relative"),
        num_not_finite=gradients.get("num_not_finite", 0) + outputs.get("num_not_finite", 0),
        notes=tuple(row.get("notes") or ()),
    )


def class_ns(work: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return ns by class of kernels (of ops if there are none); casts and, on a host, views are separate classes.

    >>> class_ns([{"op": "aten::mm", "kernel": "", "is_cast": False, "duration_ns": 7},
    ...           {"op": "aten::copy_", "kernel": "", "is_cast": True, "duration_ns": 2}])
    {'gemm': 7, 'cast': 2}
    """
    found: dict[str, int] = {}
    for one in work:
        is_view = not one["kernel"] and one["op"].removeprefix("aten::") in VIEWS
        name = CAST if one["is_cast"] else "views" if is_view else classify(one["kernel"], one["op"])
        found[name] = found.get(name, 0) + one["duration_ns"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))
