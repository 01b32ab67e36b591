"""Functions that read a recording, a trace or a sweep: figures, findings, comparisons, queries, reports, exports."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepscope.errors import Unavailable, UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.comparison.compare import Comparison
    from stepscope.analysis.ranks.hangs import Hang
    from stepscope.analysis.ranks.rank_account import Analysis
    from stepscope.document.card import Card
    from stepscope.document.model import Document
    from stepscope.findings.diagnose import Diagnosis
    from stepscope.findings.what_if import WhatIf
    from stepscope.session import Session
    from stepscope.session.rank_accounts import Spread

PathLike = str | os.PathLike[str]


def spread_over(on: str, engine: Mapping[str, Any] | None, say: Callable[[str], None] | None = None) -> Spread | None:
    """Return what computes accounts on a cluster's nodes; None for this machine."""
    if on == "local":
        return None
    from stepscope.sweep.engines.start import spread_over as over

    return over(on, engine, say)


def read(path: PathLike | None = None, *, price_per_hour: float | None = None) -> Card:
    """Return the card of a recording: step time, phases, throughput and memory on one screen.

    Without a path, it is the latest run. Its figures are in `.summary`, those of the whole run in `.whole_run`.
    With `price_per_hour`, it has the cost of the job.

    >>> read("runs/train-20260101-120000").summary.throughput.per_second  # doctest: +SKIP
    """
    from stepscope.document.card import Card
    from stepscope.session import open_session

    return Card.of(open_session(path), price_per_hour=price_per_hour)


def analyze(
    *paths: PathLike,
    step: int | None = None,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
    on: str = "local",
    engine: Mapping[str, Any] | None = None,
) -> Analysis:
    """Return where the time in a trace goes, rank by rank, like `stepscope analyze`.

    Paths are trace files of one run, a folder of ranks, or a recording; without one, the latest run. `step` limits it
    to one step, `rank` to one rank. `progress` receives the share that has been read. Neither torch nor a GPU is
    needed. `on="ray"` reads the ranks on the nodes of a Ray cluster, with the settings in `engine` (docs/scale.md).

    >>> analyze("trace.json.gz").ranks[0].gpu_time  # doctest: +SKIP
    """
    from stepscope.session import open_session

    spread = spread_over(on, engine)
    return open_session(paths or None, rank=rank, use_cache=use_cache, progress=progress, spread=spread).analyze(step)


def hang(folder: PathLike) -> Hang:
    """Return why ranks hang, from the flight-recorder dumps in a folder, like `stepscope analyze --hang`.

    The folder may be a recording in which no step ended any more: then `.states` says where each rank was. `.first`
    is the first collective on which the dumps disagree. Dumps are read without executing them.

    >>> [call.rank for call in hang("dumps").first.absent]  # doctest: +SKIP
    [2]
    """
    from stepscope.session.hang import open_hang

    return open_hang(Path(folder))


