"""Find what is wrong with a step: each cause with its evidence, its cost and a fix.

Reads a recording, a PyTorch profiler trace (.json, .json.gz) or a folder with one trace per rank. Needs neither torch
nor a GPU. Savings come from replaying the step without the cause. Also lists the rules that
passed, and the rules that could not run with the command that provides their data.

What-if: with --scale, --drop-launches, --host or --no-waits, the step is instead replayed with a change that you
specify. WORK is FIELD=PATTERN, or several separated by commas. FIELD is class, kernel, op, called (the op that the
program called), module or phase. * matches anything. See docs/whatif.md.

To ignore rules, list them in pyproject.toml:
  [tool.stepscope.diagnose]
  ignore = ["launch_bound"]

examples:
  stepscope diagnose
  stepscope diagnose trace.json.gz
  stepscope diagnose runs/baseline --json | jq '.findings[0]'
  stepscope diagnose trace.json.gz --scale 'class=attention:0.5'
  stepscope diagnose trace.json.gz --drop-launches 'called=aten::contiguous'
  stepscope diagnose runs/baseline --host 0.1 --no-waits
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="recording or trace (default: latest run)")
    parser.add_argument("--rank", type=int, metavar="R", help="rank to read (default: the first)")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="skip this rule; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text (docs/diagnose.md)")
    parser.add_argument("--no-cache", action="store_true", help="do not use or write the cache")
    group = parser.add_argument_group("what-if")
    group.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="WORK:FACTOR",
        help="multiply the time of this GPU work by FACTOR",
    )
    group.add_argument(
        "--drop-launches", action="append", default=[], metavar="WORK", help="drop this GPU work and its launches"
    )
    group.add_argument("--host", type=float, metavar="FACTOR", help="multiply the host's own time by FACTOR")
    group.add_argument("--no-waits", action="store_true", help="remove the host's waits for the GPU within a step")
    group.add_argument("--clean", action="store_true", help="subtract the profiler's overhead first")


def main(arguments: argparse.Namespace) -> int:
    """Diagnose or replay, and print."""
    from stepscope.cli.support.progress import Progress
    from stepscope.session import open_session

    asks_what_if = bool(
        arguments.scale or arguments.drop_launches or arguments.host is not None or arguments.no_waits
    )
    with Progress("reading") as progress:
        session = open_session(
            arguments.path, rank=arguments.rank, use_cache=not arguments.no_cache, progress=progress
        )
        _ = session.case
    return _what_if(session, arguments) if asks_what_if or arguments.clean else _diagnose(session, arguments)


def _diagnose(session: Session, arguments: argparse.Namespace) -> int:
    from stepscope.cli.support.output import print_document
    from stepscope.cli.support.settings import ignored_rules
    from stepscope.document.findings import diagnosis_document
    from stepscope.findings.diagnose import diagnose

    named = [name for names in arguments.ignore for name in names.split(",") if name]
    diagnosis = diagnose(session.case, {*ignored_rules(Path.cwd()), *named})
    recording = str(session.path) if session.is_recording else None
    print_document(lambda: diagnosis_document(diagnosis, recording), diagnosis.to_json, arguments.json)
    return 0


def _what_if(session: Session, arguments: argparse.Namespace) -> int:
    from stepscope.cli.support.output import print_document
    from stepscope.document.what_if import what_if_document
    from stepscope.findings.what_if import what_if

    answer = what_if(
        session.case,
        [_scale(word) for word in arguments.scale],
        arguments.drop_launches,
        arguments.host,
        not arguments.no_waits,
        arguments.clean,
    )
    print_document(lambda: what_if_document(answer), answer.to_json, arguments.json)
    return 0


def _scale(word: str) -> tuple[str, float]:
    work, is_there, factor = word.rpartition(":")
    try:
        value = float(factor)
    except ValueError:
        value = -1.0
    if not is_there or not 0 <= value < float("inf"):
        raise UsageError(f"--scale {word!r} must be WORK:FACTOR, such as 'class=attention:0.5'")
    return work, value
