"""Which knobs a tuning turns, to which values: only such as leave what is computed as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.errors import UsageError
from stepscope.sweep.grid import PRESET, Grid, Point, changed
from stepscope.sweep.run_knobs import RUN_KNOB_NAMES, RUN_KNOBS
from stepscope.workloads.knobs import nearest
from stepscope.workloads.registry import is_ours
from stepscope.workloads.workload import Value, Workload

BATCH, CHECKPOINT, COMPILE, SDPA = "batch", "checkpoint", "compile", "sdpa"
ADAMW = ("adamw", "fused", "handwritten")
PLAINEST: Mapping[str, Value] = {
    "dtype": "fp32",
    "compile": "off",
    "sdpa": "free",
    "optimizer": "adamw",
    "bf16_reduction": "auto",
    CHECKPOINT: 0,
}
"""The plainest value of each knob of any workload that chooses how the same thing is computed."""
# What is searched without being asked for: values that can win on the device, those that take longest to try last.
RUN_VALUES: Mapping[str, Mapping[str, tuple[Value, ...]]] = {
    "cpu": {
        "optimizer": ("adamw", "fused"),
        "sdpa": ("free", "flash", "math"),
        "dtype": ("fp32", "bf16", "autocast_bf16"),
        "compile": ("off", "default"),
    },
    "cuda": {
        "optimizer": ("adamw", "fused"),
        "sdpa": ("free", "flash", "efficient", "cudnn", "math"),
        "dtype": ("fp32", "tf32", "bf16", "autocast_bf16", "autocast_fp16"),
        "compile": ("off", "default", "reduce-overhead", "max-autotune"),
    },
}
CHECKPOINTS = (0, 1, 2)
# Between the workload's own knobs, which come first, and the compiler, which takes longest.
ORDER = ("optimizer", SDPA, BATCH, "dtype", "bf16_reduction", CHECKPOINT, COMPILE)
NOT_OF_A_WHOLE_STEP = ("dtype", "compile", "sdpa", "optimizer", "bf16_reduction")
ONE_VALUE = ("mode", "warmup", "steps", "seed", "device")


@dataclass(frozen=True)
class Axis:
    """A knob that is searched."""

    name: str
    values: tuple[Value, ...] | None
    """All of its values, in the order in which they are tried; None: powers of two, as far as they gain and fit."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Where a tuning begins and what it may change."""

    workload: Workload[Any]
    base: Point
    """The defaults: presets, and what the user set."""
    axes: tuple[Axis, ...]
    plain: Mapping[str, Value]
    """Knobs of the plainest way to compute the same thing."""

    def changed(self, point: Point, **values: Value) -> Point:
        """The point with some knobs set otherwise."""
        return changed(self.workload, point, **values)

    def plainest(self, point: Point) -> Point:
        """The plainest variant of the same configuration: sizes, batch, seed and mode stay."""
        names = {*point.config, *point.run}
        plain = {name: value for name, value in self.plain.items() if name in names}
        if value_of(point, "optimizer") not in ADAMW:
            plain.pop("optimizer", None)
        return self.changed(point, **plain)

    def turned(self, point: Point) -> dict[str, Value]:
        """The knobs in which a point differs from the base."""
        values = {**point.config, **point.run}
        return {name: value for name, value in values.items() if value != value_of(self.base, name)}


def value_of(point: Point, name: str) -> Value:
    """The value of any knob of a point."""
    return point.config[name] if name in point.config else point.run[name]


def next_power(value: int) -> int:
    """The power of two above a number.

    >>> next_power(4), next_power(6)
    (8, 8)
    """
    return 1 << value.bit_length()


def power_below(value: int) -> int:
    """The power of two below a number; 0 below 1.

    >>> power_below(8), power_below(6), power_below(1)
    (4, 4, 0)
    """
    return 1 << (value - 1).bit_length() - 1 if value > 1 else 0


