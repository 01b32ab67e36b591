"""Figures about torch.compile: recompiles by guard and sizes, seconds by stage, break-even."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.trace.compile_file import count_of, entries

_COMPILE_ID = re.compile(r"^\d+/\d+: ")
_MISMATCH = re.compile(r"tensor '(.*)' (size|stride) mismatch at index (\d+)\. expected (\d+), actual (\d+)")
_EQUAL = re.compile(r"^(.*?) == (.*)$")
STAGES = ("dynamo", "autograd", "inductor", "kernels")


@dataclass(frozen=True)
class Recompiled:
    """Recompiles of one function for one guard."""

    frame: str
    guard: str  # the guard without the value that changed
    values: tuple[str, ...]  # the sizes, or other values, that were seen, in order
    count: int
    place: str | None  # the user's line that the guard refers to; None if torch does not report it
    is_size: bool


@dataclass(frozen=True)
class CompilerSummary:
    """What torch.compile did in a run."""

    num_compiles: int
    num_graphs: int | None  # none if the recording does not contain it
    num_ops: int | None  # ops captured in all graphs
    seconds: float
    seconds_by_stage: Mapping[str, float]  # in the order of the stages; empty if torch does not report it
    graph_breaks: tuple[Mapping[str, Any], ...]  # `reason`, `place`, `count`, `runs_eagerly`; the most frequent first
    recompiles: tuple[Recompiled, ...]  # the most frequent first
    limit_hits: tuple[Mapping[str, Any], ...]  # `frame`, `count`; the frame runs eagerly from then on
    dynamic_dimensions: tuple[Mapping[str, Any], ...]  # `source`, `sizes`, `place`
    cuda_graphs: Mapping[str, int] | None
    cuda_graph_skips: tuple[Mapping[str, Any], ...]
    caches: Mapping[str, Mapping[str, int]]
    failures: tuple[Mapping[str, Any], ...]
    """`reason`, `place`, `count` of failures without a graph break at the same place."""
    frames: tuple[Mapping[str, Any], ...]
    num_calls: int  # kernel and library calls in the compiled code
    num_placed_calls: int  # calls whose module is known
    untold: tuple[str, ...]  # what this version of torch does not report
    compiled_ns: float | None = None
    eager_ns: float | None = None
    break_even: float | None = None
    """Steps until the compile time is recovered; infinite if a compiled step is not faster."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; an infinite break-even is null, with `pays` false."""
        values = dataclasses.asdict(self)
        if self.break_even is not None:
            values["pays"] = math.isfinite(self.break_even)
            values["break_even"] = self.break_even if values["pays"] else None
        return {**values, "num_recompiles": self.num_recompiles, "num_graph_breaks": self.num_graph_breaks}

    @property
    def num_recompiles(self) -> int:
        return sum(entry.count for entry in self.recompiles)

    @property
    def num_graph_breaks(self) -> int:
        return sum(map(count_of, self.graph_breaks))


def compiler_summary(
    report: Mapping[str, Any], compiled_ns: float | None = None, eager_ns: float | None = None
) -> CompilerSummary:
    """Return the figures of `compile.json`, compared with compiled and eager step times if given."""
    stages, graphs = report.get("seconds_by_stage", {}), entries(report, "graphs")
    calls = [call for graph in entries(report, "compiled_calls") for call in graph["calls"]]
    modules = [call[1] for call in calls if len(call) == 2]
    seconds = float(report.get("compile_seconds", 0))
    breaks, dynamic = entries(report, "graph_breaks"), entries(report, "dynamic_dimensions")
    recompiles = _recompiles(entries(report, "recompiles"), {e["source"]: e.get("place") for e in dynamic})
    return CompilerSummary(
        num_compiles=report.get("num_compiles", 0),
        num_graphs=report.get("num_graphs"),
        num_ops=sum(graph.get("num_ops") or 0 for graph in graphs) if graphs else None,
        seconds=seconds,
        seconds_by_stage={stage: float(stages[stage]) for stage in STAGES if stage in stages},
        graph_breaks=_by_count(breaks),
        recompiles=recompiles,
        limit_hits=_by_count(entries(report, "recompile_limit_hits")),
        dynamic_dimensions=tuple(dynamic),
        cuda_graphs=report.get("cuda_graphs"),
        cuda_graph_skips=_by_count(entries(report, "cuda_graph_skips")),
        caches=report.get("caches", {}),
        failures=_by_count([failure for failure in entries(report, "failures") if not _is_reported(failure, breaks)]),
        frames=tuple(entries(report, "frames")),
        num_calls=len(modules),
        num_placed_calls=sum(module is not None for module in modules),
        untold=tuple(_untold(report, recompiles)),
        compiled_ns=compiled_ns,
        eager_ns=eager_ns,
        break_even=break_even(seconds, compiled_ns, eager_ns),
    )


