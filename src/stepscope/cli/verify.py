"""Prove that a fix pays: run a script with and without it, in turns, and compare times and losses.

TARGET is a recording, whose command is run again where it was run, or a script with its arguments. A fix is made from
outside, to a fresh process under stepscope run; the script stays as it is. First every run is rehearsed: the fix must
change something, else it is "not applied". Then N rounds without, with, without, with … are timed. The step times of
all rounds are compared as stepscope compare does, the losses step by step, beside what stepscope diagnose expected.

Options stand before TARGET; --fix, --rounds and --json also after it. What follows "--" is the script's.
Fixes joined by "+" are made together. The exit code is 0 when every fix was measured and its losses agree, 3 when one
fails or its losses differ, 4 when one could not be applied or measured, 2 for a mistake.

examples:
  stepscope verify runs/baseline --fix unfused_optimizer
  stepscope verify train.py --lr 3e-4 --fix autocast --fix compile=max-autotune --fix autocast+compile
  stepscope verify --fix launch_bound --rounds 5 -m package.train --config small.toml
  stepscope verify --fix list
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from stepscope.cli.support.numbers import positive
from stepscope.cli.support.output import print_document, tell, write
from stepscope.cli.support.progress import Doing
from stepscope.errors import UsageError

LIST = "list"
ANYWHERE = ("--fix", "--rounds", "--json")
"""Options that are Stepscope's also behind a script's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    _add_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help="a module, as TARGET")
    parser.add_argument(
        "target", nargs=argparse.REMAINDER, metavar="TARGET …", help="a recording, or a script and its arguments"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fix", action="append", default=[], metavar="ID", help="a fix, by its finding's id; may be repeated"
    )
    parser.add_argument("--rounds", type=positive, default=4, metavar="N", help="pairs of runs (default 4)")
    parser.add_argument("--warmup", type=positive, default=8, metavar="N", help="steps kept apart (default 8)")
    parser.add_argument("--clean", type=positive, default=20, metavar="N", help="steps timed in a run (default 20)")
    parser.add_argument(
        "--tolerance", type=_share, metavar="LIMIT%", help="how far losses may differ (default: by the kind of fix)"
    )
    parser.add_argument(
        "--timeout", type=positive, default=1800, metavar="S", help="seconds for one run (default 1800)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the runs' folder (default: runs/verify-…)")
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/verify.md)")


def main(arguments: argparse.Namespace) -> int:
    """Verify, print, and return the exit code that a job can go by."""
    words = _own_options(arguments)
    if LIST in arguments.fix:
        from stepscope.cli.list import fixes_text

        write([fixes_text(), "\n"])
        return 0
    if not words:
        raise UsageError("name a recording or a script: stepscope verify runs/baseline --fix autocast")
    from stepscope.sweep.rerun import Options
    from stepscope.verify_fixes import verify_fixes

    with Doing() as doing:
        verification = verify_fixes(
            words,
            arguments.fix,
            is_module=bool(arguments.module),
            rounds=arguments.rounds,
            options=Options(warmup=arguments.warmup, clean=arguments.clean, timeout_s=arguments.timeout),
            tolerance=arguments.tolerance,
            output=arguments.output,
            doing=doing,
            warn=lambda warning: tell(f"stepscope verify: {warning}"),
        )

    from stepscope.document.verification import verification_document

    print_document(lambda: verification_document(verification), verification.to_json, arguments.json)
    return verification.exit_code


class _Rest(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (stepscope verify --help says more)")


def _own_options(arguments: argparse.Namespace) -> list[str]:
    """TARGET and its arguments; options of ours that stand behind it are read into `arguments`."""
    words: list[str] = arguments.module or arguments.target
    if not words:
        return []
    parser = _Rest(add_help=False, allow_abbrev=False)
    _add_options(parser)
    if not arguments.module and Path(words[0]).is_dir():
        parser.parse_args(words[1:], arguments)  # a recording has no arguments
        return words[:1]
    ours, theirs, position = [], words[:1], 1
    while position < len(words):
        word = words[position]
        if word == "--":
            theirs += words[position + 1 :]
            break
        name, equals, _ = word.partition("=")
        length = 1 if equals or name == "--json" else 2
        if name in ANYWHERE:
            ours += words[position : position + length]
        else:
            length = 1
            theirs.append(word)
        position += length
    parser.parse_args(ours, arguments)
    return theirs


def _share(text: str) -> float:
    """`2%` as a share; what argparse shows when it is none."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not text.strip().endswith("%") or not 0 < share < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write it as 2%")
    return share
