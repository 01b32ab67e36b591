"""Two sides, opened, as a comparison: reads what belongs together and pairs it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.analysis.comparison import compare as sides_of
from stepscope.analysis.comparison.compare import ASPECTS, NO_TRACE, Comparison, Gate, Pair, Parts, Subject
from stepscope.analysis.comparison.metrics import THRESHOLD_SHARE
from stepscope.analysis.comparison.subjects import idle_ns, one_side, pair_points, point_subject, recording_subject
from stepscope.analysis.comparison.sweeps import PointSummary, varying_axes
from stepscope.analysis.comparison.whole_runs import WholeRuns, compare_runs
from stepscope.errors import NotComparableError, StepscopeError, UsageError
from stepscope.session.goodput import goodput_of
from stepscope.session.job import of_all_ranks, processes_of
from stepscope.session.session import Progress, Session, open_session
from stepscope.trace.kind import Kind

_NAMES = {Kind.RECORDING: "recording", Kind.SWEEP: "bench", Kind.TRACE: "trace", Kind.RANKS: "trace"}
"""What can be compared, by the name that a comparison calls it."""
_IN_WORDS = {"recording": "a recording", "bench": "a bench result", "trace": "a trace"}
NO_MEMORY = "no memory window: stepscope run records one, unless --no-memory is given or the run ends before"


def open_sides(
    base: Sequence[Path], new: Sequence[Path], use_cache: bool = True, progress: Progress | None = None
) -> tuple[list[Session], list[Session]]:
    """Return the sessions of both sides; reading each is an equal part of the progress."""
    paths = [*base, *new]

    def part(number: int) -> Progress | None:
        return None if progress is None else lambda share: progress((number + share) / len(paths))

    sessions = [open_session(path, use_cache=use_cache, progress=part(i)) for i, path in enumerate(paths)]
    return sessions[: len(base)], sessions[len(base) :]


def compare(
    base: Sequence[Session],
    new: Sequence[Session],
    threshold_share: float = THRESHOLD_SHARE,
    allow: Collection[str] = (),
    gates: Sequence[Gate] = (),
) -> Comparison:
    """Return the comparison of recordings, bench results or traces; NotComparableError for different kinds.

    A side may be several recordings or traces of one thing: then whole runs are the samples.
    """
    unknown = [aspect for aspect in allow if aspect not in ASPECTS]
    if unknown:
        raise UsageError(f"--allow {', '.join(unknown)}: it is one of {', '.join(ASPECTS)}")
    sides, every = (base, new), [*base, *new]
    kind = _common_kind(every)
    has_runs = len(every) > 2
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    if kind == "bench":
        if has_runs:
            raise UsageError("of bench results name one on each side: only recordings and traces may be several")
        pairs, only = _pairs_of_sweeps(base[0], new[0], threshold_share, allow)
    else:
        places = [session.path.resolve() for session in every]
        for number, session in enumerate(every):
            if has_runs and places[number] in places[:number]:  # two of one run would look like runs that agree
                raise UsageError(f"{session.path} is named twice: of several runs each counts once")
        subject = _recording if kind == "recording" else _trace
        subjects = [[subject(session) for session in side] for side in sides]
        first, second = (one_side(side) if has_runs else side[0] for side in subjects)
        pairs = [sides_of.compare_pair(first, second, threshold_share, allow)]
    results = sides_of.decide(gates, pairs, only[0])
    names = [", ".join(str(session.path) for session in side) for side in sides]
    runs = _whole_runs(base[0], new[0]) if kind == "recording" and not has_runs else None
    return Comparison(kind, names[0], names[1], threshold_share, tuple(pairs), *only, results, runs)


def _whole_runs(base: Session, new: Session) -> WholeRuns | None:
    """Return both runs from start to end; None if one has no history, as before Stepscope recorded whole runs."""
    if base.run.began is None or new.run.began is None:
        return None
    before, after = goodput_of(base), goodput_of(new)
    return compare_runs(base.run, before, new.run, after) if before is not None and after is not None else None


def _common_kind(sessions: Sequence[Session]) -> str:
    for session in sessions:
        if session.kind not in _NAMES:
            raise UsageError(f"{session.path} is a {session.kind.value}: compare recordings, bench results or traces")
    first, *others = (_NAMES[session.kind] for session in sessions)
    for session, kind in zip(sessions[1:], others):
        if kind != first:
            hint = "; a recording's own trace is in its folder trace/" if "bench" not in (kind, first) else ""
            raise NotComparableError(
                f"{sessions[0].path} is {_IN_WORDS[first]} and {session.path} is {_IN_WORDS[kind]}: "
                f"name two of one kind{hint}"
            )
    return first


def _trace(session: Session) -> Subject:
    analysis = session.analyze()  # first: it says what to install if reading needs more
    from stepscope.analysis.comparison.trace_subjects import trace_subject

    return trace_subject(analysis, str(session.path))


def _recording(session: Session) -> Subject:
    """Return a recording with what its trace and memory window tell; without them, with what to run."""
    recording, summary = session.recording, of_all_ranks(session.summary, processes_of(session))
    account, missing = None, {}
    try:
        account = session.memory.account if session.has_memory_window else None
        missing = {} if session.has_memory_window else {"memory": NO_MEMORY}
    except StepscopeError as error:
        missing = {"memory": str(error)}
    others_share = session.run.share_of_others([sample.step for sample in recording.window("clean")])
    subject = recording_subject(recording, summary, account, missing, others_share)
    subject = replace(subject, notes=(*subject.notes, *session.run.problems))
    rank = recording.facts.get("environment", {}).get("rank", 0)
    clean_ns = None if summary.step_ns is None else summary.step_ns.median
    tables, lacks = _time_tables(lambda: session, rank, clean_ns, idle_ns(summary))
    # The phases of the recording are of clean steps: the trace's add nothing to them.
    tables.pop("phase", None)
    return _with_tables(subject, tables, lacks)


def _point(session: Session, row: Mapping[str, Any], point: PointSummary) -> Subject:
    """Return a row of a sweep, with what its trace tells if one was kept."""
    sweep = session.sweep
    environment = sweep.environments.get(str(row.get("environment_hash")), {})
    subject = point_subject(point, row, environment, {})
    subject = replace(subject, notes=(*subject.notes, *sweep.warnings))
    if point.time is None or not row.get("trace"):
        why = "no trace was kept: stepscope bench --trace keeps one of each point"
        return _with_tables(subject, {}, {NO_TRACE: why})
    file = sweep.folder / str(row["trace"])
    if not file.resolve().is_relative_to(sweep.folder.resolve()):
        return _with_tables(subject, {}, {NO_TRACE: f"{file} is not in the sweep's folder"})
    opened = partial(open_session, file, use_cache=session.use_cache)
    return _with_tables(subject, *_time_tables(opened, None, point.time.median, None))


def _time_tables(
    opened: Callable[[], Session], rank: int | None, clean_ns: float | None, clean_idle_ns: float | None
) -> tuple[dict[str, tuple[Parts, ...]], dict[str, str]]:
    try:
        ranks = opened().analyze(rank=rank).ranks
    except StepscopeError as error:
        return {}, {NO_TRACE: str(error)}
    from stepscope.analysis.comparison.trace_subjects import time_tables

    return time_tables(ranks, clean_ns, clean_idle_ns)


def _with_tables(subject: Subject, tables: dict[str, tuple[Parts, ...]], lacks: dict[str, str]) -> Subject:
    return replace(subject, tables={**tables, **subject.tables}, missing={**subject.missing, **lacks})


def _pairs_of_sweeps(
    base: Session, new: Session, threshold_share: float, allow: Collection[str]
) -> tuple[list[Pair], tuple[tuple[str, ...], tuple[str, ...]]]:
    before, after = base.sweep_summary, new.sweep_summary
    places, about = pair_points(before.points, after.points)
    if not places:
        raise NotComparableError(
            f"{base.path} and {new.path} have no point in common: neither a hash, nor points that differ only in "
            "knobs with one value on each side"
        )
    axes = [point.axes for point in (*before.points, *after.points)]
    varying = [name for name in varying_axes(axes)[0] if name not in about]

    def name(point: PointSummary) -> str:
        return ", ".join(f"{axis}={point.axes.get(axis)}" for axis in varying) or point.hash

    pairs = []
    for i, k in places:
        first = _point(base, base.sweep.rows[i], before.points[i])
        second = _point(new, new.sweep.rows[k], after.points[k])
        pair_name = name(before.points[i]) if len(places) > 1 or varying else None
        pairs.append(sides_of.compare_pair(first, second, threshold_share, allow, pair_name))
    paired = {i for i, _ in places}, {k for _, k in places}
    left = [
        tuple(name(point) for place, point in enumerate(summary.points) if place not in places_of)
        for summary, places_of in zip((before, after), paired)
    ]
    return pairs, (left[0], left[1])
