"""Options that name the points of a workload and where their rows go."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.values import seconds

if TYPE_CHECKING:
    from stepscope.sweep.grid import Axes, Point
    from stepscope.sweep.results import Place
    from stepscope.workloads.workload import Workload

# Flags for the knobs that are set most; each is also a key of --set.
RUN_FLAGS = {
    "mode": "inference, forward, forward+backward, step",
    "dtype": "fp32, tf32, bf16, fp16, autocast_bf16, autocast_fp16",
    "compile": "off, default, reduce-overhead, max-autotune …",
    "sdpa": "attention backend: free (any), flash, efficient, math, cudnn",
    "optimizer": "adamw, fused, handwritten, sgd",
    "bf16-reduction": "reduced-precision bf16 reductions: auto, on, off",
    "warmup": "warm-up passes before the first sample (default 3)",
    "steps": "number of samples (default 10)",
    "seed": "seed for weights and data (default 0)",
    "device": "cpu, cuda (default: cuda if available)",
}


def add_point_arguments(parser: argparse.ArgumentParser, about: str, flags: Iterable[str]) -> None:
    """Add WORKLOAD, --preset, --set and some of RUN_FLAGS."""
    add = parser.add_argument
    add("workload", metavar="WORKLOAD", help=about)
    add("--preset", metavar="A,B", help="presets of the workload")
    add("--set", action="append", default=[], metavar="KEY=V1,V2", help="values for a knob, such as seq_len")
    for name in flags:
        add(f"--{name}", metavar="V1,V2", help=RUN_FLAGS[name])


def add_sweep_arguments(parser: argparse.ArgumentParser, timeout_s: float | None = 600.0) -> None:
    """Add the options of every verb that writes rows to a folder."""
    add, default = parser.add_argument, "see docs/tune.md" if timeout_s is None else f"{timeout_s:g}"
    limit = f"time limit per point in seconds (default: {default})"
    add("--timeout", type=seconds, default=timeout_s, metavar="S", help=limit)
    add("--start", choices=("fork", "spawn"), help="how to start processes (default: fork)")
    add("-o", "--output", type=Path, metavar="DIR", help="folder for the results (default: runs/…)")
    add("--resume", action="store_true", help="continue an interrupted run")
    add("--json", action="store_true", help="print JSON instead of text")
    add("--quiet", action="store_true", help="suppress progress output")


def typed_axes(arguments: argparse.Namespace, flags: Iterable[str]) -> Axes:
    """Return what was typed after --preset, --set and those flags, as axes of a grid."""
    from stepscope.sweep.grid import Grid, listed

    names = [name.replace("-", "_") for name in flags]
    typed = {name: values for name in ("preset", *names) if (values := getattr(arguments, name)) is not None}
    preset = [f"preset={typed.pop('preset')}"] if "preset" in typed else []
    return listed(Grid.words([*preset, *arguments.set, *(f"{name}={values}" for name, values in typed.items())]))


def typed_points(
    arguments: argparse.Namespace, flags: Iterable[str], **defaults: Any
) -> tuple[Workload[Any], list[Point]]:
    """Return the workload that was typed, and the points of its axes."""
    from stepscope.sweep.grid import find_workload, grid_points

    workload = find_workload(arguments.workload)
    return workload, grid_points(workload, typed_axes(arguments, flags), **defaults)


def place_of(arguments: argparse.Namespace, verb: str, subject: str) -> Place:
    """Return where the rows go, with the command that was typed and the one that continues it."""
    from stepscope.sweep.results import Place, default_folder

    folder = arguments.output or default_folder(verb, subject)
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if "-o" not in words and not any(word.startswith(("--output", "-o")) for word in words):
        words += ["-o", str(folder)]
    return Place(
        folder=folder,
        command=shlex.join(["stepscope", *sys.argv[1:]]),
        resume=arguments.resume,
        resume_command=shlex.join(["stepscope", *words, "--resume"]),
    )
