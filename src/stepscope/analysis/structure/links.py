"""Links between events: launch and kernel, op and launch, backward and forward, module, step, phase."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import polars as pl

from stepscope.analysis.kernels.kernel_classes import classify_kernels
from stepscope.analysis.structure.modules import Modules, find_modules, of_graph_kernels, with_compiled_code
from stepscope.analysis.structure.nesting import ancestor, innermost_open, last_started, matches
from stepscope.analysis.structure.steps import LABELS, Steps, at_times, find_steps
from stepscope.analysis.time.gpu_time import with_activity
from stepscope.trace.tables import Trace

_HIGHEST = 64  # rows around a launch
MOST_THREADS = 64  # on which one sequence number is looked for: real ones occur on one or two


@dataclass(frozen=True)
class Share:
    """How many events could not be linked, out of how many."""

    num: int
    num_all: int

    @property
    def share(self) -> float:
        return self.num / self.num_all if self.num_all else 0.0

    def to_json(self) -> dict[str, float]:
        return {"num": self.num, "num_all": self.num_all, "share": self.share}


@dataclass(frozen=True)
class Linked:
    """One rank's trace with its links. A link is the `row` of a host event, or null."""

    trace: Trace
    host: pl.DataFrame
    """Host table with `row`, `end_ns`, `op` (innermost at or above), `forward` (of a backward op), `step`, `phase`,
    `module`."""
    device: pl.DataFrame
    """Device table by time, with `end_ns`, `activity`, `launch`, `op`, `op_name`, `module`, `class`, and the `step`
    and `phase` of its launch (null if neither launch nor op is in the trace)."""
    memory: pl.DataFrame  # memory table by time, with `op`, `step`, `phase`, `module`
    steps: Steps
    modules: Modules
    unlinked: dict[str, Share]  # events that could not be linked, by kind of link

    @cached_property
    def above(self) -> dict[int, list[int]]:
        """By event of GPU work: the row of its launch, else its op, and the rows around that, innermost first."""
        parents = self.host["parent"].to_list()
        chains: dict[int, list[int]] = {}
        launches = self.device.select("event", pl.coalesce("launch", "op").alias("row")).drop_nulls("row").rows()
        for _, row in launches:
            if row not in chains:
                chains[row], at = [], row
                while at is not None and len(chains[row]) < _HIGHEST:
                    chains[row].append(at)
                    at = parents[at]
        return {event: chains[row] for event, row in launches}

    @cached_property
    def num_below(self) -> Counter[int]:
        """How much GPU work each row of the host has in it."""
        return Counter(chain.from_iterable(self.above.values()))

    @cached_property
    def is_op(self) -> list[bool]:
        return (self.host["kind"] == "op").to_list()


def link(trace: Trace, steps: Steps | None = None) -> Linked:
    """Return a trace with all links; pass `steps` if they are already known."""
    # Old profilers recorded labels as ops.
    is_label = (trace.host["kind"] == "op") & matches(trace.host["name"], LABELS)
    kind = trace.host["kind"].zip_with(~is_label, pl.Series(["annotation"], dtype=trace.host.schema["kind"]))
    end = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    events = trace.host.with_columns(kind, end).with_row_index("row")
    # Polars releases the GIL, so two links at a time use two cores.
    with ThreadPoolExecutor(2) as pool:
        finding = pool.submit(lambda: steps or find_steps(events))
        host = events.with_columns(_ops(events), _forwards(events))
        modules = with_compiled_code(host, find_modules(host), trace.compiler)
        found = finding.result()
        host = at_times(host, found, "start_ns").with_columns(modules.of_rows(host))
        linking = pool.submit(_memory, trace.memory, host, found)
        device = of_graph_kernels(_device(trace.device, host, found), host, trace.compiler)
        memory = linking.result()
    return Linked(trace, host, device, memory, found, modules, _unlinked(host, device, memory, modules, found))


def _ops(host: pl.DataFrame) -> pl.Series:
    """Return the op of each host event: the one named by a launch's external id, else the innermost around it."""
    nested = ancestor(host, host["kind"] == "op").alias("op")
    calls = host.select("row", "external_id").filter(host["kind"].is_in(["runtime", "driver"]))
    is_same = host["external_id"].gather(nested.gather(calls["row"])) == calls["external_id"]
    named = _by_external_id(host, calls.filter(~is_same.fill_null(False)))
    return nested.scatter(named["row"], named["op"])


