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
import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stepscope.cli.numbers import positive
from stepscope.cli.output import print_result, tell, write
from stepscope.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from stepscope.analysis.verified import Verification
    from stepscope.findings.fixes import Chosen
    from stepscope.sweep.rerun import Command
    from stepscope.trace.recording import Recording

LIST = "list"
ANYWHERE = ("--fix", "--rounds", "--json")
"""Options that are Stepscope's also behind a script's name."""
RESULT_FILE = "verify.json"
RESTLESS_SHARE = 0.1
"""How far the medians of runs without any fix may be apart before it is said."""


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
    from stepscope.findings.fixes import parse_fix

    words = _own_options(arguments)
    if LIST in arguments.fix:
        from stepscope.cli.list import fixes_text

        write([fixes_text(), "\n"])
        return 0
    if not words:
        raise UsageError("name a recording or a script: stepscope verify runs/baseline --fix autocast")
    if not arguments.fix:
        raise UsageError("name a fix: --fix ID (stepscope list fixes says which there are)")
    if arguments.warmup < 5:
        raise UsageError(f"--warmup is {arguments.warmup}: a fix is made in the third step, so 5 are the least")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("a script is run again: pip install torch")
    chosen = [parse_fix(text) for text in dict.fromkeys(arguments.fix)]
    verification = _verify(words, chosen, arguments)

    def to_text(colour: bool, width: int) -> str:
        from stepscope.report.verify_text import verify_text

        return verify_text(verification, colour, width)

    print_result(verification.to_json, to_text, arguments.json)
    return verification.exit_code


def _verify(words: list[str], chosen: list[Chosen], arguments: argparse.Namespace) -> Verification:
    """Run everything, and write the answer beside the recordings."""
    from stepscope.analysis.verification import medians_ns, step_ns, verify
    from stepscope.analysis.verified import Plan, Verification
    from stepscope.cli.verify_runs import environment_changes, expected_gains, run_all
    from stepscope.sweep.rerun import Options, recorded_command, script_command
    from stepscope.trace.recording import RECORDING_FILE, read_recording

    path = Path(words[0])
    recording: Recording | None = None
    warnings: list[str] = []
    if not arguments.module and (path / RECORDING_FILE).is_file():
        recording = read_recording(path)
        command, warnings = recorded_command(path, recording.facts)
    else:
        command = script_command(words, bool(arguments.module))
    for warning in warnings:
        tell(f"stepscope verify: {warning}")
    folder = _folder(arguments.output, command)
    plans = [
        Plan(
            each.text,
            each.arithmetic,
            [fix.lowers_to for fix in each.fixes if fix.lowers_to is not None],
            arguments.tolerance,
        )
        for each in chosen
    ]
    options = Options(warmup=arguments.warmup, clean=arguments.clean, timeout_s=arguments.timeout)
    before, after = run_all(command, plans, folder, options, arguments.rounds)
    first = before[0].recording
    assert first is not None
    environment = first.facts.get("environment") or {}
    warnings += environment_changes(recording, first)
    expected = expected_gains(path, recording, environment.get("device_name"), chosen)
    medians = medians_ns(before)
    apart_share = max(medians) / min(medians) - 1
    if apart_share > RESTLESS_SHARE:
        warnings.append(
            f"runs of the same script are {apart_share:.0%} apart: the machine is not at rest; --rounds "
            f"{2 * arguments.rounds} shows smaller gains, a quiet machine more of them"
        )
    verification = Verification(
        command=command.text,
        folder=str(folder),
        device_name=environment.get("device_name"),
        torch=environment.get("torch"),
        num_rounds=arguments.rounds,
        step_ns=step_ns(before),
        apart_share=apart_share,
        fixes=tuple(verify(plan, before, after[plan.fix], expected.get(plan.fix)) for plan in plans),
        warnings=tuple(warnings),
    )
    (folder / RESULT_FILE).write_text(json.dumps(verification.to_json(), indent=1) + "\n", encoding="utf-8")
    return verification


def _folder(given: Path | None, command: Command) -> Path:
    """Where the runs go: absolute, as the script runs in a folder of its own."""
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise UsageError(f"{given} is not empty: name another folder with -o")
        return given.absolute()
    word = next((word for word in command.words if word != "-m"), "script")
    name = f"verify-{Path(word).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = Path("runs") / name
    number = 1
    while found.exists():
        number += 1
        found = Path("runs") / f"{name}-{number}"
    return found.absolute()


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
