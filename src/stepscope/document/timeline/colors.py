"""The color of every event on the timeline, as an index into one list: by phase, class of kernel, module."""

from __future__ import annotations

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
NAMES = (*PHASES, *_OWN, *_CLASSES, *(f"module {number}" for number in range(len(PALETTE))))
_FIRST_MODULE = NAMES.index("module 0")
_NUMBER = {name: number for number, name in enumerate(NAMES)}
_LEGEND = {"call": "CUDA calls", "python": "Python", "overhead": "profiler"}


def colors() -> list[dict[str, str]]:
    """Return every color in order: `name` in the legend ("" if it is not in it), `color` and `group`."""
    own = {**NAMED, **_OWN, **{f"module {number}": color for number, color in enumerate(PALETTE)}}
    return [
        {
            "name": "" if number >= _FIRST_MODULE or name == "step" else _LEGEND.get(name, name.replace("_", " ")),
            "color": own.get(name, GREY),
            "group": "gpu" if name in _CLASSES else "host",
        }
        for number, name in enumerate(NAMES)
    ]


def phase_colors(phases: pl.Series) -> pl.Series:
    """Return the colors of phases; null is a step."""
    return _numbers(phases.cast(pl.String), "step")


def kernel_colors(device: pl.DataFrame) -> pl.Series:
    """Return the colors of GPU work by its `class`."""
    return _numbers(device["class"].cast(pl.String), "other")


def host_colors(host: pl.DataFrame) -> pl.Series:
    """Return the colors of host events: ops and labels by phase, the rest by kind."""
    names = (
        pl.when(pl.col("kind").is_in(["runtime", "driver"]))
        .then(pl.lit("call"))
        .when(pl.col("kind") == "python")
        .then(pl.lit("python"))
        .when(pl.col("kind") == "overhead")
        .then(pl.lit("overhead"))
        .otherwise(pl.col("phase").cast(pl.String))
    )
    return _numbers(host.select(names.alias("name"))["name"], "other")


def module_colors(modules: pl.Series) -> pl.Series:
    """Return the colors of modules by the last word of their name, without digits."""
    return _by_name(modules, lambda name: _FIRST_MODULE + _palette_place(name))


def range_colors(ranges: pl.DataFrame) -> pl.Series:
    """Return the colors of labels on the GPU: by phase, else as modules."""

    def number(name: str) -> int:
        phase = name.removeprefix(PHASE_PREFIX)
        if name.startswith("ProfilerStep#"):
            return _NUMBER["step"]
        if name.startswith("Optimizer."):
            phase = "optimizer"
        return _NUMBER[phase] if phase in PHASES else _FIRST_MODULE + _palette_place(name.removeprefix(MODULE_PREFIX))

    return _by_name(ranges["name"], number)


def _palette_place(name: str) -> int:
    words = [word for word in name[-200:].split(".") if not word.isdigit()]
    kind = re.sub(r"[\d_]+$", "", words[-1] if words else "")
    return crc32(kind.encode()) % len(PALETTE)


def _by_name(names: pl.Series, number: Callable[[str], int]) -> pl.Series:
    text = names.cast(pl.String)
    unique = text.unique().drop_nulls().to_list()
    numbers = [number(name) for name in unique]
    found: pl.Series = text.replace_strict(unique, numbers, default=0, return_dtype=pl.UInt8)
    return found


def _numbers(names: pl.Series, default: str) -> pl.Series:
    numbers = list(range(len(NAMES)))
    found: pl.Series = names.replace_strict(list(NAMES), numbers, default=_NUMBER[default], return_dtype=pl.UInt8)
    return found
