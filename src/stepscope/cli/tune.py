"""Search the knobs of a workload for the most tokens a second inside a memory budget.

One knob after the other is turned around the best point so far: how things are computed (attention, dispatch,
loss …), optimizer, attention back end, batch, dtype, checkpointing, compiler. Each point runs in a process of its
own, passes the gate, and its loss must be that of the plainest variant. Points whose plan says that they do not fit
are not run. At the end the best, the next best and the defaults are measured again in turns.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.
One value of a knob holds it, several are searched. The exit code is 0 when a point is right, 1 when none is, 2 for a
mistake.

examples:
  stepscope tune cs336 --preset tiny --set seq_len=64 --device cpu --minutes 3
  stepscope tune hydra --preset 100m --memory-budget 40GiB --minutes 20
  stepscope tune cs336 --preset small --dtype autocast_bf16 --over attention,batch,compile
  stepscope tune train.py:build --set attention=plain,fast --set batch=16
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.bench import default_device, default_folder, fill_closed_streams, resume_command
from stepscope.cli.support.output import print_document, tell
from stepscope.cli.support.points import RUN_FLAGS, add_point_arguments, find_workload, typed_axes
from stepscope.errors import MissingDependencyError, UsageError
from stepscope.formatting import safe
from stepscope.version import __version__

if TYPE_CHECKING:
    from stepscope.analysis.comparison.tuning import Tuning
    from stepscope.sweep.results import Results
    from stepscope.sweep.tuning.descent import Search
    from stepscope.sweep.tuning.space import Space
    from stepscope.sweep.tuning.trials import Clock

FLAGS = ("mode", "dtype", "compile", "sdpa", "optimizer", "device")
WARMUP, STEPS = 2, 8
TUNE_FILE = "tune.json"
EXIT_NOTHING_RIGHT = 1
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    add_point_arguments(parser, "what to tune", FLAGS)
    parser.add_argument("--over", metavar="A,B", help="search only these knobs")
    parser.add_argument("--memory-budget", metavar="MEMORY", help="no point may need more: 40GiB (default: all)")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="stop after (default 10)")
    parser.add_argument("--timeout", type=float, metavar="S", help="kill a point after (default: see docs/tune.md)")
    parser.add_argument("--start", choices=("fork", "spawn"), help="how points' processes start (default: fork)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the folder of all rows (default: runs/…)")
    parser.add_argument("--resume", action="store_true", help="go on with a tuning that was stopped")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    parser.add_argument("--quiet", action="store_true", help="no lines while it runs")


def main(arguments: argparse.Namespace) -> int:
    """Run the tuning; 0 when a point is right."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")
    from stepscope.sweep.memory import parse_bytes

    fill_closed_streams()
    for name in ("minutes", "timeout"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} {value:g}: must be more than 0, and an end")
    try:
        budget = parse_bytes(arguments.memory_budget) if arguments.memory_budget else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _run(_space(arguments), budget, arguments)


def _space(arguments: argparse.Namespace) -> Space:
    from stepscope.analysis.comparison.significance import MIN_SAMPLES
    from stepscope.sweep.grid import Grid
    from stepscope.sweep.tuning.space import search_space

    workload = find_workload(arguments)
    grid = Grid(workload, {"warmup": WARMUP, "steps": STEPS, "device": default_device()})
    over = [name.strip() for name in (arguments.over or "").split(",") if name.strip()]
    space = search_space(workload, grid, typed_axes(grid, arguments, FLAGS), over)
    if int(space.base.run["steps"]) < MIN_SAMPLES:
        raise UsageError(f"steps={space.base.run['steps']}: two points are compared by {MIN_SAMPLES} samples or more")
    if not space.axes:
        raise UsageError(f"{workload.name} has no knob to search here: name one with --set knob=v1,v2")
    return space


def _run(space: Space, budget: int | None, arguments: argparse.Namespace) -> int:
    from stepscope.document.tuning import tuning_document
    from stepscope.sweep.results import Results
    from stepscope.sweep.tuning.descent import INTERRUPTED, TIME
    from stepscope.sweep.tuning.trials import Clock

    folder = arguments.output or default_folder("tune", arguments.workload)
    facts = {"command": shlex.join(["stepscope", *sys.argv[1:]]), "working_folder": str(Path.cwd())}
    asked = {"defaults": space.base.hash, "budget_bytes": budget}
    _check_same(folder, asked, arguments.resume)
    clock = Clock(60 * arguments.minutes)
    with Results(
        folder, {**facts, "stepscope": __version__, "tune": asked}, arguments.resume, resume_command(folder)
    ) as results:
        tuning = _tuned(space, budget, results, clock, arguments)
        command = str(results.facts["commands"][-1])
        _write(results, tuning, command)
    if tuning.defaults is None:
        tell(
            f"stepscope tune: the defaults were not done in {arguments.minutes:g} minutes: --minutes gives them more"
        )
        return EXIT_NOTHING_RIGHT
    print_document(lambda: tuning_document(tuning), lambda: asdict(tuning), arguments.json)
    tell(f"stepscope: all rows in {folder}/results.jsonl, .csv, .md; the answer in {folder}/{TUNE_FILE}")
    if tuning.stopped in (TIME, INTERRUPTED):
        said = "the time was over" if tuning.stopped == TIME else "interrupted"
        tell(f"stepscope: {said}; go on with  {resume_command(folder)}")
    if tuning.stopped == INTERRUPTED:
        return EXIT_INTERRUPTED
    return 0 if tuning.best is not None else EXIT_NOTHING_RIGHT


