"""`stepscope.report` and `stepscope.export`: results written to files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.analysis.structure.links import Linked
    from stepscope.document.model import Document
    from stepscope.exporters.selection import Selection
    from stepscope.session import Session

PathLike = str | os.PathLike[str]
FORMS = ("perfetto", "speedscope", "csv", "parquet")


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
        from stepscope.studies.build import report_of_study
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

    >>> export("trace.json.gz", "perfetto", step=12)  # doctest: +SKIP
    PosixPath('trace.perfetto.json.gz')
    """
    from stepscope.session import need_read_side, open_session

    need_read_side()
    session = open_session(path, rank=rank, use_cache=use_cache, progress=progress)
    ignored = [ignore] if isinstance(ignore, str) else ignore
    target = None if output is None else Path(output)
    written = write_export(session, form, target, force, step, module, ignored)
    if warn is not None:
        for note in written.notes:
            warn(note)
    return written.path


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    num_host: int
    """Number of host events."""
    num_device: int
    """Number of GPU events."""
    notes: tuple[str, ...]
    """What it lacks."""


def write_export(
    session: Session,
    form: str,
    target: Path | None = None,
    force: bool = False,
    step: int | None = None,
    module: str | None = None,
    ignored: Collection[str] = (),
) -> Exported:
    """Return what was written: a session's trace, or a part of it, in a form of another tool."""
    from stepscope.exporters.selection import select

    if form not in FORMS:
        raise UsageError(f"{form!r} is not a form: choose one of {', '.join(FORMS)}")
    target = target or export_target(session.path, form)
    _check_target(target, form, force)
    linked = session.case.linked
    _check_step(linked, step)
    _check_module(linked, module)
    selection = select(linked, step, module)
    notes = _write(session, selection, target, form, ignored)
    num_ranks = len(session.trace_files) if session.rank is None else 1
    if num_ranks > 1:
        notes.append(f"rank {session.case.rank} of {num_ranks}: --rank chooses another")
    return Exported(target, selection.host.height, selection.device.height, tuple(notes))


def export_target(path: Path, form: str) -> Path:
    """Return where an export goes by default: into the working folder, under the trace's name."""
    from stepscope.render.files import stem_of

    endings = {"perfetto": ".perfetto.json.gz", "speedscope": ".speedscope.json"}
    return Path(f"{stem_of(path)}{endings.get(form, f'-{form}')}")


def _check_target(target: Path, form: str, force: bool) -> None:
    from stepscope.exporters import perfetto, speedscope
    from stepscope.render.files import check_file, check_folder

    if form in ("csv", "parquet"):
        return check_folder(target, force)
    endings = perfetto.ENDINGS if form == "perfetto" else speedscope.ENDINGS
    if not target.name.endswith(endings):
        raise UsageError(f"{target}: the name must end in {' or '.join(endings)}")
    check_file(target, force)


def _check_step(linked: Linked, step: int | None) -> None:
    steps = linked.steps.table["step"].to_list()
    if step is None or step in steps:
        return
    if not steps:
        raise UsageError(f"no step {step}: the trace does not mark where steps end. Export it without a step")
    near = min(steps, key=lambda number: abs(number - step))
    which = f"the trace has {min(steps)} to {max(steps)}" if len(steps) > 1 else "the trace has one"
    raise UsageError(f"no step {step}; {which}: did you mean {near}?")


def _check_module(linked: Linked, module: str | None) -> None:
    if module is None:
        return
    from stepscope.exporters.selection import matching, module_names
    from stepscope.workloads.knobs import nearest

    names = module_names(linked)
    if not names:
        raise UsageError("the trace names no modules: record it with `stepscope run train.py`, or with_stack=True")
    if not matching(names, module):
        raise UsageError(f"no module {module!r}: {nearest(module, names)}")


def _write(session: Session, selection: Selection, target: Path, form: str, ignored: Collection[str]) -> list[str]:
    """Write the selection; return what it lacks."""
    from stepscope.exporters.perfetto import perfetto_texts
    from stepscope.exporters.speedscope import Speedscope
    from stepscope.exporters.tables import write_tables
    from stepscope.findings.diagnose import diagnose
    from stepscope.render.files import write_texts

    notes = []
    if selection.host.is_empty() and selection.device.is_empty():
        notes.append("it is empty: that step has no event of that module")
    if form == "speedscope":
        made = Speedscope(selection, target.name)
        write_texts(target, made.texts())
        if made.num_cut:
            notes.append(f"{made.num_cut:,} events that partly overlap another were cut: speedscope cannot show both")
        return notes
    findings = diagnose(session.case, ignored).findings
    if form in ("csv", "parquet"):
        write_tables(selection, session.case.rank, findings, target, "csv" if form == "csv" else "parquet")
        return notes
    write_texts(target, perfetto_texts(selection, findings))
    if not selection.linked.modules.calls.height:
        notes.append("no module tracks: the trace names no modules (stepscope run, or with_stack=True)")
    if selection.linked.memory.is_empty():
        notes.append("no memory counter: the trace has no memory events (profile_memory=True)")
    if homeless := [finding.id for finding in findings if not finding.places]:
        notes.append(f"findings without a place on the timeline: {', '.join(homeless)}")
    return notes
