"""The card of a recording: key figures, where a step goes, and how it was measured. Standard library only."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.analysis.run.series import Run
from stepscope.analysis.time.loop_time import DATA, MEASURING, WARMUP
from stepscope.analysis.time.summary import Summary
from stepscope.display import Shown
from stepscope.document.card_figures import figures
from stepscope.document.model import Bars, Document, Fact, Facts, Part, Section, Series
from stepscope.document.verdict import needs_launcher, verdict
from stepscope.document.whole_run import WholeRun
from stepscope.errors import StepscopeError
from stepscope.formatting import milliseconds, plural
from stepscope.session import Session
from stepscope.session.job import Processes, of_all_ranks, processes_of
from stepscope.session.process import writer_runs
from stepscope.trace.history_file import HISTORY_FILE
from stepscope.trace.recording import Recording

if TYPE_CHECKING:
    from stepscope.analysis.time.ledger import Ledger

MAX_RANKS = 8  # that are listed by number
_FACTS = ("exit_code", "command", "environment", "precision", "steps", "memory", "notes")
_EXACT = "for exact step boundaries, call stepscope.step() at the end of your loop"
_STEP_SOURCES = {
    "step()": ("each ends with stepscope.step() or where the trainer says so", ""),
    "optimizer": ("each ends with optimizer.step()", ""),
    "update": ("each ends when parameters have changed after a backward", _EXACT),
    "forward": ("each ends with the root module's forward, because no optimizer stepped", _EXACT),
}


@dataclass(frozen=True, repr=False)
class Card(Shown):
    """A recording with its figures as attributes; printed, it is what `stepscope show` shows."""

    recording: Recording
    summary: Summary
    verdict: str
    run: tuple[Fact, ...]
    """What ran, and on which device."""
    figures: tuple[Fact, ...]
    """What was measured."""
    measurement: tuple[Fact, ...]
    """How it was measured."""
    ledger: Ledger | None = None
    """The step split into the least time that its work needs and every loss, if it was asked for."""
    whole_run: WholeRun | None = None
    """Goodput since the start, cost, and what went wrong in the course of the run."""

    @classmethod
    def of(cls, session: Session, with_ledger: bool = False, price_per_hour: float | None = None) -> Card:
        """Return the card of a recording. The ledger needs a trace, and Polars."""
        recording, summary = session.recording, session.summary
        ledger, lacks = _ledger(session) if with_ledger else (None, ())
        processes = processes_of(session)
        summary = of_all_ranks(summary, processes)
        whole_run = WholeRun.of(session, price_per_hour)
        # With a history, goodput is that of the whole run, as `watch` shows it, and not of the loop alone.
        has_history = (recording.folder / HISTORY_FILE).is_file()
        measured = [fact for fact in figures(recording, summary) if fact.title != "goodput" or not has_history]
        steps = _steps(recording, summary)
        return cls(
            recording=recording,
            summary=summary,
            verdict=verdict(recording, summary) + whole_run.waits_sentence(recording),
            run=tuple(_run(recording)),
            figures=(*measured, *whole_run.facts(has_history)),
            measurement=(*steps, *_processes(processes), *_caveats(recording, session.run), *lacks),
            ledger=ledger,
            whole_run=whole_run,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the card as one JSON object; docs/card.md lists its fields."""
        facts = self.recording.facts
        return {
            "schema_version": 1,
            "verdict": self.verdict,
            "recording": str(self.recording.folder),
            "status": self.recording.status,
            **{name: facts.get(name) for name in _FACTS},
            **dataclasses.asdict(self.summary),
            "ledger": None if self.ledger is None else self.ledger.to_json(),
            "whole_run": None if self.whole_run is None else self.whole_run.to_json(),
            "compiler": self.recording.compiler,
            "warnings": list(self.recording.warnings),
        }


def card_document(card: Card) -> Document:
    folder, summary = card.recording.folder, card.summary
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    has_trace = (card.recording.facts.get("trace") or {}).get("file")
    diagnose = f"stepscope diagnose {shlex.quote(str(shown))}, " if has_trace else ""
    following = f"{diagnose}stepscope report {shlex.quote(str(shown))} --open"
    if not summary.num_steps:  # the verdict says what to change before
        script = card.recording.script if card.recording.facts.get("environment") else None  # else it has no torch
        launcher = "-m torch.distributed.run --nproc-per-node 2 " if needs_launcher(card.recording) else ""
        following = f"stepscope run {launcher}{script or 'path/to/train.py'}"
    last = Fact("recording", str(shown)), Fact("next", following)
    problems = () if card.whole_run is None else card.whole_run.problems
    parts: list[Part] = [Facts((*card.run, *card.figures, *problems))]
    if summary.rows:
        title, names = f"where a step goes ({how_split(summary)})", [row.name for row in summary.rows]
        series = (Series("step", [row.ns for row in summary.rows]),)
        parts.append(Bars(id="step_parts", title=title, labels=names, series=series, unit="time_ns"))
    if card.ledger is not None:
        from stepscope.document.ledger import ledger_parts

        is_faster = summary.loop is not None and summary.loop.is_faster_than(card.ledger.step_ns)
        parts += ledger_parts(card.ledger, is_faster)
    if summary.loop is not None and len(summary.loop.rows) > 1:
        loop = summary.loop
        # A DataLoader starts now and then, but every step waits for it.
        names = [f"{row.name} ({row.num}×)" if row.num and row.name != DATA else row.name for row in loop.rows]
        beyond = [row.name for row in loop.rows if row.name in (WARMUP, MEASURING)]
        what = f"; {' and '.join(beyond)}: beyond a training step" if beyond else ""
        title = f"where the loop's wall-clock time goes ({plural(loop.num_steps, 'step')}{what})"
        series = (Series("loop", [row.ns for row in loop.rows]),)
        parts.append(Bars(id="loop_rows", title=title, labels=names, series=series, unit="time_ns"))
    parts.append(Facts((*card.measurement, *last), "about this measurement"))
    return Document(str(shown), card.verdict, (Section("overview", "Overview", tuple(parts)),))