def search_space(
    workload: Workload[Any], grid: Grid, typed: Mapping[str, Sequence[str]], over: Sequence[str]
) -> Space:
    """The space of what was typed: one value of a knob holds it, several search it, `over` leaves out all others."""
    if len(typed.get(PRESET, ())) > 1:
        raise UsageError("one preset at a time: another size computes something else")
    (base,) = grid.points([{name: values[:1] for name, values in typed.items()}])
    names = (*base.config, *base.run)
    asked = {name: _values(grid, typed, name) for name in typed if len(typed[name]) > 1}
    for name in over:
        if name not in names:
            raise UsageError(f"--over {name}: there is no such knob: {nearest(name, names)}")
        if name in typed and name not in asked:
            raise UsageError(
                f"--over {name} searches what --set {name}={typed[name][0]} holds: leave one of them out"
            )
    found: dict[str, tuple[Value, ...] | None] = dict(asked)
    for name in over or _default_names(workload, base):
        if name not in typed:
            found[name] = None if name == BATCH else _same_values(workload, base, name)
    for name, values in found.items():
        _check_same(workload, base, name, values, is_asked=name in asked)
    own = [name for name in found if name not in ORDER]
    axes = tuple(Axis(name, found[name]) for name in (*own, *(name for name in ORDER if name in found)))
    theirs = {name: values[0] for name, values in asked.items() if name not in PLAINEST and name != BATCH}
    return Space(workload=workload, base=base, axes=axes, plain={**theirs, **PLAINEST, **workload.reference})


def _values(grid: Grid, typed: Mapping[str, Sequence[str]], name: str) -> tuple[Value, ...]:
    points = grid.points([{**{key: said[:1] for key, said in typed.items()}, name: typed[name]}])
    return tuple(value_of(point, name) for point in points)


def _default_names(workload: Workload[Any], base: Point) -> list[str]:
    """What is searched where the user says nothing."""
    values = {name: _same_values(workload, base, name) for name in (*workload.reference, *workload.alternatives)}
    names = [name for name in base.config if len(values.get(name) or ()) > 1 and name != CHECKPOINT]
    names += [name for name, listed in RUN_VALUES[str(base.run["device"])].items() if base.run[name] in listed]
    if base.run["mode"] != "step":
        names.remove("optimizer")
    if CHECKPOINT in base.config and base.run["mode"] in ("forward+backward", "step"):
        names.append(CHECKPOINT)
    return [*names, BATCH] if BATCH in base.config else names


def _same_values(workload: Workload[Any], base: Point, name: str) -> tuple[Value, ...] | None:
    """The values of a knob that compute what the base computes; None where they cannot be listed."""
    value = value_of(base, name)
    listed: tuple[Value, ...] | None
    if name == CHECKPOINT:
        listed = CHECKPOINTS
    elif name in RUN_VALUES["cuda"]:
        listed = RUN_VALUES[str(base.run["device"])][name]
    elif name in workload.alternatives:
        listed = next((same for same in workload.alternatives[name] if value in same), (value,))
    else:
        listed = next(knob for knob in (*workload.knobs(), *RUN_KNOBS) if knob.name == name).values
    return listed if listed is None or value in listed else (value, *listed)


def _check_same(
    workload: Workload[Any], base: Point, name: str, values: tuple[Value, ...] | None, is_asked: bool
) -> None:
    """UsageError where a knob of ours changes what is computed: the fastest of different things means nothing."""
    if name in ONE_VALUE:
        raise UsageError(f"{name} is one value for all points of a tuning: --set {name}={value_of(base, name)}")
    if name == "optimizer" and not set(values or ()) <= set(ADAMW):
        raise UsageError("optimizer=sgd is another update than AdamW: tune each by itself")
    sets = workload.alternatives.get(name)
    if sets is not None and not any(set(values or ()) <= set(same) for same in sets):
        raise UsageError(f"{name}={','.join(map(str, values or ()))} compute different things: tune each by itself")
    known = name in workload.reference or name in RUN_KNOB_NAMES or name in (BATCH, CHECKPOINT) or sets is not None
    if not known and (is_ours(workload.name) or not is_asked):
        raise UsageError(f"{name} changes what is computed, so the fastest value of it means nothing: give one value")
    if values is None and name != BATCH:
        raise UsageError(f"--over {name}: which values? --set {name}=v1,v2")
