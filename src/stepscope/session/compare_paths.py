"""From paths to a comparison: tells what they are, reads both sides, pairs what belongs together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison.compare import ASPECTS, NO_TRACE, Pair, Parts, Subject, compare_pair
from stepscope.analysis.comparison.gates import Comparison, Gate, decide
from stepscope.analysis.comparison.metrics import THRESHOLD_SHARE
from stepscope.analysis.comparison.repeated_runs import one_side
from stepscope.analysis.comparison.subjects import idle_ns, pair_points, point_subject, recording_subject
from stepscope.analysis.comparison.sweeps import PointSummary, SweepSummary, varying_axes
from stepscope.document.card import Card
from stepscope.document.text.sweeps import sweep_of
from stepscope.errors import MissingDependencyError, NotComparableError, RecordingError, StepscopeError, UsageError
from stepscope.session.memory_view import analyze_memory
from stepscope.trace.recording import RECORDING_FILE
from stepscope.trace.sweep_file import Sweep, is_sweep, read_sweep

if TYPE_CHECKING:
    from stepscope.analysis.ranks.all_ranks import Analysis

RECORDING, BENCH, TRACE = "recording", "bench", "trace"
_IN_WORDS = {RECORDING: "a recording", BENCH: "a bench result", TRACE: "a trace"}
Progress = Callable[[float], None]


def compare_paths(
    base: Path | Sequence[Path],
    new: Path | Sequence[Path],
    threshold_share: float = THRESHOLD_SHARE,
    allow: Collection[str] = (),
    gates: Sequence[Gate] = (),
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two recordings, two bench results or two traces; NotComparableError for two of different kinds.

    A side may be several recordings or traces of one thing: then whole runs are the samples.
    """
    unknown = [aspect for aspect in allow if aspect not in ASPECTS]
    if unknown:
        raise UsageError(f"--allow {', '.join(unknown)}: it is one of {', '.join(ASPECTS)}")
    sides = [[each] if isinstance(each, Path) else list(each) for each in (base, new)]
    kind = _common_kind([path for side in sides for path in side])
    has_runs = any(len(side) > 1 for side in sides)
    read = _Reader(use_cache, progress, sum(map(len, sides)))
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    if kind == BENCH:
        if has_runs:
            raise UsageError("of bench results name one on each side: only recordings and traces may be several")
        pairs, only = _pairs_of_sweeps(sides[0][0], sides[1][0], threshold_share, allow, read)
    else:
        if has_runs:
            _refuse_twice([path for side in sides for path in side])
        subjects = [
            [read.recording(path) if kind == RECORDING else read.trace(path) for path in side] for side in sides
        ]
        first, second = (one_side(side) if has_runs else side[0] for side in subjects)
        pairs = [compare_pair(first, second, threshold_share, allow)]
    results = decide(gates, pairs, only[0])
    names = [", ".join(map(str, side)) for side in sides]
    return Comparison(kind, names[0], names[1], threshold_share, tuple(pairs), *only, results)


def _common_kind(paths: Sequence[Path]) -> str:
    kinds = [kind_of(path) for path in paths]
    for path, kind in zip(paths, kinds):
        if kind != kinds[0]:
            hint = (
                "; a recording's own trace is in its folder trace/" if {kind, kinds[0]} == {RECORDING, TRACE} else ""
            )
            raise NotComparableError(
                f"{paths[0]} is {_IN_WORDS[kinds[0]]} and {path} is {_IN_WORDS[kind]}: name two of one kind{hint}"
            )
    return kinds[0]


def _refuse_twice(runs: Sequence[Path]) -> None:
    """UsageError for a run that is named twice: two of it would look like runs that agree."""
    places = [path.resolve() for path in runs]
    for number, path in enumerate(runs):
        if places.index(places[number]) != number:
            raise UsageError(f"{path} is named twice: of several runs each counts once")


def kind_of(path: Path) -> str:
    """What a path is, by what is in it."""
    if not path.exists():
        raise UsageError(f"there is no {path}")
    if path.is_dir() and (path / RECORDING_FILE).is_file():
        return RECORDING
    return BENCH if is_sweep(path) else TRACE