def diagnose(
    path: PathLike | None = None,
    *,
    rank: int | None = None,
    ignore: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
    on: str = "local",
    engine: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Return what is wrong with the steps of a recording or a trace; `.findings` has the largest savings first.

    `ignore` names rules to skip. `on="ray"` reads the ranks of a folder on the nodes of a Ray cluster, with the
    settings in `engine` (docs/scale.md).

    >>> [(finding.id, finding.saving_ns) for finding in diagnose("trace.json.gz").findings]  # doctest: +SKIP
    """
    from stepscope.session import open_session

    spread = spread_over(on, engine)
    session = open_session(path, rank=rank, use_cache=use_cache, progress=progress, spread=spread)
    case = session.case
    need_steps(session)
    from stepscope.findings.diagnose import diagnose as findings_of

    return findings_of(case, [ignore] if isinstance(ignore, str) else ignore)


def need_steps(session: Session) -> None:
    """Raise Unavailable for a recording without a step: it has nothing that could be right or wrong."""
    if not session.case.has_recording or session.summary.num_steps or session.recording.facts.get("trace"):
        return
    from stepscope.document.verdict import verdict

    raise Unavailable(f"{session.path} has no training step. {verdict(session.recording, session.summary)}")


def what_if(
    path: PathLike | None = None,
    *,
    scale: Sequence[tuple[str, float]] = (),
    drop_launches: Sequence[str] = (),
    host: float | None = None,
    waits: bool = True,
    clean: bool = False,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> WhatIf:
    """Return the step of a trace replayed without and with a change, like `stepscope diagnose --scale`.

    `scale` has pairs of GPU work and a factor for its time. `drop_launches` names GPU work to drop with its launches.
    `host` is a factor for the host's own time. `waits=False` removes the host's waits for the GPU, `clean=True` the
    profiler's overhead. docs/whatif.md describes how work is named.

    >>> what_if("trace.json.gz", scale=[("class=attention", 0.5)]).to_json()["saving_ms"]  # doctest: +SKIP
    """
    from stepscope.session import open_session

    case = open_session(path, rank=rank, use_cache=use_cache, progress=progress).case
    from stepscope.findings.what_if import what_if as replay

    return replay(case, scale, drop_launches, host, waits, clean)


def compare(
    base: PathLike | Sequence[PathLike],
    new: PathLike | Sequence[PathLike],
    *,
    threshold: float = 0.02,
    allow: Collection[str] = (),
    fail_on: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Comparison:
    """Return whether two recordings, bench results or traces differ, and where the difference is.

    A list of paths is several runs of one thing, at least three: then whole runs are the samples. Changes below the
    share `threshold` are noise. `allow` names what may differ (`device`, `dtype` …), `fail_on` has gates such as
    `step_time:3%`; see `.gates` and `.exit_code`. NotComparableError if the two cannot be compared.

    >>> compare("runs/main", "runs/mine").pairs[0].change("step_time").verdict  # doctest: +SKIP
    """
    from stepscope.analysis.comparison.compare import parse_gate
    from stepscope.session.compare import compare as compare_sessions
    from stepscope.session.compare import open_sides

    gates = [parse_gate(text) for text in ([fail_on] if isinstance(fail_on, str) else fail_on)]
    sides = [
        [Path(path) for path in ([side] if isinstance(side, (str, os.PathLike)) else side)] for side in (base, new)
    ]
    if not all(sides):
        raise UsageError("compare needs at least one path on each side")
    return compare_sessions(*open_sides(sides[0], sides[1], use_cache, progress), threshold, allow, gates)


def sql(
    path: PathLike | None,
    query: str,
    *,
    rank: int | None = None,
    memory_limit: str | int | None = None,
    rows: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> pl.DataFrame:
    """Return the rows of an SQL query over the tables of a trace, as a polars DataFrame.

    docs/tables.md describes the tables. A query runs in a process of its own, which can open no file and may take
    `memory_limit` (default 2GiB) besides the tables. It ends after `rows` rows if that is given. `path` None is the
    latest run; `warn` receives problems in the trace.

    >>> sql("trace.json.gz", "select name, sum(duration_ns) from device group by name")  # doctest: +SKIP
    """
    from stepscope.session import need_read_side, open_session

    need_read_side()
    from stepscope.session.sql import MEMORY_LIMIT_BYTES, refuse_other_than_query, run_query, tables_of
    from stepscope.sweep.memory import bytes_of

    refuse_other_than_query(query)
    limit = bytes_of(memory_limit) or MEMORY_LIMIT_BYTES
    session = open_session(path, rank=rank, use_cache=use_cache, progress=progress)
    return run_query(tables_of(session, warn or (lambda text: None)), query, limit, rows)


def report(
    path: PathLike | None = None,
    *,
    output: PathLike | None = None,
    force: bool = False,
    rank: int | None = None,
    ignore: Collection[str] = (),
    price_per_hour: float | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
    on: str = "local",
    engine: Mapping[str, Any] | None = None,
) -> Document:
    """Return the report of a recording, a trace, a folder of ranks, a sweep or a study; `output` writes it.

    The suffix of `output` chooses the format: .html, .md, .json, or a folder with all of them, every table as CSV and
    every chart as PNG. `force` overwrites. `ignore` names rules whose findings are left out. With `price_per_hour`,
    the report has the cost of the job. `on="ray"` reads the ranks of a folder on the nodes of a Ray cluster, with the
    settings in `engine` (docs/scale.md).

    >>> report("runs/train-20260101-120000", output="step.html")  # doctest: +SKIP
    """
    from stepscope.session import Kind, need_read_side, open_session

    need_read_side()
    from stepscope.document.build import report_of
    from stepscope.render.write import check_target, write_report

    target = None if output is None else check_target(Path(output), force)
    session = open_session(path, rank=rank, use_cache=use_cache, progress=progress, spread=spread_over(on, engine))
    if session.kind is Kind.STUDY:
        from stepscope.studies.report import report_of_study
        from stepscope.studies.stored import Stored
        from stepscope.studies.write import study_of

        document = report_of_study(study_of(session.path), Stored(session.path))
    else:
        document = report_of(session, [ignore] if isinstance(ignore, str) else ignore, price_per_hour)
    if target is not None:
        write_report(document, target)
    return document


def report_target(session: Session) -> Path:
    """Return where a report goes by default: into a recording or a sweep, else into the working folder."""
    from stepscope.render.files import stem_of
    from stepscope.session import Kind

    path = session.path
    if session.kind in (Kind.RECORDING, Kind.SWEEP):
        folder = path if path.is_dir() else path.parent
        if os.access(folder, os.W_OK):
            return folder / "report.html"
    return Path(f"{stem_of(path)}.report.html")


def export(
    path: PathLike | None,
    form: str,
    *,
    step: int | None = None,
    module: str | None = None,
    rank: int | None = None,
    ranks: Literal["all"] | None = None,
    op: str | None = None,
    output: PathLike | None = None,
    force: bool = False,
    ignore: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Return the path of a trace written for another tool, like `stepscope export`.

    `form` is `perfetto`, `speedscope`, `flame`, `repro`, `csv` or `parquet`; tables are a folder. `step` and `module`
    (`blocks.*.mlp`) select a part; `ranks="all"` puts all ranks on one Perfetto timeline; `op` is the op of `repro`.
    By default it goes into the working folder, named after the trace. `warn` receives what the export lacks.

    >>> export("trace.json.gz", "perfetto", step=26)  # doctest: +SKIP
    PosixPath('trace.perfetto.json.gz')
    """
    from stepscope.session import need_read_side, open_session

    need_read_side()
    from stepscope.exporters.export import write_export

    session = open_session(path, rank=rank, use_cache=use_cache, progress=progress)
    ignored = [ignore] if isinstance(ignore, str) else ignore
    target = None if output is None else Path(output)
    if ranks not in (None, "all"):
        raise UsageError(f"ranks is 'all' or None, not {ranks!r}")
    written = write_export(session, form, target, force, step, module, ignored, ranks == "all", op)
    if warn is not None:
        for note in written.notes:
            warn(note)
    return written.path
