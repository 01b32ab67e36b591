"""Measure whether a fix pays off: alternate runs with and without it, and compare step times and losses.

TARGET is a script with its arguments, or a recording, whose command is run again in the same folder. A command that
you have not run under stepscope run yourself is shown first, and you are asked; --yes runs it without asking. A fix
is applied from outside, in a fresh process under stepscope run; the script itself does not change. Each variant first
runs once untimed, as a rehearsal: a fix that changes nothing is reported as "not applied". Then come N timed rounds,
each with one run without and one with the fix. Step times are compared as in stepscope compare, and losses step by
step. The result is shown next to the saving that stepscope diagnose expected.

A change that you made by hand, in a copy of the script, is --fix NAME=COPY.py: the copy runs with the same arguments.
With the name of a finding, it is shown next to what diagnose expected of it.

Put options before TARGET; --fix, --rounds and --json may also follow it. Arguments after "--" go to the script.
Fixes joined by "+" are applied together. The exit code is 0 if every fix was measured and its losses agree, 3 if one
fails or its losses differ, 4 if one could not be applied or measured, and 2 for a usage error.

examples:
  stepscope verify runs/baseline --fix unfused_optimizer
  stepscope verify train.py --lr 3e-4 --fix autocast --fix compile=max-autotune --fix autocast+compile
  stepscope verify runs/baseline --fix synchronization=after.py
  stepscope verify --fix launch_bound --rounds 5 -m package.train --config small.toml
  stepscope verify --fix list
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from stepscope.api.verification import verify
from stepscope.cli.support.options import add_engine_arguments, chosen, positive, share, typed_engine
from stepscope.cli.support.output import doing, is_terminal, print_answer, tell, write
from stepscope.errors import UsageError

LIST = "list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    add = parser.add_argument
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help="run a module, like python -m")
    about = "a recording, or a script and its arguments"
    add("target", nargs=argparse.REMAINDER, metavar="TARGET …", help=about)


def _add_options(parser: argparse.ArgumentParser) -> None:
    _add_options_anywhere(parser)
    add, allowed = parser.add_argument, "allowed loss difference (default: depends on the fix)"
    warmup = "warm-up steps excluded from timing (default 8, or the recording's)"
    add("--warmup", type=positive, metavar="N", help=warmup)
    add("--clean", type=positive, metavar="N", help="timed steps per run (default 20, or as many as take 3 s)")
    add("--tolerance", type=share, metavar="P%", help=allowed)
    add("--timeout", type=positive, default=1800, metavar="S", help="time limit per run in seconds (default 1800)")
    add_engine_arguments(parser)
    add("-o", "--output", type=Path, metavar="DIR", help="folder for the runs (default: runs/verify-…)")
    add("--yes", action="store_true", help="run the command of a recording without asking")


def _add_options_anywhere(parser: argparse.ArgumentParser) -> None:
    """Add the options that may also follow a script's name."""
    add, pairs = parser.add_argument, "pairs of runs, without and with the fix (default 4)"
    fix = "fix to test, or NAME=COPY.py: a copy that you changed; may be repeated"
    add("--fix", action="append", default=[], metavar="ID", help=fix)
    add("--rounds", type=positive, default=4, metavar="N", help=pairs)
    add("--json", action="store_true", help="print JSON instead of text (docs/verify.md)")


def main(arguments: argparse.Namespace) -> int:
    words = _own_options(arguments)
    if LIST in arguments.fix:
        from stepscope.cli.list import fix_lines, fixes, text_of

        write([text_of(fixes(), fix_lines), "\n"])
        return 0
    if not words:
        raise UsageError("name a recording or a script: stepscope verify runs/baseline --fix autocast")
    with doing("verify") as show:
        verification = verify(
            words[0],
            *words[1:],
            is_module=bool(arguments.module),
            **chosen(arguments, "fix", "rounds", "warmup", "clean", "tolerance", "output"),
            timeout_s=arguments.timeout,
            **typed_engine(arguments),
            yes=arguments.yes or (_ask if is_terminal(sys.stdin) and is_terminal(sys.stderr) else False),
            on_line=show,
            warn=lambda warning: tell(f"stepscope verify: {warning}"),
        )
    print_answer(verification, arguments.json)
    return verification.exit_code


def _ask(command: str) -> bool:
    tell(f"This recording names the command  {command}\nRun it now, several times? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class _Rest(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. Run `stepscope verify --help` for all options")


def _own_options(arguments: argparse.Namespace) -> list[str]:
    """Return TARGET and its arguments; Stepscope's options that follow it are read into `arguments`."""
    words: list[str] = arguments.module or arguments.target
    if words[:1] in ([], ["--"]):
        return words[1:]
    parser = _Rest(add_help=False, allow_abbrev=False)
    if not arguments.module and Path(words[0]).is_dir():
        _add_options(parser)
        parser.parse_args(words[1:], arguments)  # a recording has no arguments
        return words[:1]
    _add_options_anywhere(parser)
    end = words.index("--") if "--" in words else len(words)
    _, theirs = parser.parse_known_args(words[1:end], arguments)
    return [words[0], *theirs, *words[end + 1 :]]
