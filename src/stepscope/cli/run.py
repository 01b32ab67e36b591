"""Measure a training script without editing it.

Runs the script as Python would and finds its steps. First come warm-up steps, then timed steps, then a trace window,
then a memory and FLOPs window; after that, only step times are recorded. At the end, prints a summary called the
card. Output, exceptions and exit code are the script's own. Child processes that train are measured too; one
recording holds all ranks. SCRIPT can also be a launcher, such as torchrun. --memory also saves the CUDA allocator's
history to snapshot.pickle.

examples:
  stepscope run train.py --lr 3e-4
  stepscope run -o runs/baseline --exit-after train.py
  stepscope run --log-to tensorboard:logs train.py
  stepscope run -m mypackage.train --config small.toml
  stepscope run -o runs/ddp torchrun --nproc-per-node 8 train.py
  torchrun --nproc-per-node 8 -m stepscope run -o runs/ddp train.py
"""

import argparse
import atexit
import os
import platform
import re
import sys
from collections.abc import Sequence
from os import getpid  # the script may replace what `os` has
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stepscope.cli.support.output import tell
from stepscope.cli.support.program import add_program_arguments
from stepscope.errors import UsageError, need_torch

if TYPE_CHECKING:
    from stepscope.recorder.fixes.applied import AppliedFixes
    from stepscope.recorder.processes.launch import Program
    from stepscope.recorder.processes.options import Options
    from stepscope.recorder.session import Session
    from stepscope.trackers.follow import LiveLog
    from stepscope.trackers.tracker import Target

SLOWEST = "slowest"  # in place of ranks
_OURS = frozenset(["--exit-after", "--no-memory", "--trace-ranks"])  # options that no script is likely to have


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="DIR", help="folder for the recording (default: runs/…)")
    add("--force", action="store_true", help="replace an existing recording")
    add("--resume", action="store_true", help="replace it, but continue its history: a restarted job")
    add("--warmup", type=int, default=5, metavar="N", help="warm-up steps excluded from timing (default 5)")
    add("--clean", type=int, default=20, metavar="N", help="timed steps (default 20)")
    add("--trace", type=int, default=2, metavar="N", help="traced steps, 0 for none (default 2)")
    add("--repeat", type=int, default=1, metavar="N", help="number of trace windows, one file each (default 1)")
    add("--trace-ranks", default="", metavar="R,R", help="ranks that take traces, or slowest (default: all)")
    add("--memory", action="store_true", help="record the source line of every allocation")
    add("--no-memory", action="store_true", help="skip the memory and FLOPs window")
    add("--exit-after", action="store_true", help="stop the script when the measurement is complete")
    free = "with --exit-after: steps after the windows (default: until the throughput is known, 20 or more)"
    add("--free", type=int, metavar="N", help=free)
    add("--inference", action="store_true", help="count each forward pass as a step (no training)")
    add("--tokens-per-step", type=int, metavar="N", help="tokens per step (default: inferred)")
    trackers = "log live: mlflow, wandb, tensorboard, trackio"
    add("--log-to", action="append", default=[], metavar="TRACKER", help=trackers)
    add("--metrics-file", type=Path, metavar="FILE", help="write figures for Prometheus's node_exporter")
    add("--otlp", action="store_true", help="send figures to an OpenTelemetry collector")
    add("--when", action="append", default=[], metavar="CONDITION", help="take more windows: 'step_time > 1.5x'")
    add("--limit", type=int, metavar="N", help="most windows for each --when (default 3)")
    add("--json", action="store_true", help="print the card as JSON; script output goes to stderr")
    add("--quiet", action="store_true", help="suppress progress output and the card")
    add_program_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the script and print its card; exceptions and the exit code are the script's own."""
    from stepscope.recorder import wall
    from stepscope.recorder.history.conditions import limit_of, parse
    from stepscope.recorder.processes import launch, start
    from stepscope.recorder.processes.imports import AfterImport
    from stepscope.recorder.windows import Windows

    words = arguments.module or arguments.script
    if not words:
        raise UsageError("name a script: stepscope run train.py, or a module: stepscope run -m package.train")
    need_torch()
    for option in _OURS.intersection(words[1:]):
        tell(f"stepscope: {option} is the script's here. For Stepscope, name it first: stepscope run {option} …")
    if arguments.warmup < 2:
        why = "because the model is found in the first two steps"
        raise UsageError(f"--warmup {arguments.warmup}: 2 is the least, {why}")
    if arguments.repeat > 1 and not arguments.trace:
        raise UsageError(f"--repeat {arguments.repeat} repeats the trace window, which --trace 0 leaves out")
    try:
        windows = Windows(
            warmup=arguments.warmup,
            clean=arguments.clean,
            trace=arguments.trace,
            repeat=arguments.repeat,
            free=arguments.free,
            trace_slowest=arguments.trace_ranks == SLOWEST,
            memory=0 if arguments.no_memory else 1,
        )
        for condition in arguments.when:
            parse(condition)
        arguments.limit = limit_of(arguments.limit, arguments.when)
        if not re.fullmatch(rf"(\d{{1,7}}(,\d{{1,7}})*)?|{SLOWEST}", arguments.trace_ranks):
            raise ValueError(f"--trace-ranks {arguments.trace_ranks}: name ranks, such as 0,8,16, or {SLOWEST}")
        if windows.trace_slowest and not windows.clean:
            raise ValueError(f"--trace-ranks {SLOWEST} needs timed steps: leave out --clean 0")
        if arguments.memory and arguments.no_memory:
            raise ValueError("--memory and --no-memory exclude each other")
        if arguments.tokens_per_step is not None and arguments.tokens_per_step <= 0:
            raise ValueError(f"--tokens-per-step is {arguments.tokens_per_step}: it must be positive")
    except ValueError as error:
        raise UsageError(str(error)) from None

    targets = _targets(arguments)
    wall.raise_up()
    run = _Run(arguments, windows, targets)
    end_late, torch_is_here, ended = (
        wall.guarded(launch.own_imports()(each)) for each in (run.end_late, run.torch_is_here, run.ended)
    )
    atexit.register(end_late)  # before multiprocessing registers the function that waits for its processes
    start.cancel()
    AfterImport({"torch": torch_is_here})
    try:
        load = launch.load_module if arguments.module else launch.load_script
        program = load(words[0], words[1:])
    except launch.NotPython:
        launch.run_in_plain_python(["-m", *words] if arguments.module else words)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        run.prepare(program)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except Exception as error:
        wall.failed(error)
    if arguments.json:
        run.print_card_to(_send_output_to_stderr())
    if "torch" in sys.modules:
        torch_is_here()

    outcome: BaseException | None = None
    try:
        launch.run_program(program)
        launch.await_threads()
    except BaseException as error:
        outcome = error
    ended(outcome)
    if getattr(sys.modules.get("stepscope.recorder.trace_window"), "traced_by", None) not in (None, getpid()):
        launch.leave_fork(outcome, program.code)
    if outcome is None:
        return 0
    try:
        launch.raise_as_script(outcome, program.code)
    finally:
        del outcome  # as there