def _ledger(session: Session) -> tuple[Ledger | None, tuple[Fact, ...]]:
    """Return the ledger of a traced step, or why there is none."""
    name = (session.recording.facts.get("trace") or {}).get("file")
    if not name:
        return None, ()
    if not os.path.exists(session.path / str(name)):  # noqa: PTH110  (a name that no file can have is no error)
        return None, (Fact("ledger", "not computed", f"{name} is missing"),)
    try:
        return session.case.ledger, ()
    except StepscopeError as error:
        return None, (Fact("ledger", "not computed", str(error)),)


def how_split(summary: Summary) -> str:
    """Return what the parts of a recorded step are: GPU work, or time on one clock."""
    if any(row.name == "idle" for row in summary.rows):
        return "GPU work by the phase that launched it"
    return "time between CUDA events" if summary.clock == "device" else "host time by phase"


def _run(recording: Recording) -> Iterator[Fact]:
    environment = recording.facts.get("environment") or {}
    command = recording.facts.get("command") or {}
    if command.get("argv"):
        yield Fact("script", " ".join(map(str, command["argv"])), _status(recording))
    if environment:
        world = environment.get("world_size", 1)
        rank = f", rank {environment.get('rank')} of {world}" if world > 1 else ""
        yield Fact("device", f"{environment.get('device_name')}{rank}", f"torch {environment.get('torch')}")


def _status(recording: Recording) -> str:
    if recording.status == "interrupted":
        runs = False if recording.facts.get("finished_at") else writer_runs(recording.folder, recording.facts)
        return {True: "still running", False: "interrupted", None: "interrupted, or still running"}[runs]
    if recording.status != "failed":
        return ""
    exit_code, error = recording.facts.get("exit_code"), recording.facts.get("exception")
    return f"failed{'' if exit_code is None else f' with exit code {exit_code}'}{f' ({error})' if error else ''}"


def _processes(processes: Processes) -> Iterator[Fact]:
    num = len(processes.ranks)
    if processes.missing:
        more = ", …" * (len(processes.missing) > MAX_RANKS)
        text = f"{num} of {processes.world_size} recorded: throughput is theirs alone"
        yield Fact("ranks", text, f"missing: {', '.join(map(str, processes.missing[:MAX_RANKS]))}{more}")
    elif num > 1:
        yield Fact("ranks", f"all {num} recorded", "throughput is that of all ranks, a typical step is rank 0's")
    if processes.others:
        names = ", ".join(session.path.name for session in processes.others[:MAX_RANKS])
        yield Fact("processes", f"{plural(len(processes.others), 'other process')} trained too", names)


def _steps(recording: Recording, summary: Summary) -> Iterator[Fact]:
    steps = recording.facts.get("steps") or {}
    if (source := steps.get("source")) is not None:
        text, detail = _STEP_SOURCES.get(source, (str(source), ""))
        if source == "optimizer":
            text += f" ({plural(steps.get('num_sources', 1), 'optimizer')})"
        skipped = f"; the GradScaler skipped {summary.num_skipped}" if summary.num_skipped else ""
        earlier = steps.get("num_earlier") or 0
        before = f"; {plural(earlier, 'step')} before them trained something else" if earlier else ""
        yield Fact("steps", f"{summary.num_steps} recorded, {text}{skipped}{before}", detail)
    if summary.warmup_ns:
        first = f"the first took {milliseconds(summary.warmup_ns[0])}, its wait for data included"
        yield Fact("warm-up", f"{plural(len(summary.warmup_ns), 'step')} excluded from timing, {first}")
    if any(phase.name == "forward" and phase.host_ns for phase in summary.phases):
        if summary.data_is_named:
            yield Fact("data", "time inside the DataLoader")
        else:
            how = 'wrap your data loading in `with stepscope.phase("data"):` to measure it exactly'
            yield Fact("data", "time between steps (no DataLoader found)", how)
    if summary.num_kernels_per_step is not None:
        yield Fact("launches", f"{summary.num_kernels_per_step:,.0f} kernels per step")
    if summary.observer_effects:
        effects = [f"{one.window} {one.ratio:.2f}×{' (noise)' * (one.ratio < 1)}" for one in summary.observer_effects]
        yield Fact("overhead", ", ".join(effects), "probed step ÷ clean step; clean steps are not probed")


def _caveats(recording: Recording, run: Run) -> Iterator[Fact]:
    for note in recording.facts.get("notes") or []:
        yield Fact("note", f"{note.get('about')}: {note.get('text')}")
    if trimmed := (recording.facts.get("trace") or {}).get("trimmed"):
        yield Fact("note", f"trace: {trimmed}")
    if dropped := (recording.facts.get("steps") or {}).get("num_lines_dropped"):
        yield Fact("note", f"{dropped:,} lines are not in samples.jsonl. history.jsonl has sums of all steps")
    yield from (Fact("warning", warning) for warning in (*recording.warnings, *run.problems))
