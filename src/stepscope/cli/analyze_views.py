"""`stepscope analyze --attention`, `--copies`, `--compiler`: one question about a trace or a recording."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from stepscope.errors import UsageError

VIEWS = ("attention", "copies", "compiler")
"""Each is `report/<view>.py` with `<view>_report(case)`, and `report/<view>_text.py` with its text."""


def asked(arguments: argparse.Namespace) -> str | None:
    """The view that was asked for, or None; UsageError where it was two."""
    names = [name for name in ("memory", *VIEWS) if getattr(arguments, name, False)]
    if len(names) > 1:
        raise UsageError(f"--{names[0]} and --{names[1]}: ask one at a time")
    return names[0] if names and names[0] in VIEWS else None


def show(arguments: argparse.Namespace, view: str) -> int:
    """Read, work out the view and print it."""
    from stepscope.api import need_read_side
    from stepscope.cli.support.output import print_result
    from stepscope.cli.support.progress import Progress

    if len(arguments.paths) > 1:
        raise UsageError(f"--{view} reads one path: {len(arguments.paths)} were named")
    if arguments.output:
        raise UsageError("-o draws memory over time: it goes with --memory")
    if view == "compiler" and arguments.step is not None:
        raise UsageError("--step does not go with --compiler: a run is compiled as a whole")
    if view == "copies" and arguments.step is not None:
        raise UsageError("--step does not go with --copies: what a copy saves is told of the typical steps together")
    path = arguments.paths[0]
    if not path.exists():
        raise UsageError(f"there is no {path}")
    need_read_side()
    from stepscope.session.case import open_case

    with Progress("reading") as progress:
        case = open_case(path, arguments.rank, not arguments.no_cache, progress)
    make: Any = getattr(import_module(f"stepscope.session.{view}_view"), f"{view}_report")
    text_of: Any = getattr(import_module(f"stepscope.document.text.{view}_text"), f"{view}_text")
    report = make(case, arguments.step) if view == "attention" else make(case)
    print_result(report.to_json, lambda color, width: text_of(report, arguments.top, width), arguments.json)
    return 0
