"""Measure a training script without touching it.

Runs the script as Python would, finds its steps, and times them: warm-up, clean
timing, a trace window, a memory and FLOPs window, then the rest untouched. Prints
the card at the end. The script's own output, exceptions and exit code are its own.

examples:
  stepscope run train.py --lr 3e-4
  stepscope run -o runs/baseline --exit-after train.py
  stepscope run -m mypackage.train --config small.toml
  torchrun --nproc-per-node 8 -m stepscope run -o runs/ddp train.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stepscope.errors import MissingDependencyError, StepscopeError, UsageError

if TYPE_CHECKING:
    from stepscope.recorder.fixes.applied import AppliedFixes
    from stepscope.recorder.launch import Program
    from stepscope.recorder.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the recording's folder (default: runs/…)")
    parser.add_argument("--force", action="store_true", help="replace a recording that is already there")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="steps kept apart first (default 5)")
    parser.add_argument("--clean", type=int, default=20, metavar="N", help="steps timed clean (default 20)")
    parser.add_argument("--trace", type=int, default=2, metavar="N", help="steps traced, 0 for none (default 2)")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="trace windows, each with a file of its own (default 1)"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="say who allocated what (file and line); on CUDA also keep the allocator's history in snapshot.pickle",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory and FLOPs window")
    parser.add_argument("--exit-after", action="store_true", help="stop the script after the last window")
    parser.add_argument("--tokens-per-step", type=int, metavar="N", help="instead of inferring it from the input")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the card as JSON on standard output; the script's own goes to stderr",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress lines, and no card but --json's")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT …", help="the script and its arguments")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.recorder import launch
    from stepscope.recorder.windows import Windows

    words = arguments.module or arguments.script
    if not words:
        raise UsageError("name a script: stepscope run train.py, or a module: stepscope run -m package.train")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")
    try:
        windows = Windows(
            warmup=arguments.warmup,
            clean=arguments.clean,
            trace=arguments.trace,
            repeat=arguments.repeat,
            memory=0 if arguments.no_memory else 1,
        )
        if arguments.memory and arguments.no_memory:
            raise ValueError("--memory and --no-memory: take one of them")
        if windows.warmup < 2:
            raise ValueError("--warmup must be at least 2: in the first two steps the model is found")
        if arguments.tokens_per_step is not None and arguments.tokens_per_step <= 0:
            raise ValueError(f"--tokens-per-step is {arguments.tokens_per_step}: it must be positive")
    except ValueError as error:
        raise UsageError(str(error)) from None

    run = _Run(arguments, windows)
    launch.AfterImport("torch", after=run.torch_is_here)
    try:
        load = launch.load_module if arguments.module else launch.load_script
        program = load(words[0], words[1:])
        run.prepare(program)
    except ValueError as error:
        raise UsageError(str(error)) from None
    card_stream = _send_output_to_stderr() if arguments.json else sys.stdout
    if "torch" in sys.modules:
        run.torch_is_here()

    outcome: BaseException | None = None
    pid = os.getpid()
    try:
        launch.run_program(program)
    except BaseException as error:
        outcome = error
    if os.getpid() == pid:  # and not a forked child that comes to its end here
        _flush()
        run.finish(outcome)
        if arguments.json or not arguments.quiet:
            _show(run.folder, arguments.json, card_stream)
    if outcome is not None:
        launch.raise_as_script(outcome, program.code)
    return 0


class _Run:
    """One recording from the command line: exists before torch does."""

    def __init__(self, arguments: argparse.Namespace, windows: Any) -> None:
        self._arguments = arguments
        self._windows = windows
        self._facts: dict[str, Any] = {}
        self._session: Session | None = None
        self._fix: str | None = None
        self._fixes: AppliedFixes | None = None
        self.folder = Path()

    def prepare(self, program: Program) -> None:
        """Make the folder and write down what is going to run; ValueError when it cannot be written."""
        from stepscope.recorder import files, fixes
        from stepscope.recorder.origin import file_hash, run_facts

        self._fix = os.environ.pop(fixes.VARIABLE, None)  # of `stepscope verify`; no concern of the script's
        rank = int(os.environ.get("RANK", "0"))
        # Absolute, for a script that changes its working directory.
        self.folder = (self._arguments.output or _default_folder(program.name)).absolute()
        if rank:
            self.folder = self.folder / f"rank{rank}"
        files.prepare_folder(self.folder, self._arguments.force, keep_ranks="RANK" in os.environ)
        self._facts = run_facts(
            program.argv,
            self._windows,
            self._arguments.tokens_per_step,
            Path(program.path_entry),
            module=bool(self._arguments.module),
            exit_after=self._arguments.exit_after,
            program=(self._arguments.module or self._arguments.script)[0],
            sha256=file_hash(Path(program.file)),
        )
        self._write(files.STATUS_INTERRUPTED)

    def torch_is_here(self) -> None:
        """Begin to record: the script has just imported torch."""
        if self._session is not None or not self._facts:
            return
        from stepscope.recorder.session import Session

        if self._fix is not None:
            from stepscope.recorder.fixes.applied import AppliedFixes

            self._fixes = AppliedFixes(self._fix)
        self._session = Session(
            self.folder,
            windows=self._windows,
            facts=self._facts,
            tokens_per_step=self._arguments.tokens_per_step,
            exit_after=self._arguments.exit_after,
            memory_in_full=self._arguments.memory,
            is_script=True,
            on_roots=None if self._fixes is None else self._fixes.use_roots,
            progress=self._tell,
        )
        self._session.start()

    def finish(self, outcome: BaseException | None) -> None:
        """Write the last words of the recording."""
        from stepscope.recorder import files

        status = files.STATUS_FINISHED
        facts: dict[str, Any] = {
            "exit_code": 0,
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if isinstance(outcome, KeyboardInterrupt):
            status, facts["exit_code"] = files.STATUS_INTERRUPTED, 130
        elif isinstance(outcome, SystemExit):
            code = outcome.code
            facts["exit_code"] = code if isinstance(code, int) else int(code is not None)
            status = files.STATUS_FAILED if facts["exit_code"] else files.STATUS_FINISHED
        elif outcome is not None:
            status, facts["exit_code"] = files.STATUS_FAILED, 1
            facts["exception"] = f"{type(outcome).__name__}: {outcome}"[:500]
        processes = sys.modules.get("multiprocessing.process")
        facts["num_child_processes"] = next(processes._process_counter) - 1 if processes else 0
        if self._fixes is not None:
            facts["fixes"] = self._fixes.finish()
        if self._session is not None:
            self._session.close(status, error=outcome, **facts)
        else:
            self._facts.update(facts)
            self._write(status)

    def _write(self, status: str) -> None:
        from stepscope.recorder import files

        facts = {**self._facts, "schema_version": files.SCHEMA_VERSION, "status": status}
        files.write_json(self.folder / files.RECORDING_FILE, facts)

    def _tell(self, line: str) -> None:
        if self._arguments.quiet or int(os.environ.get("RANK", "0")) or sys.stderr is None:
            return
        try:
            print(f"stepscope: {line}", file=sys.stderr, flush=True)
        except (OSError, ValueError, AttributeError):
            pass  # the script has closed or replaced it, or its reader is gone


def _default_folder(name: str) -> Path:
    if "RANK" in os.environ:  # every rank must come to the same name: they share a parent and a day
        return Path("runs") / f"{name}-{time.strftime('%Y%m%d')}-{os.getppid()}"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _send_output_to_stderr() -> TextIO:
    """Keep standard output for the JSON: what the script prints goes to standard error."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the script may have closed it: that is its affair


def _show(folder: Path, as_json: bool, stream: TextIO) -> None:
    from stepscope.api import read
    from stepscope.cli.support.output import print_card

    if int(os.environ.get("RANK", "0")):
        return
    try:
        print_card(read(folder), as_json, stream)
        stream.flush()
    except (StepscopeError, OSError, ValueError) as error:
        print(f"stepscope: the card could not be shown: {error}", file=sys.__stderr__)
