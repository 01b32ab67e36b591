"""The points of a grid: lists of values, multiplied or paired, from the command line, a TOML file or a function."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepscope.errors import UsageError
from stepscope.sweep.run_knobs import RUN_KNOB_NAMES, RUN_KNOBS, least
from stepscope.sweep.toml_file import read_toml
from stepscope.workloads.registry import find, is_ours
from stepscope.workloads.users_code import check_key, function_of, module_from_file, nearest, parse_value, users_code
from stepscope.workloads.workload import Knob, Value, Workload

PRESET = "preset"
MAX_POINTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration with a value for every knob; equal values always give the same `hash`."""

    workload: str
    preset: str | None
    config: Mapping[str, Value]  # every knob of the workload
    run: Mapping[str, Value]  # every run knob
    hash: str


Axes = Mapping[str, Sequence[Any]]  # name of a knob, or `preset` → its values


def make_point(workload: Workload[Any], values: Mapping[str, Value], preset: str | None = None) -> Point:
    """Return the point with these knobs, the others from preset or default; keys and values must be valid."""
    presets = workload.presets
    chosen = preset if preset is not None else next(iter(presets), None)
    defaults = {knob.name: knob.default for knob in workload.knobs()}
    config = {
        **defaults,
        **(presets[chosen] if chosen is not None else {}),
        **{name: value for name, value in values.items() if name in defaults},
    }
    asked = {"mode": workload.mode, **values}
    run = {knob.name: asked.get(knob.name, knob.default) for knob in RUN_KNOBS}
    identity = {"workload": workload.name, "config": config, "run": run}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    fixed = {"config": MappingProxyType(config), "run": MappingProxyType(run)}
    return Point(workload=workload.name, preset=chosen, hash=digest, **fixed)


def changed(workload: Workload[Any], point: Point, **values: Value) -> Point:
    return make_point(workload, {**point.config, **point.run, **values}, point.preset)


def renamed(point: Point, asked: Mapping[str, Any]) -> Point:
    """Return the same point with a hash that also depends on what is asked about it."""
    text = json.dumps([point.hash, asked], sort_keys=True)
    return replace(point, hash=hashlib.sha256(text.encode()).hexdigest()[:12])


class Grid:
    """Turns user input into points of one workload; mistakes raise UsageError with a suggestion."""

    def __init__(self, workload: Workload[Any], defaults: Mapping[str, Value]) -> None:
        """`defaults` are run knobs set once for all points, such as the device."""
        self._workload = workload
        self._defaults = dict(defaults)
        own = workload.knobs()
        clash = [knob.name for knob in own if knob.name in (*RUN_KNOB_NAMES, PRESET)]
        if clash:
            raise UsageError(f"{workload.name} has a knob {clash[0]!r}, a name reserved for sweeps. Rename it.")
        self._knobs: tuple[Knob, ...] = (*own, *RUN_KNOBS)

    def points(self, grids: Iterable[Axes], paired: bool = False) -> list[Point]:
        """Return the points of some grids in order, without duplicates."""
        found: dict[str, Point] = {}
        for axes in grids:
            checked = {key: [self._value(key, value) for value in values] for key, values in axes.items()}
            num_points = 0 if paired else math.prod(len(set(values)) for values in checked.values())
            for combination in _paired(checked) if paired else itertools.product(*checked.values()):
                values = dict(zip(checked, combination))
                preset = values.pop(PRESET, None)
                point = make_point(self._workload, {**self._defaults, **values}, preset)
                found.setdefault(point.hash, point)
                if max(num_points, len(found)) > MAX_POINTS:
                    raise UsageError(f"the grid has more than {MAX_POINTS:,} points")
        return list(found.values())

    @staticmethod
    def words(words: Iterable[str]) -> dict[str, list[str]]:
        """Return `key=v1,v2` words as axes; a repeated key adds values."""
        axes: dict[str, list[str]] = {}
        for word in words:
            key, equals, values = word.partition("=")
            if not equals or not values.strip():
                raise UsageError(f"--set {word}: write key=value or key=v1,v2")
            axes.setdefault(key.strip(), []).extend(value.strip() for value in values.split(",") if value.strip())
        return axes

    def _value(self, key: str, given: Any) -> Any:
        if key == PRESET:
            if given not in self._workload.presets:
                raise UsageError(f"Unknown preset {given!r}: {nearest(str(given), self._workload.presets)}")
            return given
        knob = check_key((*self._knobs, _PRESET_KNOB), key)
        value = parse_value(knob, str(given).lower() if isinstance(given, bool) else str(given))
        smallest = least(knob, is_ours=is_ours(self._workload.name))
        if smallest is not None and knob.values is None and not isinstance(value, str) and value < smallest:
            raise UsageError(f"{key}={value}: must be {smallest} or more")
        return value


