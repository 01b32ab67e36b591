"""Our own tracks beside a trace's: steps, phases, modules on the host and on the GPU, findings, memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import polars as pl

from stepscope.analysis.memory.allocator_events import DEVICE_TYPES, memory_devices, memory_timeline
from stepscope.exporters.selection import Selection, nearest
from stepscope.findings.finding import Finding, saving_texts

MOST_POINTS = 50_000  # of a memory counter; of more the lowest and the highest of each stretch are kept


@dataclass
class Span:
    start_ns: int
    end_ns: int
    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """Bars of which any two are apart or one inside the other, in order of their starts, the outer first."""

    name: str
    spans: Sequence[Span]


def tracks_of(selection: Selection, findings: Sequence[Finding]) -> list[Track]:
    """Every track that has something on it."""
    steps = selection.steps.table.select("step", "start_ns", "end_ns")
    found = [
        Track("steps", [Span(start, end, f"step {step}", {"step": step}) for step, start, end in steps.iter_rows()]),
        Track("phases", list(_phases(selection))),
        *_findings(selection, findings),
        *_host_modules(selection),
        *_device_modules(selection),
    ]
    return [track for track in found if track.spans]


def counters_of(selection: Selection) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Allocated and reserved memory of each device while the selection lasts: a name, then times and bytes."""
    for device_type, index in memory_devices(selection.linked):
        kind = DEVICE_TYPES.get(device_type, str(device_type))
        name = kind if kind == "cpu" else f"{kind}:{index}"
        levels = memory_timeline(selection.linked, kind, index, MOST_POINTS)
        levels = levels.filter(pl.col("time_ns").is_between(selection.start_ns, selection.end_ns))
        for what in ("allocated", "reserved"):
            known = levels.drop_nulls(f"{what}_bytes")
            if known.height:
                yield f"memory {what} {name}", known.select("time_ns", f"{what}_bytes").rows()


def lanes(starts: Iterable[int], ends: Iterable[int]) -> list[int]:
    """For bars in order of their starts the lowest lane of each in which no two overlap in part.

    >>> lanes([0, 2, 3, 9], [5, 4, 8, 10])
    [0, 0, 1, 0]
    """
    open_ends: list[list[int]] = []
    chosen = []
    for start, end in zip(starts, ends):
        lane = 0
        while lane < len(open_ends) and not _fits(open_ends[lane], start, end):
            lane += 1
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(end)
        chosen.append(lane)
    return chosen


def _fits(open_ends: list[int], start: int, end: int) -> bool:
    """Whether a bar is after all that are open in a lane, or inside the innermost."""
    while open_ends and open_ends[-1] <= start:
        open_ends.pop()
    return not open_ends or end <= open_ends[-1]


def _phases(selection: Selection) -> Iterator[Span]:
    start, end = selection.start_ns, selection.end_ns
    if selection.step is not None and selection.steps.num:
        start, end = selection.steps.table.select("start_ns", "end_ns").row(0)
    inside = selection.steps.phases.select(
        pl.col("start_ns").clip(start, end), pl.col("end_ns").clip(start, end), pl.col("phase").cast(pl.String)
    )
    for first, last, phase in inside.filter(pl.col("end_ns") > pl.col("start_ns")).iter_rows():
        yield Span(first, last, phase)


def _findings(selection: Selection, findings: Sequence[Finding]) -> Iterator[Track]:
    """One track a finding, more where its places overlap."""
    for finding in findings:
        first, last = selection.start_ns, selection.end_ns
        near = [(start, end) for start, end in finding.places if start < last and end > first]
        places = {(max(first, start), min(last, end)) for start, end in near}
        args = {
            "sentence": finding.sentence,
            "saving": " ".join(saving_texts(finding, None)).rstrip(),
            **{name: getattr(finding, name) for name in ("saving_ns", "saving_bytes", "confidence", "fix")},
        }
        by_lane: dict[int, list[Span]] = {}
        ordered = sorted(places, key=lambda place: (place[0], -place[1]))
        for place, lane in zip(ordered, lanes(*zip(*ordered)) if ordered else []):
            by_lane.setdefault(lane, []).append(Span(*place, finding.id, args))
        for lane, spans in by_lane.items():
            yield Track(f"finding: {finding.id}{f' ({lane + 1})' if lane else ''}", spans)


