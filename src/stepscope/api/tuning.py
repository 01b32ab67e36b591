"""`stepscope.tune`: a search for the fastest configuration that fits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stepscope.api.sweeps import axes_of, place_of, positive, write_tables
from stepscope.errors import StepscopeError, UsageError, need_torch

if TYPE_CHECKING:
    from stepscope.analysis.comparison.tuning import Tuning
    from stepscope.sweep.engines.start import Where
    from stepscope.sweep.grid import Axes, Point
    from stepscope.sweep.results import Place
    from stepscope.sweep.tuning.descent import Search
    from stepscope.sweep.tuning.space import Space

TUNE_FILE = "tune.json"
WARMUP, STEPS = 2, 8


def tune(
    workload: str,
    *,
    preset: str | None = None,
    set: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dtype: str | Sequence[str] | None = None,
    compile: str | Sequence[str] | None = None,
    sdpa: str | Sequence[str] | None = None,
    optimizer: str | Sequence[str] | None = None,
    device: str | None = None,
    over: Sequence[str] = (),
    memory_budget: str | int | None = None,
    minutes: float = 10.0,
    timeout_s: float | None = None,
    start: str | None = None,
    on: str = "local",
    engine: Mapping[str, Any] | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Callable[[float], None] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Tuning:
    """Return the fastest correct configuration that fits, like `stepscope tune`.

    One value of a knob holds it, a list of values is searched; `over` limits the search to some knobs. A point may
    not need more than `memory_budget` ("40GiB"). The search ends after `minutes`. All rows are written to `output`
    (default: a new folder in runs/). `progress` receives the share of the time spent, `on_line` one line per point.
    `on="ray"` or `"slurm"` runs the points on a node of a cluster, with the settings in `engine` (docs/engines.md).

    >>> tuning = tune("cs336", preset="tiny", set={"seq_len": 64}, device="cpu", minutes=3)  # doctest: +SKIP
    >>> tuning.best.turned, tuning.gain.speedup  # doctest: +SKIP
    """
    need_torch()
    from stepscope.sweep.engines.start import where_of
    from stepscope.sweep.memory import bytes_of

    tuning = run_tuning(
        workload,
        axes_of(preset, set, mode=mode, dtype=dtype, compile=compile, sdpa=sdpa, optimizer=optimizer, device=device),
        [over] if isinstance(over, str) else over,
        bytes_of(memory_budget),
        positive(minutes, "minutes"),
        None if timeout_s is None else positive(timeout_s, "timeout_s"),
        place_of("tune", workload, output, resume),
        where=where_of(on, engine, start),
        progress=progress,
        on_line=on_line,
    )
    if tuning.defaults is None:
        raise StepscopeError(f"The defaults did not finish in {minutes:g} minutes. Pass a larger `minutes`")
    return tuning


def run_tuning(
    workload: str,
    axes: Axes,
    over: Sequence[str],
    budget_bytes: int | None,
    minutes: float,
    timeout_s: float | None,
    place: Place,
    *,
    where: Where | None = None,
    progress: Callable[[float], None] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Tuning:
    """Return the tuning of a workload; its rows, tables and tune.json are written to the place."""
    from stepscope.analysis.comparison.significance import difference
    from stepscope.analysis.comparison.tuning import tuning_of
    from stepscope.document.tuning import trial_line
    from stepscope.planner.forecast import Forecaster
    from stepscope.recorder.files import write_json
    from stepscope.rows import SWEEP_FILE
    from stepscope.sweep.engines.start import Where
    from stepscope.sweep.results import facts_of
    from stepscope.sweep.runner import Options, Runner
    from stepscope.sweep.tuning.descent import Search
    from stepscope.sweep.tuning.trials import Clock, Trials

    space = _space(workload, axes, over)
    asked = {"defaults": space.base.hash, "budget_bytes": budget_bytes}
    is_there = place.resume and (place.folder / SWEEP_FILE).exists()
    if is_there and facts_of(place.folder).get("tune") != asked:
        raise UsageError(f"{place.folder} holds a tuning with other values or another budget: name another folder")
    defaults = {**space.base.config, **space.base.run}
    # On a CPU the limit would apply to the whole process, and a plan covers tensors only.
    limit = budget_bytes if space.base.run["device"] == "cuda" else None
    clock = Clock(60 * minutes)

    def is_faster(before: list[float], after: list[float], share: float) -> bool:
        found = difference(before, after)
        return found.ratio * (1 + share) < 1 and found.is_significant

    def on_row(row: dict[str, Any]) -> None:
        if on_line is not None:
            on_line(f"{_minutes(clock.spent_s)} of {_minutes(clock.whole_s)}  {trial_line(row, defaults)}")

    def on_begin() -> None:
        if progress is not None:
            progress(min(1.0, clock.spent_s / clock.whole_s))

    with place.open(tune=asked) as results:
        forecaster = Forecaster(space.workload, budget_bytes, results.facts["environments"])
        device = str(space.base.run["device"])
        with (where or Where()).open(place.folder, device, on_line, keeps_node=True) as server:
            trials = Trials(
                space,
                Runner(space.workload, server, results, Options(memory_limit_bytes=limit)),
                results,
                clock,
                forecast=forecaster,
                budget_bytes=budget_bytes,
                timeout_s=timeout_s,
                on_begin=on_begin,
                on_row=on_row,
            )
            search = Search(space, trials, is_faster)
            try:
                search.run()
            except KeyboardInterrupt:
                search.interrupt()
        log = {
            **search.to_json(),
            "workload": workload,
            "preset": space.base.preset,
            "budget_bytes": budget_bytes,
            "seconds": round(clock.spent_s, 1),
            "limit_s": clock.whole_s,
            "commands": _commands(space, search, workload, budget_bytes),
            "notes": list(forecaster.notes),
        }
        tuning = tuning_of(results.rows, results.facts["environments"], log)
        with results.writing():
            write_json(results.folder / TUNE_FILE, asdict(tuning))
        if results.rows:
            write_tables(results, str(results.facts["commands"][-1]))
    return tuning


def _space(name: str, axes: Axes, over: Sequence[str]) -> Space:
    from stepscope.analysis.comparison.significance import MIN_SAMPLES
    from stepscope.sweep.grid import Grid, default_device, find_workload
    from stepscope.sweep.tuning.space import search_space

    workload = find_workload(name)
    grid = Grid(workload, {"warmup": WARMUP, "steps": STEPS, "device": default_device()})
    space = search_space(workload, grid, axes, over)
    if int(space.base.run["steps"]) < MIN_SAMPLES:
        raise UsageError(f"steps={space.base.run['steps']}: comparing points needs at least {MIN_SAMPLES} samples")
    if not space.axes:
        raise UsageError(f"{workload.name} has no knob to search here: name one with --set knob=v1,v2")
    return space


def _commands(space: Space, search: Search, workload: str, budget_bytes: int | None) -> dict[str, str]:
    """Return the command that measures each point again, by the point's hash."""
    from stepscope.sweep.run_knobs import RUN_KNOBS

    preset = space.base.preset
    usual = {knob.name: knob.default for knob in (*space.workload.knobs(), *RUN_KNOBS)}
    usual |= space.workload.presets[preset] if preset is not None else {}

    def command(point: Point) -> str:
        words = ["stepscope", "bench", workload, *(["--preset", preset] if preset is not None else [])]
        for knob, value in point.config.items():
            if value != usual[knob]:
                words += ["--set", f"{knob}={_typed(value)}"]
        for knob, value in point.run.items():
            if value != usual[knob] or knob == "device":
                words += [f"--{knob.replace('_', '-')}", _typed(value)]
        if budget_bytes is not None and point.run["device"] == "cuda":
            words += ["--memory-limit", str(budget_bytes)]
        return shlex.join(words)

    return {name: command(point) for name, point in search.points.items()}


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
