"""Writes a session's trace, or a part of it, for another tool."""

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from stepscope.analysis.structure.links import Linked
from stepscope.errors import UsageError
from stepscope.exporters import flame, perfetto, repro, speedscope
from stepscope.exporters.perfetto import perfetto_texts
from stepscope.exporters.selection import Selection, matching, module_names, select
from stepscope.exporters.speedscope import Speedscope
from stepscope.exporters.tables import write_tables
from stepscope.exporters.timeline import Timeline
from stepscope.findings.diagnose import diagnose
from stepscope.render.files import check_file, check_folder, stem_of, write_texts
from stepscope.session import Session

FORMS = ("perfetto", "speedscope", "flame", "repro", "csv", "parquet")
_DEFAULTS = {
    "perfetto": ".perfetto.json.gz", "speedscope": ".speedscope.json", "flame": ".flame.svg", "repro": "-repro.py",
}  # fmt: skip
_ENDINGS = {
    "perfetto": perfetto.ENDINGS, "speedscope": speedscope.ENDINGS, "flame": flame.ENDINGS, "repro": repro.ENDINGS,
}  # fmt: skip


@dataclass(frozen=True)
class Exported:
    path: Path
    num_host: int  # number of host events
    num_device: int  # number of GPU events
    notes: tuple[str, ...]  # what it lacks


def write_export(
    session: Session,
    form: str,
    target: Path | None = None,
    force: bool = False,
    step: int | None = None,
    module: str | None = None,
    ignored: Collection[str] = (),
    all_ranks: bool = False,
    op: str | None = None,
) -> Exported:
    """Return what was written: a session's trace, or a part of it, in a form of another tool."""
    if form not in FORMS:
        raise UsageError(f"{form!r} is not a form: choose one of {', '.join(FORMS)}")
    target = target or export_target(session.path, form)
    _check_options(session, form, all_ranks, op)
    _check_target(target, form, force)
    if all_ranks:
        timeline = Timeline(session, (step, module))
        timeline.write(target, ignored)
        return Exported(target, timeline.num_host, timeline.num_device, tuple(timeline.notes))
    linked = session.case.linked
    _check_step(linked, step)
    _check_module(linked, module)
    selection = select(linked, step, module)
    notes = _write(session, selection, target, form, ignored, op)
    num_ranks = len(session.trace_files) if session.rank is None else 1
    if num_ranks > 1:
        notes.append(f"rank {session.case.rank} of {num_ranks}: --rank chooses another")
    return Exported(target, selection.host.height, selection.device.height, tuple(notes))


def export_target(path: Path, form: str) -> Path:
    """Return where an export goes by default: into the working folder, under the trace's name."""
    return Path(f"{stem_of(path)}{_DEFAULTS.get(form, f'-{form}')}")


def _check_options(session: Session, form: str, all_ranks: bool, op: str | None) -> None:
    if all_ranks and form != "perfetto":
        raise UsageError("--ranks all is for perfetto: other forms hold one rank, which --rank chooses")
    if all_ranks and session.rank is not None:
        raise UsageError("--ranks all and --rank contradict each other: leave one out")
    if (op is not None) != (form == "repro"):
        raise UsageError("--op and repro belong together, as in `stepscope export PATH repro --op aten::mm`")


def _check_target(target: Path, form: str, force: bool) -> None:
    if form in ("csv", "parquet"):
        return check_folder(target, force)
    endings = _ENDINGS[form]
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
    names = module_names(linked)
    if not names:
        raise UsageError("the trace names no modules: record it with `stepscope run train.py`, or with_stack=True")
    if not matching(names, module):
        near = get_close_matches(module, names, 1) or [", ".join(names[:8])]
        raise UsageError(f"no module {module!r}: did you mean {near[0]}?")


def _write(
    session: Session, selection: Selection, target: Path, form: str, ignored: Collection[str], op: str | None
) -> list[str]:
    """Write the selection; return what it lacks."""
    notes: list[str] = []
    if op is not None:
        write_texts(target, repro.repro_texts(selection.linked, op, session.path.name))
        return notes
    if form == "flame":
        stacks = flame.stacks_of(selection)
        what = "GPU work" if selection.device.height else "host time"
        is_folded = target.suffix == ".folded"
        write_texts(target, flame.folded_texts(stacks) if is_folded else flame.svg_texts(stacks, what))
        return notes
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
        write_tables(selection, session.case.rank, findings, target, form)
        return notes
    write_texts(target, perfetto_texts(selection, findings))
    if not selection.linked.modules.calls.height:
        notes.append("no module tracks: the trace names no modules (stepscope run, or with_stack=True)")
    if selection.linked.memory.is_empty():
        notes.append("no memory counter: the trace has no memory events (profile_memory=True)")
    if homeless := [finding.id for finding in findings if not finding.places]:
        notes.append(f"findings without a place on the timeline: {', '.join(homeless)}")
    return notes
