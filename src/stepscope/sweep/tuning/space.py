"""Which knobs tuning changes, and to which values: only those that do not change the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.errors import UsageError
from stepscope.sweep.grid import PRESET, Grid, Point, changed
from stepscope.sweep.run_knobs import RUN_KNOB_NAMES, RUN_KNOBS, has_backward
from stepscope.workloads.registry import is_ours
from stepscope.workloads.users_code import nearest
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
}  # the plainest value of each general knob that selects how the same result is computed
# Searched by default: values that can win on the device, slowest to try last.
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
# The workload's own knobs come before these.
ORDER = ("optimizer", SDPA, BATCH, "dtype", "bf16_reduction", CHECKPOINT, COMPILE)
SET_BY_STEP = ("dtype", "compile", "sdpa", "optimizer", "bf16_reduction")
ONE_VALUE = ("mode", "warmup", "steps", "seed", "device")


@dataclass(frozen=True)
class Axis:
    name: str
    values: tuple[Value, ...] | None
    """Its values in the order they are tried; None: powers of two, as long as they are faster and fit."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Where tuning starts and what it may change."""

    workload: Workload[Any]
    base: Point  # the defaults: the preset and what the user set
    axes: tuple[Axis, ...]
    plain: Mapping[str, Value]  # knobs of the plainest way to compute the same result

    def changed(self, point: Point, **values: Value) -> Point:
        return changed(self.workload, point, **values)

    def plainest(self, point: Point) -> Point:
        """Return the plainest variant of the same configuration: same sizes, batch, seed and mode."""
        names = {*point.config, *point.run}
        plain = {name: value for name, value in self.plain.items() if name in names}
        if value_of(point, "optimizer") not in ADAMW:
            plain.pop("optimizer", None)
        return self.changed(point, **plain)

    def turned(self, point: Point) -> dict[str, Value]:
        """Return the knobs in which a point differs from the base."""
        values = {**point.config, **point.run}
        return {name: value for name, value in values.items() if value != value_of(self.base, name)}


def value_of(point: Point, name: str) -> Value:
    return point.config[name] if name in point.config else point.run[name]


def search_space(
    workload: Workload[Any], grid: Grid, typed: Mapping[str, Sequence[str]], over: Sequence[str]
) -> Space:
    """Return the search space: knobs with one value are fixed, with several searched; `over` limits the others."""
    if len(typed.get(PRESET, ())) > 1:
        raise UsageError("Tune one preset at a time: presets compute different things")
    (base,) = grid.points([{name: values[:1] for name, values in typed.items()}])
    names = (*base.config, *base.run)
    asked: dict[str, tuple[Value, ...]] = {}
    for name, words in typed.items():
        if len(words) > 1:
            points = grid.points([{**{key: given[:1] for key, given in typed.items()}, name: words}])
            asked[name] = tuple(value_of(point, name) for point in points)
    for name in over:
        if name not in names:
            raise UsageError(f"--over {name}: unknown knob: {nearest(name, names)}")
        if name in typed and name not in asked:
            raise UsageError(f"--over {name} contradicts --set {name}={typed[name][0]}: remove one of them")
    found: dict[str, tuple[Value, ...] | None] = dict(asked)
    for name in over or _default_names(workload, base):
        if name not in typed:
            found[name] = None if name == BATCH else _same_values(workload, base, name)
    for name, values in found.items():
        _check_same(workload, base, name, values, is_asked=name in asked)
    own = [name for name in found if name not in ORDER]
    axes = tuple(Axis(name, found[name]) for name in (*own, *(name for name in ORDER if name in found)))
    first = {name: values[0] for name, values in asked.items() if name not in PLAINEST and name != BATCH}
    return Space(workload=workload, base=base, axes=axes, plain={**first, **PLAINEST, **workload.reference})


def _default_names(workload: Workload[Any], base: Point) -> list[str]:
    values = {name: _same_values(workload, base, name) for name in (*workload.reference, *workload.alternatives)}
    names = [name for name in base.config if len(values.get(name) or ()) > 1 and name != CHECKPOINT]
    names += [name for name, listed in RUN_VALUES[str(base.run["device"])].items() if base.run[name] in listed]
    if base.run["mode"] != "step":
        names.remove("optimizer")
    if CHECKPOINT in base.config and has_backward(base.run):
        names.append(CHECKPOINT)
    return [*names, BATCH] if BATCH in base.config else names


def _same_values(workload: Workload[Any], base: Point, name: str) -> tuple[Value, ...] | None:
    """Return the values of a knob that give the same result as the base; None if they cannot be listed."""
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
    """Raise UsageError if a knob changes the result: comparing the speed of different results is meaningless."""
    if name in ONE_VALUE:
        raise UsageError(f"{name} must be the same for all points of a tuning: --set {name}={value_of(base, name)}")
    if name == "optimizer" and not set(values or ()) <= set(ADAMW):
        raise UsageError("optimizer=sgd and AdamW give different updates: tune them separately")
    sets = workload.alternatives.get(name)
    if sets is not None and not any(set(values or ()) <= set(same) for same in sets):
        raise UsageError(f"{name}={','.join(map(str, values or ()))} compute different things: tune them separately")
    known = name in workload.reference or name in RUN_KNOB_NAMES or name in (BATCH, CHECKPOINT) or sets is not None
    if not known and (is_ours(workload.name) or not is_asked):
        raise UsageError(f"{name} changes the result, so its fastest value is meaningless: set one value")
    if values is None and name != BATCH:
        raise UsageError(f"--over {name} needs values: --set {name}=v1,v2")