class _Reader:
    """Reads one path after the other; traces tell how far they are, each an equal part of the work."""

    def __init__(self, use_cache: bool, progress: Progress | None, num_paths: int) -> None:
        self._use_cache, self._progress, self._num_paths = use_cache, progress, num_paths
        self._num_read = 0

    def analysis(self, path: Path, rank: int | None = None) -> Analysis:
        """The account of a path's traces."""
        try:
            from stepscope.session.traces import analyze_paths
        except ModuleNotFoundError as error:
            if error.name not in ("polars", "msgspec"):
                raise
            raise MissingDependencyError(f"{error.name} is missing: pip install polars msgspec") from None
        before = min(self._num_read, self._num_paths - 1) / self._num_paths
        self._num_read += 1

        def report(share: float) -> None:
            if self._progress is not None:
                self._progress(before + share / self._num_paths)

        return analyze_paths([path], rank=rank, use_cache=self._use_cache, progress=report)

    def trace(self, path: Path) -> Subject:
        """A trace, or a folder of ranks."""
        analysis = self.analysis(path)
        from stepscope.analysis.comparison.trace_subjects import trace_subject

        return trace_subject(analysis, str(path))

    def recording(self, folder: Path) -> Subject:
        """A recording with what its trace and its memory window tell; without them, with what to run."""
        card = Card.of(folder)
        account, missing = None, {}
        try:
            account = analyze_memory([folder]).reports[0].account
        except StepscopeError as error:
            missing["memory"] = str(error)
        try:
            subject = recording_subject(card.recording, card.summary, account, missing)
        except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError) as error:
            what = f"{type(error).__name__}: {error}"
            raise RecordingError(f"{folder} holds a recording with a field of the wrong kind ({what})") from None
        rank = (card.recording.facts.get("environment") or {}).get("rank") or 0
        step_ns = card.summary.step_ns
        clean_ns = None if step_ns is None else step_ns.median
        tables, lacks = self._time_tables(folder, rank, clean_ns, idle_ns(card.summary))
        # The card's phases are of clean steps: the trace's add nothing to them.
        tables.pop("phase", None)
        return _with_tables(subject, tables, lacks)

    def point(self, sweep: Sweep, row: Mapping[str, Any], point: PointSummary) -> Subject:
        """A row of a sweep, with what its trace tells, if it was kept."""
        environment = sweep.environments.get(str(row.get("environment_hash")), {})
        subject = point_subject(point, row, environment, {})
        subject = replace(subject, notes=(*subject.notes, *sweep.warnings))
        if point.time is None or not row.get("trace"):
            why = "no trace was kept: stepscope bench --trace keeps one of each point"
            return _with_tables(subject, {}, {NO_TRACE: why})
        file = sweep.folder / str(row["trace"])
        if not file.resolve().is_relative_to(sweep.folder.resolve()):
            return _with_tables(subject, {}, {NO_TRACE: f"{file} is not in the sweep's folder"})
        return _with_tables(subject, *self._time_tables(file, None, point.time.median, None))

    def _time_tables(
        self, path: Path, rank: int | None, clean_ns: float | None, clean_idle_ns: float | None
    ) -> tuple[dict[str, tuple[Parts, ...]], dict[str, str]]:
        try:
            ranks = self.analysis(path, rank).ranks
        except StepscopeError as error:
            return {}, {NO_TRACE: str(error)}
        from stepscope.analysis.comparison.trace_subjects import time_tables

        return time_tables(ranks, clean_ns, clean_idle_ns)


def _with_tables(subject: Subject, tables: dict[str, tuple[Parts, ...]], lacks: dict[str, str]) -> Subject:
    return replace(subject, tables={**tables, **subject.tables}, missing={**subject.missing, **lacks})


def _pairs_of_sweeps(
    base: Path, new: Path, threshold_share: float, allow: Collection[str], read: _Reader
) -> tuple[list[Pair], tuple[tuple[str, ...], tuple[str, ...]]]:
    sweeps = read_sweep(base), read_sweep(new)
    before, after = (_summary(sweep) for sweep in sweeps)
    places, about = pair_points(before.points, after.points)
    if not places:
        raise NotComparableError(
            f"{base} and {new} have no point in common: neither a hash, nor points that differ only in knobs with "
            "one value on each side"
        )
    axes = [point.axes for point in (*before.points, *after.points)]
    varying = [name for name in varying_axes(axes)[0] if name not in about]

    def name(point: PointSummary) -> str:
        return ", ".join(f"{axis}={point.axes.get(axis)}" for axis in varying) or point.hash

    pairs = []
    for i, k in places:
        first = read.point(sweeps[0], sweeps[0].rows[i], before.points[i])
        second = read.point(sweeps[1], sweeps[1].rows[k], after.points[k])
        pair_name = name(before.points[i]) if len(places) > 1 or varying else None
        pairs.append(compare_pair(first, second, threshold_share, allow, pair_name))
    paired = {i for i, _ in places}, {k for _, k in places}
    left = [
        tuple(name(point) for place, point in enumerate(summary.points) if place not in places_of)
        for summary, places_of in zip((before, after), paired)
    ]
    return pairs, (left[0], left[1])


def _summary(sweep: Sweep) -> SweepSummary:
    try:
        return sweep_of(list(sweep.rows), sweep.environments)
    except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise RecordingError(f"{sweep.folder} holds a row with a field of the wrong kind ({what})") from None
