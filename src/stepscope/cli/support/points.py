"""What a user types to say which points of a workload: its name, presets, knobs, and how it runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.users_code import users_code

if TYPE_CHECKING:
    from stepscope.sweep.grid import Grid
    from stepscope.workloads.workload import Workload

# Flags for what is set most; each is also a key of --set.
RUN_FLAGS = {
    "mode": "inference, forward, forward+backward, step",
    "dtype": "fp32, tf32, bf16, fp16, autocast_bf16, autocast_fp16",
    "compile": "off, default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs",
    "sdpa": "attention back end: free, flash, efficient, math, cudnn",
    "optimizer": "adamw, fused, handwritten, sgd",
    "bf16-reduction": "auto, on, off",
    "warmup": "passes before the first sample (default 3)",
    "steps": "samples (default 10)",
    "seed": "of weights and data (default 0)",
    "device": "cpu, cuda (default: cuda where there is one)",
}


def add_point_arguments(parser: argparse.ArgumentParser, about: str, flags: Iterable[str]) -> None:
    """Add WORKLOAD, --preset, --set and some of RUN_FLAGS."""
    parser.add_argument("workload", metavar="WORKLOAD", help=about)
    parser.add_argument("--preset", metavar="A,B", help="presets of the workload")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=V1,V2", help="values of a knob")
    for name in flags:
        parser.add_argument(f"--{name}", metavar="V1,V2", help=RUN_FLAGS[name])


def find_workload(arguments: argparse.Namespace) -> Workload[Any]:
    """The workload that was named; importing it may run a user's code."""
    from stepscope.workloads.registry import find

    with users_code():
        return find(arguments.workload)


def typed_axes(grid: Grid, arguments: argparse.Namespace, flags: Iterable[str]) -> dict[str, list[str]]:
    """What was typed after --preset, --set and those flags, as axes of a grid."""
    names = [name.replace("-", "_") for name in flags]
    said = {name: values for name in ("preset", *names) if (values := getattr(arguments, name)) is not None}
    preset = [f"preset={said.pop('preset')}"] if "preset" in said else []
    return grid.words([*preset, *arguments.set, *(f"{name}={values}" for name, values in said.items())])
