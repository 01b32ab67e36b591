"""`stepscope.report` and `stepscope.export`: results written to files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.document.model import Document
    from stepscope.session import Session

PathLike = str | os.PathLike[str]


def report(
    path: PathLike | None = None,
    *,
    output: PathLike | None = None,
    force: bool = False,
    rank: int | None = None,
    ignore: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Document:
    """Return the report of a recording, a trace, a folder of ranks, a sweep or a study; `output` writes it.

    The suffix of `output` chooses the format: .html, .md, .json, or a folder with all of them, every table as CSV and
    every chart as PNG. `force` overwrites. `ignore` names rules whose findings are left out.

    >>> report("runs/train-20260101-120000", output="step.html")  # doctest: +SKIP
    """
    from stepscope.session import Kind, need_read_side, open_session

    need_read_side()
    from stepscope.document.build import report_of
    from stepscope.render.write import check_target, write_report

    target = None if output is None else check_target(Path(output), force)
    session = open_session(path, rank=rank, use_cache=use_cache, progress=progress)
    if session.kind is Kind.STUDY:
        from stepscope.studies.report import report_of_study
        from stepscope.studies.stored import Stored
        from stepscope.studies.write import study_of

        document = report_of_study(study_of(session.path), Stored(session.path))
    else:
        document = report_of(session, [ignore] if isinstance(ignore, str) else ignore)
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
    output: PathLike | None = None,
    force: bool = False,
    ignore: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Return the path of a trace written for another tool, like `stepscope export`.

    `form` is `perfetto`, `speedscope`, `csv` or `parquet`; tables are a folder. `step` and `module` (`blocks.*.mlp`)
    select a part. By default it goes into the working folder, named after the trace. `warn` receives what the export
    lacks.

    >>> export("trace.json.gz", "perfetto", step=26)  # doctest: +SKIP
    PosixPath('trace.perfetto.json.gz')
    """
    from stepscope.session import need_read_side, open_session

    need_read_side()
    from stepscope.exporters.export import write_export

    session = open_session(path, rank=rank, use_cache=use_cache, progress=progress)
    ignored = [ignore] if isinstance(ignore, str) else ignore
    target = None if output is None else Path(output)
    written = write_export(session, form, target, force, step, module, ignored)
    if warn is not None:
        for note in written.notes:
            warn(note)
    return written.path
