"""`stepscope.bench` and `stepscope.plan`: a grid of configurations, measured or predicted without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError, need_torch

if TYPE_CHECKING:
    from stepscope.analysis.comparison.sweeps import SweepSummary
    from stepscope.planner.plan import Plan
    from stepscope.sweep.engines.engine import Engine
    from stepscope.sweep.engines.start import Where
    from stepscope.sweep.grid import Axes, Point
    from stepscope.sweep.results import Place, Results
    from stepscope.sweep.runner import Options
    from stepscope.workloads.workload import Workload


def bench(
    workload: str,
    *,
    preset: str | Sequence[str] | None = None,
    set: Mapping[str, Any] | None = None,
    mode: str | Sequence[str] | None = None,
    dtype: str | Sequence[str] | None = None,
    compile: str | Sequence[str] | None = None,
    sdpa: str | Sequence[str] | None = None,
    optimizer: str | Sequence[str] | None = None,
    bf16_reduction: str | Sequence[str] | None = None,
    warmup: int | None = None,
    steps: int | None = None,
    seed: int | Sequence[int] | None = None,
    device: str | Sequence[str] | None = None,
    paired: bool = False,
    grid: str | os.PathLike[str] | None = None,
    max_batch: bool = False,
    memory_limit: str | int | None = None,
    timeout_s: float = 600.0,
    trace: bool = False,
    start: str | None = None,
    on: str = "local",
    engine: Mapping[str, Any] | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Callable[[float], None] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> SweepSummary:
    """Return the figures of every point of a grid, like `stepscope bench`.

    Each point runs in a process of its own; one that runs out of memory, crashes or computes a wrong result is a
    point with that status. `workload` is a name of `stepscope list workloads`, `hf:config.json` or `file.py:build`.
    `set` maps knobs to a value or a list of values; lists multiply, or go in pairs with `paired`. `grid` names a file
    with points instead. `max_batch` searches the largest batch that fits in `memory_limit`. All rows are written to
    `output` (default: a new folder in runs/); `resume` continues an interrupted sweep. `progress` receives the share
    of points done, `on_line` one line per point. `on="ray"` or `"slurm"` runs the points on a cluster, with the
    settings in `engine` (docs/engines.md).

    >>> sweep = bench("cs336", preset="tiny", set={"seq_len": [64, 128]}, device="cpu")  # doctest: +SKIP
    >>> [point.time.median for point in sweep.points]  # doctest: +SKIP
    """
    need_torch()
    from stepscope.analysis.comparison.sweeps import sweep_of
    from stepscope.sweep.engines.start import where_of
    from stepscope.sweep.grid import find_workload
    from stepscope.sweep.memory import bytes_of
    from stepscope.sweep.runner import Options

    where = where_of(on, engine, start)
    axes = axes_of(preset, set, mode=mode, dtype=dtype, compile=compile, sdpa=sdpa, optimizer=optimizer,
                   bf16_reduction=bf16_reduction, warmup=warmup, steps=steps, seed=seed, device=device)  # fmt: skip
    found, limit = find_workload(workload), bytes_of(memory_limit)
    points = bench_points(found, axes, None if grid is None else os.fspath(grid), paired, max_batch, limit)
    options = Options(timeout_s=positive(timeout_s, "timeout_s"), trace=trace, memory_limit_bytes=limit)
    place = place_of("bench", workload, output, resume)
    results, is_interrupted = run_sweep(found, points, options, place, where, max_batch, progress, on_line)
    if is_interrupted:
        raise KeyboardInterrupt
    return sweep_of(results.rows, results.facts["environments"])


def axes_of(preset: Any, set: Mapping[str, Any] | None, **named: Any) -> Axes:
    """Return the axes: `set`, the preset and the named knobs that are not None; UsageError for a knob named twice."""
    from stepscope.sweep.grid import listed

    given = {name: value for name, value in {"preset": preset, **named}.items() if value is not None}
    twice = [name for name in given if name in (set or {})]
    if twice:
        raise UsageError(f"{twice[0]} is given twice: as an argument and in set")
    return listed({**given, **(set or {})})


def place_of(verb: str, workload: str, output: str | os.PathLike[str] | None, resume: bool) -> Place:
    from stepscope.sweep.results import Place, default_folder

    return Place(
        folder=default_folder(verb, workload) if output is None else Path(output),
        command=f"stepscope.{verb}({workload!r}, …)",
        resume=resume,
        resume_command=f"stepscope.{verb}(…, resume=True)",
    )


def bench_points(
    workload: Workload[Any], axes: Axes, grid: str | None, paired: bool, max_batch: bool, limit_bytes: int | None
) -> list[Point]:
    """Return the points of a bench; with `max_batch`, each stands for the search of its largest batch."""
    from stepscope.sweep.grid import grid_points
    from stepscope.sweep.tuning.max_batch import max_batch_point

    points = grid_points(workload, axes, grid, paired)
    return [max_batch_point(point, limit_bytes) for point in points] if max_batch else points


def run_sweep(
    workload: Workload[Any],
    points: Sequence[Point],
    options: Options,
    place: Place,
    where: Where,
    searches_batch: bool,
    progress: Callable[[float], None] | None,
    on_line: Callable[[str], None] | None,
) -> tuple[Results, bool]:
    """Return all rows after running the points that have none yet, and whether it was interrupted; write tables."""
    from stepscope.analysis.comparison.sweeps import varying_axes
    from stepscope.document.sweep_table import row_line
    from stepscope.sweep.engines.engine import Engine
    from stepscope.sweep.runner import Runner, run_points
    from stepscope.sweep.tuning.max_batch import MaxBatch

    varying = varying_axes([{"preset": point.preset, **point.config, **point.run} for point in points])[0]
    asked = {point.hash for point in points}

    def tell(line: str | None) -> None:
        if line is not None and on_line is not None:
            on_line(line)
        if progress is not None:
            progress(len(results.hashes & asked) / len(points))

    def on_row(row: dict[str, Any], num_done: int) -> None:
        tell(f"{num_done}/{len(points)}{_counts(engine, results, asked)}  {row_line(row, varying)}")

    def on_try(batch: int, status: str) -> None:
        tell(f"  batch {batch}: {'fits' if status == 'ok' else status}")

    is_interrupted = False
    with place.open() as results:
        with where.open(place.folder, str(points[0].run["device"]), on_line) as server:
            engine = server if isinstance(server, Engine) else None
            tell(None)  # the share that was done before
            runner = Runner(workload, server, results, options)
            run = MaxBatch(workload, runner, on_try).run if searches_batch else runner.run
            try:
                run_points(points, results, run, on_row, engine)
            except KeyboardInterrupt:
                is_interrupted = True
        write_tables(results, place.command)
    return results, is_interrupted


def _counts(engine: Engine | None, results: Results, asked: Container[str]) -> str:
    """Return what an engine does, as text: queued, running, done, failed. Empty on this machine."""
    if engine is None:
        return ""
    rows = [row for row in results.rows if row["hash"] in asked]
    num_ok = sum(row["status"] == "ok" for row in rows)
    counts = {**engine.counts, "done": num_ok, "failed": len(rows) - num_ok}
    return f" ({', '.join(f'{number} {phase}' for phase, number in counts.items())})"


def write_tables(results: Results, command: str) -> None:
    from stepscope.analysis.comparison.sweeps import sweep_of
    from stepscope.document.sweep_table import records_table, sweep_document
    from stepscope.render.write import write_sweep_tables

    sweep = sweep_of(results.rows, results.facts["environments"])
    with results.writing():
        write_sweep_tables(results.folder, sweep_document(sweep, command), records_table(sweep))


def positive(value: float, name: str) -> float:
    """Return a number if it is positive and finite; UsageError otherwise."""
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={value:g} must be a positive number")
    return value


DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"


def plan(
    workload: str,
    *,
    preset: str | Sequence[str] | None = None,
    set: Mapping[str, Any] | None = None,
    mode: str | Sequence[str] | None = None,
    dtype: str | Sequence[str] | None = None,
    compile: str | Sequence[str] | None = None,
    sdpa: str | Sequence[str] | None = None,
    optimizer: str | Sequence[str] | None = None,
    device: str | Sequence[str] = DEFAULT_DEVICE,
    fsdp: int | str | None = None,
    ddp: int | None = None,
    tp: int | None = None,
    pp: int | str | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    mixed_precision: str | None = None,
    offload_activations: bool = False,
    fit: str | int | None = None,
    max_batch: bool = False,
    max_length: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> Plan:
    """Return the predicted memory, fit and least time of a step, like `stepscope plan`.

    Nothing runs on a GPU and no weights are allocated. `workload` is a name of `stepscope list workloads`,
    `hf:config.json` or `file.py:build`. `set` maps knobs to a value or a list of values; lists multiply. `device`
    is the full name of one or more GPUs, or `cpu`. `fsdp`, `ddp`, `tp` or `pp` ranks train together, and the plan
    is that of one: `fsdp="2x8"` is hybrid sharding, `mixed_precision="bf16:fp32"` FSDP2's policy.
    `offload_activations` keeps saved activations in host memory. `pp` plans pipeline stages: a number, or the names
    of the modules where the stages after the first begin, with `microbatches` and a `schedule` of `1f1b` or
    `gpipe`. `fit="80GiB"` is the memory of a GPU, and searches the largest batch and the fewest GPUs. `max_batch`
    and `max_length` search the largest that fits. `on_line` receives what is being planned.

    >>> plan("cs336", preset="2.7B", set={"seq_len": 512}, device="NVIDIA H200")  # doctest: +SKIP
    <Plan: cs336 2.7B batch=4 seq_len=512 fp32 step on NVIDIA H200>
    """
    need_torch()
    from stepscope.planner.parallel import parallel_of
    from stepscope.planner.plan import CPU, MAX_BATCH, MAX_LENGTH, find_devices, plan_points
    from stepscope.sweep.grid import find_workload, grid_points
    from stepscope.sweep.memory import bytes_of

    parallel = parallel_of(fsdp, ddp, tp, mixed_precision, offload_activations, pp, microbatches, schedule)
    devices = find_devices([device] if isinstance(device, str) else device)
    if not devices:
        raise UsageError("device names no device")
    found = find_workload(workload)
    axes = axes_of(preset, set, mode=mode, dtype=dtype, compile=compile, sdpa=sdpa, optimizer=optimizer)
    limit = bytes_of(fit)
    if limit is not None and None in devices:
        raise UsageError("fit is the memory of a GPU: name a GPU with --device")
    searches = [
        key for key, is_asked in ((MAX_BATCH, max_batch or limit is not None), (MAX_LENGTH, max_length)) if is_asked
    ]
    points, tell = grid_points(found, {"device": [CPU], **axes}), on_line or (lambda line: None)
    return plan_points(found, points, devices, parallel=parallel, searches=searches, limit_bytes=limit, on_line=tell)