def find_workload(name: str) -> Workload[Any]:
    """Return a workload by name, config or factory; an error in a user's file becomes a UsageError."""
    with users_code():
        return find(name)


def grid_points(
    workload: Workload[Any], axes: Axes, grid: str | None = None, paired: bool = False, **defaults: Any
) -> list[Point]:
    """Return the points of some axes, or of every grid in a file, on this machine's device if none is named."""
    if "device" not in axes:
        defaults["device"] = default_device()
    made = Grid(workload, defaults)
    if grid is None:
        return made.points([axes], paired)
    with users_code():
        grids, is_paired = read_grids(grid)
    points = made.points([{**axes, **listed} for listed in grids], is_paired or paired)
    if not points:
        raise UsageError(f"{grid} has no points")
    return points


def default_device() -> str:
    """Return the device that points run on by default: cuda if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


_PRESET_KNOB = Knob(name=PRESET, kind=str, default="", values=None, about="")


def _paired(axes: Axes) -> Iterator[tuple[Any, ...]]:
    """Pair first with first, second with second; a single value goes with each."""
    lengths = {key: len(values) for key, values in axes.items() if len(values) != 1}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise UsageError(f"--zip needs lists of equal length: {counts}")
    for index in range(next(iter(lengths.values()), 1)):
        yield tuple(values[index if len(values) > 1 else 0] for values in axes.values())


def read_grids(source: str) -> tuple[list[Axes], bool]:
    """Return the grids from `file.toml` or `file.py:function`, and whether their values are paired."""
    path, _, function = source.rpartition(":")
    if path.endswith(".py"):
        return [listed(point) for point in _called(Path(path), function)], False
    if not source.endswith(".toml"):
        raise UsageError(f"--grid {source}: must be file.toml or file.py:function")
    # The file's top-level keys are axes that every `[[grid]]` extends; `zip = true` pairs.
    table = read_toml(Path(source))
    grids, paired = table.pop("grid", [{}]), table.pop("zip", False)
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise UsageError(f"{source}: write [[grid]] with double brackets, once per grid")
    if any("zip" in grid for grid in grids):
        raise UsageError(f"{source}: move zip = true above the first [[grid]]; it applies to all grids")
    if not isinstance(paired, bool):
        raise UsageError(f"{source}: zip must be true or false")
    return [listed({**table, **grid}) for grid in grids], paired


def listed(values: Any) -> Axes:
    """Return axes from values and lists of values; UsageError for anything else."""
    if not isinstance(values, Mapping):
        raise UsageError(f"A point must be a dictionary of knobs, not {type(values).__name__}")
    listed = {str(key): value if isinstance(value, (list, tuple)) else [value] for key, value in values.items()}
    for key, choices in listed.items():
        if not choices or not all(isinstance(value, (int, float, str)) for value in choices):
            raise UsageError(f"{key} = {values[key]!r}: must be a value or a list of values")
    return listed


def _called(path: Path, function: str) -> Iterable[Any]:
    result = function_of(module_from_file(path), str(path), function)()
    if not isinstance(result, Iterable) or isinstance(result, (str, Mapping)):
        raise UsageError(f"{path}:{function} must return a list of points")
    return result
