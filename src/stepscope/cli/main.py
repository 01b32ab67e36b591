"""The `stepscope` command: finds the verb, runs it, turns a user's mistake into one line."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NoReturn

from stepscope.cli.support.output import tell
from stepscope.errors import StepscopeError
from stepscope.formatting import safe
from stepscope.version import __version__

# One line a verb: its module is imported only when it is the one asked for, so that
# `--help` never pays for torch. The text is what `stepscope --help` shows.
VERBS = {
    "run": "measure a training script without touching it",
    "card": "show the card of a recording again",
    "analyze": "where the time in a trace goes, whoever recorded it",
    "diagnose": "what is wrong with a step, what it costs, what to change",
    "verify": "prove that a fix pays: with and without it, in turns, losses and all",
    "whatif": "what a step would take if these kernels were faster, or gone",
    "sql": "query a trace's tables",
    "export": "a trace for Perfetto, speedscope, CSV or Parquet; a step or a module of it",
    "bench": "run a grid of configurations; every point ends as a row",
    "compile-check": "whether torch.compile computes what eager code does, and what it did on the way",
    "tune": "search a workload's knobs for the most tokens/s inside a memory budget",
    "compare": "whether two runs really differ, and where the difference comes from",
    "report": "one page that shows where a step and its memory went, or what a sweep found",
    "study": "redo a whole investigation: measure, answer its questions, write the report",
    "plan": "memory, verdict and least time of a step, with no GPU",
    "audit": "the dtype of everything in a model, its casts, what stayed in float32 and why",
    "precision": "fp32, tf32, bf16, fp16, autocast: time, memory, exactness, and why",
    "list": "what there is to run, with knobs and parameter counts",
    "doctor": "what this machine has, and what Stepscope can measure on it",
}

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """A mistake is one line; the options are a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} ({self.prog} --help says more)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if not arguments:
        parser.print_help()
        return EXIT_USAGE
    if arguments[0] not in VERBS:
        parser.parse_args(arguments[:1])  # --help, --version, or an error with the right verbs
        return EXIT_USAGE
    try:
        verb = importlib.import_module(f"stepscope.cli.{arguments[0].replace('-', '_')}")
        verb_parser = _Parser(
            prog=f"stepscope {arguments[0]}",
            description=verb.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_arguments(verb_parser)
        exit_code: int = verb.main(verb_parser.parse_args(arguments[1:]))
        return exit_code
    except StepscopeError as error:
        # A message may name files, and a file may be called anything.
        tell(f"stepscope {arguments[0]}: {safe(error, 1000)}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        if arguments[0] == "run":
            raise  # it is the script's own
        tell(f"stepscope {arguments[0]}: interrupted")
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, text in VERBS.items())
    parser = _Parser(
        prog="stepscope",
        description="Where a PyTorch training step goes, what would make it better, and the proof.",
        epilog=f"verbs:\n{verbs}\n\nstepscope VERB --help says more about one verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stepscope {__version__}")
    parser.add_argument("verb", choices=list(VERBS), metavar="VERB", help="one of the verbs below")
    return parser