class _Run:
    """One recording from the command line; it exists before torch is imported."""

    def __init__(self, arguments: argparse.Namespace, windows: Any, targets: "Sequence[Target]") -> None:
        self._arguments, self._windows, self._targets = arguments, windows, targets
        self._live_log: LiveLog | None = None
        self._facts: dict[str, Any] = {}
        self._session: Session | None = None
        self._fixes: AppliedFixes | None = None
        self._options: Options | None = None
        self._pid = getpid()
        self._late: list[BaseException | None] = []
        self.folder = Path()
        self.print_card_to(sys.stdout)

    def print_card_to(self, stream: TextIO) -> None:
        from stepscope.recorder.wall import identity

        self._card_stream = stream, identity(stream.fileno()) if stream is not None else None

    def prepare(self, program: "Program") -> None:
        """Make the folder and write what will run; ValueError if it cannot be written."""
        from stepscope.recorder import files, fixes
        from stepscope.recorder.processes.options import Options
        from stepscope.recorder.processes.start import pass_on
        from stepscope.recorder.run_facts import file_hash, run_facts
        from stepscope.user_cache import note_command

        fix = os.environ.pop(fixes.VARIABLE, None)  # set by `stepscope verify`; hidden from the script
        if fix is not None:
            fixes.set_variables(fix)
        words = None if fix is None else fixes.change_words(fix, program.argv)
        rank = int(os.environ.get("RANK", "0"))
        # Absolute, for a script that changes its working directory.
        self.folder = (self._arguments.output or files.default_folder(program.name)).absolute()
        if rank:
            self.folder = self.folder / f"rank{rank}"
        given = self._arguments
        keep_ranks, option = "RANK" in os.environ, ": `-o FOLDER`"
        files.prepare_folder(self.folder, given.force, keep_ranks, resumes=given.resume, option=option)
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
        note_command(self._facts["command"])
        self._write(files.STATUS_INTERRUPTED)
        if self._targets:
            from stepscope.trackers.follow import LiveLog

            self._live_log = LiveLog(self.folder, self._targets, rank)
        self._options = Options(
            folder=self.folder,
            windows=self._windows,
            pid=self._pid,
            rank=rank if "RANK" in os.environ else None,
            tokens_per_step=self._arguments.tokens_per_step,
            exit_after=self._arguments.exit_after,
            inference=self._arguments.inference,
            memory_in_full=self._arguments.memory,
            fix=fix,
            words=words,
            when=tuple(self._arguments.when),
            limit=self._arguments.limit,
            is_quiet=self._arguments.quiet,
            trace_ranks=tuple(int(text) for text in self._arguments.trace_ranks.split(",") if text.isdecimal()),
        )
        pass_on(self._options.to_json())

    def torch_is_here(self) -> None:
        """Start recording: the script has just imported torch."""
        if self._session is not None or self._options is None:
            return
        from stepscope.recorder.processes import child

        if getpid() != self._pid:  # a fork of the script imports torch before the script does
            child.begin(self._options)
            return
        self._fixes = child.watch_forks(self._options)
        self._session = child.session_of(self._options, self._facts, self._fixes, self._tell)
        self._session.start()

    def ended(self, outcome: BaseException | None) -> None:
        """Write how the run ended and show the card; later, if Python itself will wait for child processes."""
        if getpid() != self._pid:  # a forked child that ends here
            if (child := sys.modules.get("stepscope.recorder.processes.child")) is not None:
                child.close(outcome)
            return
        _flush()
        if self._options is None:
            return  # it could not be prepared, and the script ran unmeasured
        if _has_processes():
            self._late.append(outcome)
        else:
            self._end(outcome)

    def end_late(self) -> None:
        """End the run after multiprocessing has waited for its processes."""
        if self._late and getpid() == self._pid:
            self._end(self._late.pop())

    def _end(self, outcome: BaseException | None) -> None:
        from stepscope.recorder.processes import start
        from stepscope.recorder.processes.ending import adopt, ending
        from stepscope.recorder.wall import tell

        start.withdraw()
        status, facts = ending(outcome)
        if self._fixes is not None:
            facts["fixes"] = self._fixes.finish()
        if self._session is not None:
            self._session.close(status, error=outcome, **facts)
        else:
            self._facts.update(facts)
            self._write(status)
        is_there = self.folder.exists()  # else it was deleted, and that was said
        try:
            if is_there:
                adopt(self.folder, self._options is not None and self._options.rank is not None)
        except OSError as error:
            tell(f"the recordings of the processes stay apart: {error}")
        if is_there and (self._arguments.json or not self._arguments.quiet):
            _show(self.folder, self._arguments.json, *self._card_stream)
        if self._live_log is not None:
            self._live_log.end(tell)

    def _write(self, status: str) -> None:
        from stepscope.recorder import files

        process = {"pid": self._pid, "host": platform.node()}
        facts = {**self._facts, "schema_version": files.SCHEMA_VERSION, "status": status, **process}
        files.write_json(self.folder / files.RECORDING_FILE, facts)

    def _tell(self, line: str) -> None:
        from stepscope.recorder.wall import tell

        if not self._arguments.quiet and not int(os.environ.get("RANK", "0")):
            tell(line)