def _tuned(space: Space, budget: int | None, results: Results, clock: Clock, arguments: argparse.Namespace) -> Tuning:
    from stepscope.analysis.comparison.significance import difference
    from stepscope.cli.support.progress import Progress
    from stepscope.cli.tune_forecast import Forecaster
    from stepscope.document.tuning import trial_line, tuning_from
    from stepscope.sweep.runner import Options, Runner
    from stepscope.sweep.server import Server, default_start
    from stepscope.sweep.tuning.descent import Search
    from stepscope.sweep.tuning.trials import Trials

    def is_faster(before: list[float], after: list[float], least: float) -> bool:
        found = difference(before, after)
        return found.ratio * (1 + least) < 1 and found.is_significant

    defaults = {**space.base.config, **space.base.run}
    forecaster = Forecaster(space.workload, budget, results.facts["environments"])
    # On a CPU the limit would be of the whole process, and a plan is of tensors.
    limit = budget if space.base.run["device"] == "cuda" else None
    with (
        Server(arguments.start or default_start()) as server,
        Progress(f"tuning {safe(arguments.workload, 40)}", silent_s=0.0) as progress,
    ):

        def show_time() -> None:
            progress(min(1.0, clock.spent_s / clock.whole_s))

        def on_row(row: dict[str, Any]) -> None:
            if not arguments.quiet:
                progress.clear()
                tell(f"{_minutes(clock.spent_s)} of {_minutes(clock.whole_s)}  {trial_line(row, defaults)}")

        trials = Trials(
            space,
            Runner(space.workload, server, results, Options(memory_limit_bytes=limit)),
            results,
            clock,
            forecast=forecaster,
            budget_bytes=budget,
            timeout_s=arguments.timeout,
            on_begin=show_time,
            on_row=on_row,
        )
        search = Search(space, trials, is_faster)
        try:
            search.run()
        except KeyboardInterrupt:
            search.interrupt()
    log = {
        **search.to_json(),
        "workload": arguments.workload,
        "preset": space.base.preset,
        "budget_bytes": budget,
        "seconds": round(clock.spent_s, 1),
        "limit_s": clock.whole_s,
        "commands": _commands(space, search, arguments.workload, budget),
        "notes": list(forecaster.notes),
    }
    return tuning_from(results.rows, results.facts["environments"], log)


def _write(results: Results, tuning: Tuning, command: str) -> None:
    from stepscope.analysis.comparison.sweeps import sweep_of
    from stepscope.document.sweep_table import records_table, sweep_document
    from stepscope.recorder.files import write_json
    from stepscope.render.write import write_sweep_tables

    with results.writing():
        write_json(results.folder / TUNE_FILE, asdict(tuning))
        if results.rows:
            sweep = sweep_of(results.rows, results.facts["environments"])
            write_sweep_tables(results.folder, sweep_document(sweep, command), records_table(sweep))


def _check_same(folder: Path, asked: dict[str, Any], is_resumed: bool) -> None:
    """UsageError where the folder's rows are answers to another question."""
    from stepscope.sweep.results import SWEEP_FILE, read_facts

    if is_resumed and (folder / SWEEP_FILE).exists() and read_facts(folder).get("tune") != asked:
        raise UsageError(f"{folder} was not begun with these values and this budget: name another folder with -o")


def _commands(space: Space, search: Search, workload: str, budget: int | None) -> dict[str, str]:
    """Point → the command that measures it again."""
    from stepscope.sweep.run_knobs import RUN_KNOBS

    usual = {knob.name: knob.default for knob in (*space.workload.knobs(), *RUN_KNOBS)}
    preset = space.base.preset
    usual |= space.workload.presets[preset] if preset is not None else {}
    commands = {}
    for name, point in search.points.items():
        words = ["stepscope", "bench", workload, *(["--preset", preset] if preset is not None else [])]
        for knob, value in point.config.items():
            if value != usual[knob]:
                words += ["--set", f"{knob}={_typed(value)}"]
        for knob, value in point.run.items():
            flag = knob.replace("_", "-")
            if (value != usual[knob] or knob == "device") and flag in RUN_FLAGS:
                words += [f"--{flag}", _typed(value)]
        if budget is not None and point.run["device"] == "cuda":
            words += ["--memory-limit", str(budget)]
        commands[name] = shlex.join(words)
    return commands


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