def break_even(seconds: float, compiled_ns: float | None, eager_ns: float | None) -> float | None:
    """Return steps until compiling pays off: compile seconds ÷ saving per step; None if a time is unknown.

    >>> break_even(2.0, compiled_ns=1e6, eager_ns=3e6)
    1000.0
    """
    if compiled_ns is None or eager_ns is None:
        return None
    saved_ns = eager_ns - compiled_ns
    return seconds * 1e9 / saved_ns if saved_ns > 0 else math.inf


def _untold(report: Mapping[str, Any], recompiles: tuple[Recompiled, ...]) -> list[str]:
    if "num_graphs" not in report:
        return ["the recording is from an older Stepscope, without stages, caches, dynamic sizes and graphs"]
    untold = []
    if not report.get("seconds_by_stage") and report.get("num_compiles"):
        untold.append("this torch version does not report seconds by stage")
    if any(entry.place is None and not entry.is_size for entry in recompiles):
        untold.append("this torch version does not report the line of every guard (2.11 and later do)")
    caches = report.get("caches", {})
    if caches.get("graphs") and not caches.get("autograd"):
        untold.append("hits of the autograd cache: it is off, or this torch version does not report them")
    return untold


def _recompiles(found: list[dict[str, Any]], places: Mapping[str, Any]) -> tuple[Recompiled, ...]:
    """Return one entry per function and guard; the first listed guard is that of the latest compile.

    `places` has the line where a size is first used, by its expression, which torch does not report with a guard.
    """
    groups: dict[tuple[str, str], list[tuple[list[str], str | None, bool]]] = {}
    for entry in found:
        first = next(iter(entry["failed_guards"]), "torch gives no reason")
        guard, values, is_size = split_guard(first)
        place = entry.get("place") or places.get(_size_of(first) or "")
        groups.setdefault((entry["frame"], guard), []).append((values, place, is_size))
    grouped = [
        Recompiled(
            frame=frame,
            guard=guard,
            values=tuple(dict.fromkeys(value for values, _, _ in group for value in values)),
            count=len(group),
            place=next((place for _, place, _ in group if place), None),
            is_size=group[0][2],
        )
        for (frame, guard), group in groups.items()
    ]
    return tuple(sorted(grouped, key=lambda entry: -entry.count))


def split_guard(text: str) -> tuple[str, list[str], bool]:
    """Return a guard without its value, its values, and whether they are tensor sizes.

    >>> split_guard("0/0: tensor 'x' size mismatch at index 0. expected 4, actual 6")
    ("size 0 of 'x'", ['4', '6'], True)
    >>> split_guard("0/1: self.step == 1")
    ('self.step', ['1'], False)
    """
    text = _COMPILE_ID.sub("", text).strip()
    if match := _MISMATCH.search(text):
        tensor, what, index, expected, actual = match.groups()
        return f"{what} {index} of '{tensor}'", [expected, actual], True
    if match := _EQUAL.match(text):
        return match.group(1).strip(), [match.group(2).strip()], False
    return text, [], False


def _size_of(guard: str) -> str | None:
    """Return the expression of the size in a guard, as Dynamo writes it when it becomes dynamic.

    >>> _size_of("0/0: tensor 'x' size mismatch at index 1. expected 8, actual 9")
    "L['x'].size()[1]"
    """
    match = _MISMATCH.search(guard)
    if match is None or match.group(2) != "size":
        return None
    tensor = re.sub(r"^(?!L\[)\w+", lambda found: f"L['{found.group()}']", match.group(1))
    return f"{tensor}.size()[{match.group(3)}]"


def _is_reported(failure: Mapping[str, Any], breaks: list[dict[str, Any]]) -> bool:
    """Return whether a graph break at the same line already shows that its function runs eagerly."""
    place = failure.get("place")
    return place is not None and any(
        entry.get("runs_eagerly") and str(entry.get("place")).startswith(f"{place} in ") for entry in breaks
    )


def _by_count(found: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    return tuple(sorted(found, key=count_of, reverse=True))
