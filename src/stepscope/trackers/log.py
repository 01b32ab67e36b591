"""Logs recordings, sweeps and studies: each recording and each point of a sweep is a run of the tracker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepscope.analysis.comparison.sweeps import PointSummary, SweepSummary
from stepscope.document.card import Card
from stepscope.errors import StepscopeError, UsageError, failure
from stepscope.rows import RESULTS_FILE
from stepscope.session import Kind, Session, open_session
from stepscope.trackers.figures import PREFIX, figure_point, figures, step_points
from stepscope.trackers.tracker import TRACKERS, Point, Run, Target, Tracker

WriteReport = Callable[[Session, Path], object]


class Report:
    """The report of a session, written when it is first asked for."""

    def __init__(self, folder: Path, session: Session, write: WriteReport) -> None:
        self._path, self._session, self._write = folder / "report.html", session, write

    def file(self) -> Path:
        if not self._path.exists():
            self._write(self._session, self._path)
        return self._path


def log_session(session: Session, target: Target, write_report: WriteReport) -> int:
    """Log a finished recording, sweep or study. Return the number of runs in the tracker."""
    if session.kind not in (Kind.RECORDING, Kind.SWEEP, Kind.STUDY):
        raise UsageError(f"{session.path} is not a recording, a sweep or a study: only those can be logged")
    try:
        with TemporaryDirectory(prefix="stepscope-") as folder:
            report = Report(Path(folder), session, write_report)
            if session.kind is not Kind.RECORDING:
                return _log_sweeps(session, target, report)
            Logged(target, session.path).finish(session, report)
            return 1
    except StepscopeError:
        raise
    except Exception as error:
        raise StepscopeError(f"logging to {target} failed: {failure(error)}") from error


class Logged:
    """A recording in a tracker: what has been sent of it, and its end."""

    def __init__(self, target: Target, folder: Path, rank: int | None = None) -> None:
        self.target, self._name, self._rank = target, folder.resolve().name, rank
        self._tracker: Tracker | None = None
        self._sent_ns = 0
        self.has_warned, self.num_failures, self.retry_s = False, 0, 0.0  # on the monotonic clock

    def update(self, session: Session) -> Tracker:
        """Send the steps that are new, and the figures of the run so far."""
        recording = session.recording
        if self._tracker is None:
            self._tracker = self.target.open_run(_run_of(session, self._name, self._rank))
        points = step_points(recording, self._sent_ns)
        if points:
            self._tracker.log([*points, *figure_point(recording, session.summary)])
            self._sent_ns = (recording.tail or recording.samples[-1]).end_ns
        return self._tracker

    def finish(self, session: Session, report: Report) -> None:
        """Send the rest: card, findings, report and trace."""
        tracker = self.update(session)
        card = Card.of(session)
        values: dict[str, Any] = figures(session.recording, session.summary)
        if card.summary.step_ns is not None:
            values[f"{PREFIX}typical_step_ms"] = card.summary.step_ns.median / 1e6
        tracker.summarize({**values, "verdict": card.verdict, "status": session.recording.status}, str(card))
        keeps_runs = self.target.tracker in TRACKERS
        if session.recording.samples and keeps_runs:
            tracker.add_table("findings", list(_findings(session)))
            tracker.add_file(report.file())
        trace = (session.recording.facts.get("trace") or {}).get("file")
        if trace and keeps_runs and (session.path / trace).is_file():
            tracker.add_file(session.path / trace)
        tracker.close()


def _run_of(session: Session, name: str, rank: int | None) -> Run:
    facts = session.recording.facts
    environment, command = facts.get("environment") or {}, facts.get("command") or {}
    found = {
        "script": " ".join(map(str, command.get("argv") or ())),
        "git_revision": (facts.get("git") or {}).get("revision"),
        **{name: environment.get(name) for name in ("device_name", "torch", "python", "world_size")},
        "config_hash": facts.get("config_hash"),
    }
    parameters = {name: value for name, value in found.items() if value}
    rank = environment.get("rank", 0) if rank is None else rank
    return Run(name, parameters, rank=rank)


def _findings(session: Session) -> Iterator[dict[str, str]]:
    from stepscope.findings.diagnose import diagnose
    from stepscope.findings.finding import saving_texts

    diagnosis = diagnose(session.case)
    for finding in diagnosis.findings:
        saving = " ".join(saving_texts(finding, diagnosis.step_ns)).strip()
        yield {
            "rule": finding.id,
            "finding": finding.sentence,
            "saving": saving,
            "confidence": finding.confidence,
            "fix": finding.fix,
        }


def _log_sweeps(session: Session, target: Target, report: Report) -> int:
    """Log a run for each point of a sweep or of a study's sweeps, and one for the whole with the report."""
    path, name = session.path, session.path.resolve().name
    files = sorted(path.rglob(RESULTS_FILE)) if session.kind is Kind.STUDY else [path]
    num_runs, rows = 1, []
    for file in files:
        sweep = open_session(file).sweep_summary
        of = f"{file.parent.name}: " if len(files) > 1 else ""
        for point in sweep.points:
            parameters = {**point.axes, "status": point.status, "device_name": point.device_name}
            values = _numbers(point)
            tracker = target.open_run(Run(of + _name(point, sweep), parameters, group=name))
            tracker.log([Point(0, time.time(), values)])
            tracker.summarize(values, f"{of}{_name(point, sweep)}: {point.reason or point.status}")
            tracker.close()
            num_runs += 1
            rows.append({"run": of + _name(point, sweep), "status": point.status, "reason": point.reason or ""})
    whole = target.open_run(Run(name, {"runs": num_runs - 1}, group=name))
    whole.add_table("points", rows)
    whole.add_file(report.file())
    whole.close()
    return num_runs


def _name(point: PointSummary, sweep: SweepSummary) -> str:
    return ",".join(f"{axis}={point.axes.get(axis)}" for axis in sweep.varying) or point.hash


def _numbers(point: PointSummary) -> dict[str, float]:
    """Return the figures of a point, by the names that runs have too."""
    time_ns, memory = point.time, point.peak_allocated_bytes or point.peak_resident_bytes
    found = {
        "step_time_ms": None if time_ns is None else time_ns.median / 1e6,
        "step_time_p10_ms": None if time_ns is None else time_ns.p10 / 1e6,
        "step_time_p90_ms": None if time_ns is None else time_ns.p90 / 1e6,
        "tokens_per_second": point.tokens_per_s,
        "mfu": None if point.mfu is None else point.mfu.share,
        "peak_memory_gib": None if memory is None else memory / 2**30,
        "compile_ms": None if point.compile_ns is None else point.compile_ns / 1e6,
        **{name: getattr(point, name) for name in ("loss", "final_loss", "speedup", "max_batch", "num_parameters")},
        **point.facts,
    }
    return {PREFIX + name: value for name, value in found.items() if value is not None}
