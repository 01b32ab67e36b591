"""Runs the points of a study in order. Every row is on disk before the next point begins."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.comparison.sweeps import sweep_of
from stepscope.document.sweep_table import records_table, sweep_document
from stepscope.errors import UsageError
from stepscope.recorder.files import write_json
from stepscope.render.write import write_sweep_tables
from stepscope.studies.stored import FULL, TOML_FILE, read_facts
from stepscope.studies.study import Measure, Recordings, Study, Sweep
from stepscope.sweep.engines.engine import Engine
from stepscope.sweep.engines.start import Where
from stepscope.sweep.grid import Grid, Point, listed
from stepscope.sweep.record_runs import record_point
from stepscope.sweep.results import Place, Results
from stepscope.sweep.runner import Options, Runner, run_points
from stepscope.sweep.server import Server
from stepscope.trace.kind import STUDY_FILE, Kind, kind_of
from stepscope.version import __version__
from stepscope.workloads.registry import find

SCHEMA_VERSION = 1
OnRow = Callable[[Measure, dict[str, Any] | None, int], None]
_FOLDER = re.compile(r"[A-Za-z0-9_-]+")
_JUST_STARTED = (f".{STUDY_FILE}.tmp",)  # what a study leaves if it is killed right at the start


@dataclass(frozen=True, kw_only=True)
class Plan:
    study: Study
    mode: str
    device: str
    points: Mapping[str, list[Point]]  # by the measure's id, in order

    @property
    def num_points(self) -> int:
        return sum(map(len, self.points.values()))


def plan_of(study: Study, mode: str, device: str) -> Plan:
    """Return every point of the study in this mode. A mistake in the declaration is a UsageError."""
    points: dict[str, list[Point]] = {}
    for measure in study.measures:
        if not _FOLDER.fullmatch(measure.id) or measure.id in (*points, "report"):
            raise UsageError(f"{study.name}: id={measure.id!r} must be a folder name that no other measure has")
        grids = measure.full if mode == FULL else measure.quick
        axes = [listed(each) for each in ([grids] if isinstance(grids, Mapping) else grids)]
        points[measure.id] = Grid(find(measure.workload), {"device": device}).points(axes)
    if not any(points.values()):
        raise UsageError(f"{study.name} measures nothing with --{mode}: no measure has points")
    return Plan(study=study, mode=mode, device=device, points={id: found for id, found in points.items() if found})


def begin(plan: Plan, folder: Path, source: str, command: str, resume: bool, resume_command: str) -> None:
    """Write study.json, or check that the folder holds this study in this mode."""
    commands, chosen = [command], {"study": source, "mode": plan.mode, "device": plan.device}
    if folder.is_dir() and kind_of(folder) is Kind.STUDY:
        known = read_facts(folder)
        for name, value in chosen.items():
            # A user's study may have moved together with its folder.
            if str(known.get(name)).rpartition("/")[2] != value.rpartition("/")[2]:
                raise UsageError(
                    f"{folder} holds {name} {known.get(name)}, not {value}. Choose another folder with -o"
                )
        if not resume:
            raise UsageError(f"{folder} already holds a study. Continue it with: {resume_command}")
        commands = [*known.get("commands", []), command]
    elif folder.is_dir() and any(entry.name not in _JUST_STARTED for entry in folder.iterdir()):
        raise UsageError(f"{folder} is not empty and holds no study. Choose another folder with -o")
    facts = {
        "schema_version": SCHEMA_VERSION,
        **chosen,
        "num_points": {name: len(points) for name, points in plan.points.items()},
        "commands": commands,
        "stepscope": __version__,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STUDY_FILE, facts)
        if source.endswith(".toml"):  # the report can be made again from the folder alone
            shutil.copyfile(source, part := folder / f".{TOML_FILE}.tmp")
            part.replace(folder / TOML_FILE)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Choose another folder with -o") from None


def run(
    plan: Plan,
    folder: Path,
    command: str,
    resume_command: str,
    timeout_s: float,
    on_row: OnRow,
    where: Where | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Measure every point that has no row yet. `on_row` gets each row and the number of points done in total."""
    num_before = 0
    with (where or Where()).open(folder, plan.device, say) as server:
        engine = server if isinstance(server, Engine) else None
        for measure in (measure for measure in plan.study.measures if measure.id in plan.points):
            points = plan.points[measure.id]
            place = Place(folder=folder / measure.id, command=command, resume=True, resume_command=resume_command)
            with place.open() as results:
                on_row(measure, None, num_before + sum(point.hash in results.hashes for point in points))
                try:
                    measuring = _runner(measure, server, results, timeout_s)
                    run_points(points, results, measuring, _after(num_before, measure, on_row), engine)
                finally:
                    if results.rows and isinstance(measure, Sweep):
                        with results.writing():
                            sweep = sweep_of(results.rows, results.facts["environments"])
                            write_sweep_tables(place.folder, sweep_document(sweep, command), records_table(sweep))
            num_before += len(points)


def _after(num_before: int, measure: Measure, on_row: OnRow) -> Callable[[dict[str, Any], int], None]:
    return lambda row, num_done: on_row(measure, row, num_before + num_done)


def _runner(
    measure: Measure, server: Server | Engine, results: Results, timeout_s: float
) -> Callable[[Point], dict[str, Any]]:
    if isinstance(measure, Recordings):
        where, engine = results.folder.absolute(), server if isinstance(server, Engine) else None

        def record(point: Point) -> dict[str, Any]:
            with results.writing():
                return record_point(point, where, measure.options, timeout_s, measure.loop, engine)

        return record
    assert isinstance(measure, Sweep)
    options = Options(timeout_s=timeout_s, trace=measure.trace, layers=measure.layers)
    return Runner(find(measure.workload), server, results, options).run
