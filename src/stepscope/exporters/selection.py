"""The part of a trace that is taken along: a step, a module, or all of it."""

import re
from dataclasses import dataclass, replace
from functools import cached_property

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor, matches
from stepscope.analysis.structure.steps import LABELS, PHASE_PREFIX, Steps, at_times
from stepscope.trace.assemble import nest
from stepscope.trace.tables import Trace


@dataclass(frozen=True)
class Selection:
    """What is kept of a trace. Frames are those of `Linked`, with fewer rows: a `row` is still one of the whole."""

    linked: Linked
    step: int | None
    module: str | None
    host: pl.DataFrame
    device: pl.DataFrame
    device_ranges: pl.DataFrame
    syncs: pl.DataFrame
    memory: pl.DataFrame

    @property
    def is_whole(self) -> bool:
        return self.step is None and self.module is None

    @cached_property
    def start_ns(self) -> int:
        return int(self._times("start_ns").min() or 0)  # type: ignore[arg-type]  # numbers

    @cached_property
    def end_ns(self) -> int:
        return int(self._times("end_ns").max() or 0)  # type: ignore[arg-type]  # numbers

    @cached_property
    def steps(self) -> Steps:
        table = self.linked.steps.table
        if self.step is not None:
            table = table.filter(pl.col("step") == self.step)
        return replace(self.linked.steps, table=table)

    @cached_property
    def trace(self) -> Trace:
        """The kept part as a trace of its own: parents and own times are those of what is left."""
        trace = self.linked.trace
        if self.is_whole:
            return trace
        kept = {
            name: getattr(trace, name).join(getattr(self, name).select("event"), on="event", how="semi")
            for name in ("host", "device", "device_ranges", "syncs", "memory")
        }
        events = pl.concat([self.host["event"], self.device["event"]]).implode()
        collectives = trace.collectives.filter(pl.col("event").is_in(events))
        return replace(trace, **{**kept, "host": nest(kept["host"])}, collectives=collectives)

    def _times(self, side: str) -> pl.Series:
        return pl.concat([self.host[side], self.device[side], self.memory["time_ns"]])


def select(linked: Linked, step: int | None = None, module: str | None = None) -> Selection:
    """The part of a trace that belongs to a step and to a module, as far as they are named.

    Of a module: the host's events inside its calls, their backward, the GPU work of both, what launched that work,
    and what is around the calls (outer modules, labels of steps and phases), so that the part reads as the whole did.
    """
    trace = linked.trace
    device, memory, syncs, ranges = linked.device, linked.memory, trace.syncs, trace.device_ranges
    if step is None and module is None:
        return Selection(linked, None, None, linked.host, device, ranges, syncs, memory)
    is_kept = pl.repeat(True, linked.host.height, eager=True)
    if step is not None:
        is_step = pl.col("step") == step
        is_kept = (linked.host["step"] == step).fill_null(False)
        device, memory = device.filter(is_step), memory.filter(is_step)
        syncs = at_times(syncs, linked.steps, "start_ns").filter(is_step).drop("step", "phase")
    if module is not None:
        inside = _inside(linked, module)
        is_kept &= inside | _around(linked, inside)
        device = device.filter(inside.gather(device["op"]).fill_null(False))
        memory = memory.filter(inside.gather(memory["op"]).fill_null(False))
    # What launched the work comes with it, wherever that was.
    is_kept = is_kept.scatter(pl.concat([device["launch"], device["op"]]).drop_nulls().unique(), True)
    host = linked.host.filter(is_kept)
    if module is not None:
        syncs = syncs.filter(pl.col("correlation").is_in(host["correlation"].drop_nulls().unique().implode()))
    return Selection(linked, step, module, host, device, _ranges(ranges, host, device), syncs, memory)


def module_names(linked: Linked) -> list[str]:
    """Every module that a trace names, in the order of their first calls."""
    names: list[str] = linked.modules.calls["module"].cast(pl.String).unique(maintain_order=True).to_list()
    return names


def matching(names: list[str], asked: str) -> list[str]:
    """The modules that are meant; a `*` stands for every number, as in `stepscope analyze`.

    >>> matching(["blocks.0.mlp", "blocks.1.mlp", "blocks.1.norm"], "blocks.*.mlp")
    ['blocks.0.mlp', 'blocks.1.mlp']
    """
    pattern = re.compile(r"\d+".join(map(re.escape, asked.split("*"))))
    return [name for name in names if name == asked or pattern.fullmatch(name)]


def _inside(linked: Linked, module: str) -> pl.Series:
    """Of each host event whether it runs in a call of the module, or is the backward of one that does."""
    host, calls = linked.host, linked.modules.calls
    meant = pl.Series(matching(module_names(linked), module), dtype=pl.String).implode()
    inside = nearest(host, calls.filter(calls["module"].cast(pl.String).is_in(meant))["row"]).is_not_null()
    return inside | inside.gather(host["forward"]).fill_null(False)


def nearest(host: pl.DataFrame, rows: pl.Series) -> pl.Series:
    """Of each host event the innermost of some rows that it is in, or is."""
    return ancestor(host, pl.zeros(host.height, pl.Boolean, eager=True).scatter(rows, True))


def _around(linked: Linked, inside: pl.Series) -> pl.Series:
    """Of each host event whether it is a label of a step or a phase, or a module call around one that is inside."""
    host = linked.host
    found = (host["kind"] == "annotation") & matches(host["name"], f"{LABELS}|^{re.escape(PHASE_PREFIX)}")
    call, outer = nearest(host, linked.modules.calls["row"]), inside.arg_true().cast(pl.UInt32)
    while outer.len():
        outer = call.gather(host["parent"].gather(outer)).drop_nulls().unique()
        found = found.scatter(outer, True)
    return found


def _ranges(ranges: pl.DataFrame, host: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    """The annotations on the GPU whose label is kept, as far as they lie over GPU work that is."""
    if device.is_empty() or ranges.is_empty():
        return ranges.head(0)
    names = host["name"].filter(host["kind"] == "annotation").cast(pl.String).unique().implode()
    start, end = device["start_ns"].min(), device["end_ns"].max()
    return ranges.filter(
        pl.col("name").cast(pl.String).is_in(names),
        pl.col("start_ns") >= start,
        pl.col("start_ns") + pl.col("duration_ns") <= end,
    )
