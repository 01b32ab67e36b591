"""`stepscope analyze --attention`, `--copies`, `--compiler`: one question about a trace or a recording."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from stepscope.errors import UsageError

VIEWS = ("attention", "copies", "compiler")
"""Each is a module of `document/sections` with `<view>_document`."""


def asked(arguments: argparse.Namespace) -> str | None:
    """Return the view that was asked for, or None; UsageError if there are two."""
    names = [name for name in ("memory", *VIEWS) if getattr(arguments, name, False)]
    if len(names) > 1:
        raise UsageError(f"--{names[0]} and --{names[1]}: choose one")
    return names[0] if names and names[0] in VIEWS else None


def show(arguments: argparse.Namespace, view: str) -> int:
    """Print one view of a session."""
    from stepscope.cli.support.output import print_document
    from stepscope.cli.support.progress import Progress

    if len(arguments.paths) > 1:
        raise UsageError(f"--{view} reads one path, not {len(arguments.paths)}")
    if arguments.output:
        raise UsageError("-o draws memory over time: use it with --memory")
    if view != "attention" and arguments.step is not None:
        raise UsageError(f"--step does not go with --{view}, which looks at all typical steps together")
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

    def document() -> Any:
        return getattr(import_module(f"stepscope.document.sections.{view}"), f"{view}_document")(report)

    print_document(document, report.to_json, arguments.json, arguments.top)
    return 0