def _host_modules(selection: Selection) -> Iterator[Track]:
    """The calls of modules, thread by thread; a call that seems to end after the one around it is cut there."""
    calls = selection.host.join(
        selection.linked.modules.calls.select("row"), on="row", how="semi", maintain_order="left"
    )
    names = dict(selection.linked.trace.threads.select("thread", "thread_name").iter_rows())
    for (thread,), part in calls.group_by("thread", maintain_order=True):
        spans: list[Span] = []
        open_ends: list[int] = []
        for start, end, name in part.select("start_ns", "end_ns", pl.col("module").cast(pl.String)).iter_rows():
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            end = min(end, open_ends[-1]) if open_ends else end
            open_ends.append(end)
            spans.append(Span(start, end, name or "?"))
        yield Track(f"modules, {names.get(thread) or f'thread {thread}'}", spans)


def _device_modules(selection: Selection) -> Iterator[Track]:
    """GPU work by module, stream by stream: kernels that follow one another in one module and phase are one bar."""
    paths, key = module_paths(selection), ["device", "stream"]
    texts = pl.col("module", "phase").cast(pl.String)
    work = selection.device.sort(*key, "start_ns", "end_ns").with_columns(texts)
    is_new = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in (*key, "module", "phase"))
    runs = work.group_by(is_new.fill_null(True).cum_sum().alias("run"), maintain_order=True).agg(
        pl.col(*key, "module", "phase", "start_ns").first(),
        pl.col("end_ns").max(),
        num_kernels=pl.len().cast(pl.Int64),
        work_ns=(pl.col("end_ns") - pl.col("start_ns")).sum(),
    )
    for (device, stream), part in runs.group_by(*key, maintain_order=True):
        # A kernel may begin before the one before it has ended: the bar ends where the next begins.
        end = pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1))
        rows = part.with_columns(end.alias("end_ns")).iter_rows(named=True)
        yield Track(f"modules, GPU {device} stream {stream}", _nested(rows, paths))


def _nested(runs: Iterable[Mapping[str, Any]], paths: Mapping[str, tuple[str, ...]]) -> list[Span]:
    """Bars of modules inside those of the modules around them."""
    spans: list[Span] = []
    opened: list[tuple[tuple[str, str | None], Span]] = []
    for run in runs:
        path = paths.get(run["module"] or "", ())
        keys = [(module, run["phase"]) for module in path]
        same = num_same([key for key, _ in opened], keys)
        del opened[same:]
        for module, phase in keys[same:]:
            name = f"{module} (backward)" if phase == "backward" else module
            args = {"module": module, "phase": phase, "num_kernels": 0, "work_ns": 0}
            spans.append(Span(run["start_ns"], run["end_ns"], name, args))
            opened.append(((module, phase), spans[-1]))
        for _, span in opened:
            span.end_ns = max(span.end_ns, run["end_ns"])
            span.args["num_kernels"] += run["num_kernels"]
            span.args["work_ns"] += run["work_ns"]
    return spans


def num_same(one: Iterable[object], other: Iterable[object]) -> int:
    """Return how many items two stacks share, from the outermost.

    >>> num_same("abc", "abd")
    2
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def module_paths(selection: Selection) -> dict[str, tuple[str, ...]]:
    """Each module with those around it, outermost first, as its first call shows them."""
    host, calls = selection.linked.host, selection.linked.modules.calls
    outer = nearest(host, calls["row"]).gather(host["parent"].gather(calls["row"]))
    path_of_row: dict[int, tuple[str, ...]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for row, name, around in zip(calls["row"], calls["module"].cast(pl.String), outer):  # parents have lower rows
        path_of_row[row] = (*path_of_row.get(around, ()), name)
        paths.setdefault(name, path_of_row[row])
    return paths
