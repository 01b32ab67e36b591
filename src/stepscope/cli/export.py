"""A trace for other tools: Perfetto, speedscope, or tables as CSV and Parquet; whole, or a step and a module of it.

FORM is one of:
  perfetto    a trace for ui.perfetto.dev and chrome://tracing, with tracks of steps, phases, modules and findings
  speedscope  a flame graph a host thread and a GPU stream, for speedscope.app
  csv         a folder with the tables of stepscope sql and of stepscope analyze
  parquet     the same tables, for programs

examples:
  stepscope export runs/train-20260101-120000 perfetto --step 12
  stepscope export trace.json.gz perfetto --module 'blocks.*.mlp' -o mlp.json.gz
  stepscope export trace.json.gz speedscope
  stepscope export traces/ parquet --rank 3 -o tables/
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.analysis.structure.links import Linked
    from stepscope.exporters.selection import Selection
    from stepscope.session import Session

FORMS = ("perfetto", "speedscope", "csv", "parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a recording, a trace, a folder of ranks")
    parser.add_argument("form", metavar="FORM", choices=FORMS, help=", ".join(FORMS))
    parser.add_argument("--step", type=int, metavar="N", help="this step alone")
    parser.add_argument("--module", metavar="FQN", help="this module alone, with its backward; * stands for a number")
    parser.add_argument("--rank", type=int, metavar="R", help="this rank (default: the first)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a file, of tables a folder (default: its name)"
    )
    parser.add_argument("--force", action="store_true", help="write over what is there")
    parser.add_argument("--no-cache", action="store_true", help="read the trace itself and keep nothing")


def main(arguments: argparse.Namespace) -> int:
    """Write the part that was asked for, and say where it is and what it lacks."""
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:100,muzzy_decay_ms:0")  # as analyze does
    from stepscope.cli.support.output import tell
    from stepscope.cli.support.progress import Progress
    from stepscope.formatting import plural, safe
    from stepscope.session import need_read_side, open_session

    need_read_side()
    from stepscope.exporters.selection import select

    with Progress("reading") as progress:
        session = open_session(
            arguments.path, rank=arguments.rank, use_cache=not arguments.no_cache, progress=progress
        )
        target: Path = arguments.output or default_target(session.path, arguments.form)
        _check(target, arguments.form, arguments.force)
        linked = session.case.linked
    _check_step(linked, arguments.step)
    _check_module(linked, arguments.module)
    selection = select(linked, arguments.step, arguments.module)
    notes = _write(session, selection, target, arguments.form)
    num_ranks = len(session.trace_files) if session.rank is None else 1
    if num_ranks > 1:
        notes.append(f"rank {session.case.rank} of {num_ranks}: --rank chooses another")
    for note in notes:
        tell(f"stepscope export: {safe(note, 400)}")
    parts = f"{plural(selection.host.height, 'host event')}, {plural(selection.device.height, 'piece')} of GPU work"
    tell(f"stepscope: {safe(target)} ({parts})")
    return 0


def default_target(path: Path, form: str) -> Path:
    """Where it goes when nobody says: here, under the trace's own name."""
    from stepscope.render.files import stem_of

    endings = {"perfetto": ".perfetto.json.gz", "speedscope": ".speedscope.json"}
    return Path(f"{stem_of(path)}{endings.get(form, f'-{form}')}")


def _check(target: Path, form: str, force: bool) -> None:
    from stepscope.exporters import perfetto, speedscope
    from stepscope.render.files import check_file, check_folder

    if form in ("csv", "parquet"):
        return check_folder(target, force)
    endings = perfetto.ENDINGS if form == "perfetto" else speedscope.ENDINGS
    if not target.name.endswith(endings):
        raise UsageError(f"{target}: name it {' or '.join('*' + ending for ending in endings)}")
    check_file(target, force)


def _check_step(linked: Linked, step: int | None) -> None:
    steps = linked.steps.table["step"].to_list()
    if step is None or step in steps:
        return
    if not steps:
        raise UsageError(f"no step {step}: nothing in the trace says where a step ends; leave --step out")
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


def _write(session: Session, selection: Selection, target: Path, form: str) -> list[str]:
    """Write it; what has to be said of it."""
    from stepscope.exporters.perfetto import perfetto_texts
    from stepscope.exporters.speedscope import Speedscope
    from stepscope.exporters.tables import write_tables
    from stepscope.render.files import write_texts

    notes = []
    if selection.host.is_empty() and selection.device.is_empty():
        notes.append("nothing of the trace is in it: that step has no event of that module")
    if form == "speedscope":
        made = Speedscope(selection, target.name)
        write_texts(target, made.texts())
        if made.num_cut:
            notes.append(f"{made.num_cut:,} events overlap another in part and were cut: speedscope cannot show both")
        return notes
    from stepscope.cli.support.settings import ignored_rules
    from stepscope.findings.diagnose import diagnose

    findings = diagnose(session.case, ignored_rules(Path.cwd())).findings
    if form in ("csv", "parquet"):
        write_tables(selection, session.case.rank, findings, target, "csv" if form == "csv" else "parquet")
        return notes
    write_texts(target, perfetto_texts(selection, findings))
    if not selection.linked.modules.calls.height:
        notes.append("no tracks of modules: the trace names none (stepscope run, or with_stack=True)")
    if selection.linked.memory.is_empty():
        notes.append("no memory counter: the trace has no memory events (profile_memory=True)")
    if homeless := [finding.id for finding in findings if not finding.places]:
        notes.append(f"no place on the timeline, so not in it: {', '.join(homeless)}")
    return notes
