"""`stepscope analyze --attention`, `--copies`, `--compiler`: one question about a trace or a recording."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from stepscope.errors import UsageError

VIEWS = ("attention", "copies", "compiler")
"""Each has its text in `document/text/<view>_text.py`."""


def asked(arguments: argparse.Namespace) -> str | None:
    """The view that was asked for, or None; UsageError where it was two."""
    names = [name for name in ("memory", *VIEWS) if getattr(arguments, name, False)]
    if len(names) > 1:
        raise UsageError(f"--{names[0]} and --{names[1]}: ask one at a time")
    return names[0] if names and names[0] in VIEWS else None


def show(arguments: argparse.Namespace, view: str) -> int:
    """Read, work out the view and print it."""
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
    from stepscope.session import open_session

    with Progress("reading") as progress:
        session = open_session(
            arguments.paths, rank=arguments.rank, use_cache=not arguments.no_cache, progress=progress
        )
        case = session.case
    report: Any
    if view == "compiler":
        from stepscope.findings.compiler_report import compiler_report

        report = compiler_report(case)
    elif view == "attention":
        from stepscope.session.attention import attention_report

        report = attention_report(case, arguments.step)
    else:
        report = session.copies
    text_of: Any = getattr(import_module(f"stepscope.document.text.{view}_text"), f"{view}_text")
    print_result(report.to_json, lambda color, width: text_of(report, arguments.top, width), arguments.json)
    return 0