def _by_external_id(host: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Return `row` and `op` of the events whose external id names an op."""
    # Only ops that are asked for: few launches are outside of theirs, and a table of all ops by id is large.
    asked = events["external_id"].unique().implode()
    ops = host.select("external_id", pl.col("row").alias("op")).filter(
        host["external_id"].is_in(asked) & (host["kind"] == "op") & (host["external_id"] > 0)
    )
    # Ids that many ops share must not multiply rows.
    return events.join(ops.unique("external_id", keep="first", maintain_order=True), on="external_id")


def _forwards(host: pl.DataFrame) -> pl.Series:
    """Return the forward op of everything under a backward op: the last op with its sequence number on its thread."""
    none = pl.repeat(None, host.height, dtype=pl.UInt32, eager=True).alias("forward")
    numbered = host.select("row", "thread", "sequence", "forward_thread").filter(
        (host["kind"] == "op") & (host["sequence"] >= 0)
    )
    back = numbered.filter(pl.col("forward_thread") > 0).select("row", "sequence", "forward_thread")
    ahead = (
        numbered.filter((pl.col("forward_thread") == 0) | pl.col("forward_thread").is_null())
        .group_by("sequence", "thread")
        .agg(pl.col("row").max().alias("forward"))
    )
    ahead = ahead.filter(pl.col("thread").rank("ordinal").over("sequence") <= MOST_THREADS)
    pairs = back.join(ahead, on="sequence")
    # Autograd numbers threads differently than the system: use the thread with most matches.
    votes = (
        pairs.group_by("forward_thread", "thread")
        .len()
        .sort("len", "thread")
        .unique("forward_thread", keep="last", maintain_order=True)
    )
    chosen = pairs.join(votes, on=["forward_thread", "thread"], how="semi").unique("row", keep="any")
    linked = none.scatter(chosen["row"], chosen["forward"])
    forward: pl.Series = linked.gather(ancestor(host, linked.is_not_null()))
    return forward


def _device(device: pl.DataFrame, host: pl.DataFrame, steps: Steps) -> pl.DataFrame:
    """Return GPU work by time with its links; its launch is the first call with its correlation id."""
    is_call = host["kind"].is_in(["runtime", "driver"]) & host["correlation"].is_in(device["correlation"].implode())
    calls = host.select("correlation", launch="row").filter(is_call & (host["correlation"] > 0))
    end = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    linked = device.sort("start_ns", "event").with_columns(end).with_row_index("row")
    if calls["correlation"].n_unique() < calls.height:
        started = host["start_ns"].gather(calls["launch"])
        calls = calls[started.arg_sort()].unique("correlation", keep="first", maintain_order=True)
    launch = linked.select("correlation").join(calls, on="correlation", how="left", maintain_order="left")["launch"]
    del calls
    linked = linked.with_columns(launch, host["start_ns"].gather(launch).alias("launch_start_ns"))
    op = host["op"].gather(linked["launch"])
    named = _by_external_id(host, linked.filter(op.is_null()).select("row", "external_id"))
    op = op.scatter(named["row"], named["op"])
    linked = linked.with_columns(
        op=op,
        op_name=host["name"].gather(op),
        module=host["module"].gather(op),
        issued_ns=pl.coalesce("launch_start_ns", host["start_ns"].gather(op), "start_ns"),
    ).drop("row")
    # The classifier identifies ops by name.
    classes = classify_kernels(linked.select("name", "kind", pl.col("op_name").alias("op")))["class"]
    placed = at_times(with_activity(linked).with_columns(classes), steps, "issued_ns")
    # GPU work belongs to the step of its launch, not to the step in which it starts.
    is_known = pl.col("launch").is_not_null() | pl.col("op").is_not_null()
    return placed.with_columns(pl.when(is_known).then(pl.col("step", "phase")))


def _memory(memory: pl.DataFrame, host: pl.DataFrame, steps: Steps) -> pl.DataFrame:
    """Return the innermost op open on the thread at each allocation and free."""
    ordered = memory.sort("time_ns", "event")
    row = last_started(host, ordered["thread"], ordered["time_ns"])
    op = host["op"].gather(innermost_open(host, row, ordered["time_ns"]))
    return at_times(ordered.with_columns(op=op, module=host["module"].gather(op)), steps, "time_ns")


def _unlinked(
    host: pl.DataFrame, device: pl.DataFrame, memory: pl.DataFrame, modules: Modules, steps: Steps
) -> dict[str, Share]:
    launched = host["op"].gather(device["launch"].drop_nulls().unique())
    backward = host["forward"].filter((host["kind"] == "op") & (host["sequence"] >= 0) & (host["forward_thread"] > 0))
    shares = {
        "kernel_to_launch": Share(device["launch"].null_count(), device.height),
        "launch_to_op": Share(launched.null_count(), len(launched)),
        "kernel_to_op": Share(device["op"].null_count(), device.height),
        "backward_to_forward": Share(backward.null_count(), len(backward)),
        "memory_to_op": Share(memory["op"].null_count(), memory.height),
    }
    if steps.num:
        shares["event_to_step"] = Share(device["step"].null_count(), device.height)
    if modules.source != "none":
        shares["kernel_to_module"] = Share(device["module"].null_count(), device.height)
    return shares