def _targets(arguments: argparse.Namespace) -> "Sequence[Target]":
    """Return what this process logs to while it runs."""
    if not (arguments.log_to or arguments.metrics_file or arguments.otlp):
        return ()
    from stepscope.trackers.follow import targets_of

    rank = int(os.environ.get("RANK", "0"))
    return targets_of(arguments.log_to, arguments.metrics_file, arguments.otlp, rank)


def _has_processes() -> bool:
    """Return whether Python will wait for processes of multiprocessing at its end."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and any(each.is_alive() and not each.daemon for each in processes._children)


def _send_output_to_stderr() -> TextIO:
    """Return standard output, kept for the JSON; what the script prints goes to standard error."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the script may have closed it


def _show(folder: Path, as_json: bool, stream: TextIO, opened_on: tuple[int, int] | None) -> None:
    from stepscope.api import read
    from stepscope.cli.support.output import print_card
    from stepscope.recorder.wall import identity, tell

    if int(os.environ.get("RANK", "0")):
        return
    try:
        if identity(stream.fileno()) != opened_on:
            raise ValueError(f"the script closed or replaced standard output. Run `stepscope show {folder}`")
        print_card(read(folder), as_json, stream)
        stream.flush()
    except Exception as error:
        tell(f"the card could not be shown: {error}")
