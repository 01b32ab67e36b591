# PYTHON_ARGCOMPLETE_OK
"""The `stepscope` command: finds the verb, runs it, turns a user's mistake into one line."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import NoReturn

from stepscope.cli.support.output import EXIT_INTERRUPTED, tell
from stepscope.errors import StepscopeError
from stepscope.formatting import safe
from stepscope.version import __version__

# A verb's module is imported only when that verb runs, so `--help` never pays for torch.
GROUPS = {
    "for your training script": {
        "run": "measure a training script without editing it",
        "trigger": "take a trace or a memory window from a running job",
        "watch": "watch a run that goes on, in the terminal or a page",
        "improve": "try what makes it faster, and keep what pays",
        "verify": "measure whether a fix pays off: step time and losses",
    },
    "for a model: a built-in workload, a config or your own function": {
        "plan": "predict memory use and minimum step time without a GPU",
        "bench": "measure a grid of configurations",
        "tune": "search for the fastest configuration that fits",
        "study": "run a complete investigation and write its report",
    },
    "for a file: a recording, a trace or a sweep (default: the latest run)": {
        "show": "summarize a run, trace, sweep or memory snapshot",
        "analyze": "break down a trace: time, memory, compiler, SQL",
        "diagnose": "find problems, what they cost and how to fix them",
        "compare": "test whether two runs differ, and show where",
        "report": "write an HTML page, Markdown, or tables and charts",
        "gather": "collect the ranks of several hosts into one recording",
        "log": "log to MLflow, W&B, TensorBoard or trackio",
        "export": "export a trace to Perfetto, speedscope, CSV or Parquet",
    },
    "for this machine": {
        "demo": "measure a built-in script, and open its page",
        "list": "list workloads, rules, fixes and studies",
        "doctor": "show what Stepscope can measure here",
        "mcp": "serve recordings and traces to a coding agent",
    },
}
VERBS = {name: text for verbs in GROUPS.values() for name, text in verbs.items()}
CHECKS = {"compile": "bench_compile", "dtypes": "bench_dtypes", "precision": "bench_precision"}
"""What `stepscope bench --check` can be, and the module of each."""
SQL = "analyze --sql"
RENAMED = {
    "card": "show",
    "sql": SQL,
    "whatif": "diagnose --scale",
    "compile-check": "bench --check compile",
    "audit": "bench --check dtypes",
    "precision": "bench --check precision",
}
EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            options = [option for action in self._actions for option in action.option_strings]
            message += f".{_did_you_mean(unknown.split()[0].partition('=')[0], options)}"
        end = "" if message.endswith((".", "?")) else "."
        self.exit(EXIT_USAGE, f"{self.prog}: {message}{end} Run `{self.prog} --help` for all options.\n")


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if not arguments:
        _parser().print_help()
        return EXIT_USAGE
    name = arguments[0]
    if name not in VERBS:
        if name.startswith("-"):
            _parser().parse_args(arguments[:1])  # --help and --version; else one line
        instead = RENAMED.get(name)
        hint = f" Use `stepscope {instead}`." if instead else _did_you_mean(name, VERBS)
        tell(f"stepscope: {safe(name, 60)!r} is not a verb.{hint} Run `stepscope --help` for all verbs.")
        return EXIT_USAGE
    try:
        name, module, rest = _find(arguments)
        exit_code: int = module.main(verb_parser(name, module).parse_args(rest))
        return exit_code
    except StepscopeError as error:
        # A message may contain file names, and those can contain anything.
        tell(f"stepscope {name}: {safe(error, 1000)}")
        return EXIT_USAGE
    except PermissionError as error:
        if name == "run":
            raise  # it may be the script's
        tell(f"stepscope {name}: {safe(error.filename or 'a file', 1000)} cannot be opened: {error.strerror}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        if name == "run":
            raise  # it belongs to the script
        tell(f"stepscope {name}: interrupted")
        return EXIT_INTERRUPTED


def verb_parser(name: str, module: ModuleType) -> Parser:
    """Return the parser of one verb, with the defaults that pyproject.toml sets."""
    parser = Parser(
        prog=f"stepscope {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    from stepscope.cli.support.settings import set_defaults

    set_defaults(parser, "sql" if name == SQL else name.split()[0])
    return parser


def _find(arguments: list[str]) -> tuple[str, ModuleType, list[str]]:
    """Return the verb's name, its module and its arguments.

    `bench --check X` and `analyze --sql` have modules of their own.
    """
    name, *rest = arguments
    if name == "analyze" and "--sql" in rest:
        place = rest.index("--sql")
        return SQL, importlib.import_module("stepscope.cli.analyze_sql"), rest[:place] + rest[place + 1 :]
    for place, word in enumerate(rest if name == "bench" else ()):
        option, equals, value = word.partition("=")
        if option == "--check":
            value = value if equals else "".join(rest[place + 1 : place + 2])
            if value not in CHECKS:
                raise StepscopeError(f"--check must be one of {', '.join(CHECKS)}")
            module = importlib.import_module(f"stepscope.cli.checks.{CHECKS[value]}")
            return f"bench --check {value}", module, rest[:place] + rest[place + (1 if equals else 2) :]
    return name, importlib.import_module(f"stepscope.cli.{name}"), rest


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    groups = "\n\n".join(
        "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in verbs.items())])
        for title, verbs in GROUPS.items()
    )
    parser = Parser(
        prog="stepscope",
        usage="stepscope VERB …",
        description="Find where the time in a PyTorch training step goes, how to reduce it, and whether a fix works.",
        epilog=f"{groups}\n\nRun `stepscope VERB --help` for the options of one verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stepscope {__version__}")
    return parser


def _complete() -> None:
    """Answer the shell's request for completions, if argcomplete is installed."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        return
    parser = argparse.ArgumentParser(prog="stepscope")
    verbs = parser.add_subparsers()
    typed = os.environ.get("COMP_LINE", "").split()[1:2]
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text)
        if typed == [name]:
            importlib.import_module(f"stepscope.cli.{name}").add_arguments(verb)
    argcomplete.autocomplete(parser)
