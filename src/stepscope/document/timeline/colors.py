"""The color of every event on the timeline, as an index into one list: by phase, class of kernel, module."""

import re
from collections.abc import Callable
from zlib import crc32

import polars as pl

from stepscope.analysis.kernels.kernel_classes import KERNEL_CLASSES
from stepscope.analysis.structure.modules import MODULE_PREFIX
from stepscope.analysis.structure.steps import PHASE_PREFIX
from stepscope.analysis.time.phases import PHASES
from stepscope.document.colors import GREY, NAMED, PALETTE

_OWN = {"step": "#8a94a6", "call": "#5f7187", "python": "#a89f8e", "overhead": "#c4564a"}
_CLASSES = tuple(name for name in KERNEL_CLASSES if name not in PHASES)
_MODULES = tuple(f"module {number}" for number in range(len(PALETTE)))
NAMES = (*PHASES, *_OWN, *_CLASSES, *_MODULES)
_NUMBER = {name: number for number, name in enumerate(NAMES)}
_LEGEND = {"call": "CUDA calls", "python": "Python", "overhead": "profiler"} | dict.fromkeys(("step", *_MODULES), "")
_KINDS = {"runtime": "call", "driver": "call", "python": "python", "overhead": "overhead"}


def colors() -> list[dict[str, str]]:
    """Return every color in order: `name` in the legend ("" if it is not in it), `color` and `group`."""
    own = {**NAMED, **_OWN, **dict(zip(_MODULES, PALETTE))}
    titles = {name: _LEGEND.get(name, name.replace("_", " ")) for name in NAMES}
    groups = {name: "gpu" if name in _CLASSES else "host" for name in NAMES}
    return [{"name": titles[name], "color": own.get(name, GREY), "group": groups[name]} for name in NAMES]


def named_colors(names: pl.Series, default: str = "other") -> pl.Series:
    """Return the colors of phases or classes of GPU work by their name."""
    return _by_name(names.cast(pl.String).fill_null(default), lambda name: _NUMBER.get(name, _NUMBER[default]))


def host_colors(host: pl.DataFrame) -> pl.Series:
    """Return the colors of host events: ops and labels by phase, the rest by kind."""
    kinds = host["kind"].cast(pl.String).replace_strict(_KINDS, default=host["phase"].cast(pl.String))
    return named_colors(kinds)


def module_colors(modules: pl.Series) -> pl.Series:
    """Return the colors of modules by the last word of their name, without digits."""
    return _by_name(modules, _module_color)


def range_colors(ranges: pl.Series) -> pl.Series:
    """Return the colors of labels on the GPU: by phase, else as modules."""

    def number(name: str) -> int:
        phase = "optimizer" if name.startswith("Optimizer.") else name.removeprefix(PHASE_PREFIX)
        if name.startswith("ProfilerStep#"):
            return _NUMBER["step"]
        return _NUMBER[phase] if phase in PHASES else _module_color(name.removeprefix(MODULE_PREFIX))

    return _by_name(ranges, number)


def _module_color(name: str) -> int:
    words = [word for word in name[-200:].split(".") if not word.isdigit()]
    kind = re.sub(r"[\d_]+$", "", words[-1] if words else "")
    return _NUMBER["module 0"] + crc32(kind.encode()) % len(PALETTE)


def _by_name(names: pl.Series, number: Callable[[str], int]) -> pl.Series:
    text = names.cast(pl.String)
    unique = text.unique().drop_nulls().to_list()
    numbers = [number(name) for name in unique]
    found: pl.Series = text.replace_strict(unique, numbers, default=0, return_dtype=pl.UInt8)
    return found
