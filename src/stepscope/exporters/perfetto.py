"""A trace for ui.perfetto.dev and chrome://tracing: the events of the selection, its links, and our own tracks.

Written from the tables: what no table keeps of an event is not in it (docs/export.md). Text is made a chunk at a
time, so that memory stays that of the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from stepscope.exporters.json_lines import event, lines_of, microseconds, numbers, recorded, texts
from stepscope.exporters.places import OWN_TRACKS, Places
from stepscope.exporters.selection import Selection
from stepscope.exporters.tracks import counters_of, tracks_of
from stepscope.findings.finding import Finding
from stepscope.trace.schema import CATEGORIES
from stepscope.version import __version__

ENDINGS = (".json", ".json.gz")
LARGEST_EXACT_NS = 2**53
"""From here on a reader that takes microseconds as a double loses nanoseconds: such a clock is moved."""
_SECOND_NS = 1_000_000_000
_CATEGORY = {
    "op": "cpu_op", "annotation": "user_annotation", "runtime": "cuda_runtime", "driver": "cuda_driver",
    "python": "python_function", "overhead": "overhead", "other": "other",
    "kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset",
}  # fmt: skip
_HOST_ARGS = {"External id": "external_id", "Sequence number": "sequence", "Fwd thread id": "forward_thread",
              "correlation": "correlation"}  # fmt: skip
_HOST_JSON = {"Input Dims": "shapes", "Input type": "dtypes", "Input Strides": "strides", "Concrete Inputs": "inputs"}
_DEVICE_ARGS = {"External id": "external_id", "correlation": "correlation", "device": "device", "stream": "stream",
                "bytes": "bytes", "registers per thread": "registers_per_thread",
                "shared memory": "shared_memory_bytes", "est. achieved occupancy %": "occupancy_percent",
                "graph id": "graph", "graph node id": "graph_node", "step": "step"}  # fmt: skip
_SYNC_ARGS = {"External id": "external_id", "correlation": "correlation", "device": "device", "stream": "stream",
              "wait_on_stream": "wait_on_stream",
              "wait_on_cuda_event_record_corr_id": "wait_on_correlation"}  # fmt: skip
_RANGE_ARGS = {"External id": "external_id", "device": "device", "stream": "stream"}
_MEMORY_ARGS = {"Device Type": "device_type", "Device Id": "device", "Addr": "address", "Bytes": "bytes",
                "Total Allocated": "allocated_bytes", "Total Reserved": "reserved_bytes"}  # fmt: skip
_DEVICE_TEXTS = {"op": "op_name", "module": "module", "phase": "phase", "class": "class"}
_COLLECTIVE_TEXTS = {"Collective name": "collective.collective", "dtype": "collective.dtype",
                     "Process Group Name": "collective.group",
                     "Process Group Ranks": "collective.group_ranks"}  # fmt: skip
_COLLECTIVE_ARGS = {"In msg nelems": "collective.num_in_elements", "Out msg nelems": "collective.num_out_elements",
                    "Group size": "collective.group_size"}  # fmt: skip


def perfetto_texts(selection: Selection, findings: Sequence[Finding] = ()) -> Iterator[str]:
    """The file, piece by piece."""
    made = _Perfetto(selection, findings)
    yield f'{json.dumps(made.header())[:-1]}, "traceEvents": [\n'
    separator = ""
    for lines in filter(None, made.lines()):
        yield separator + lines
        separator = ",\n"
    yield "\n]}\n"


class _Perfetto:
    def __init__(self, selection: Selection, findings: Sequence[Finding]) -> None:
        self.selection = selection
        self.tracks = tracks_of(selection, findings)
        self.counters = list(counters_of(selection))
        self.places = Places(selection)
        self.collectives = selection.linked.trace.collectives
        # How much earlier the file's clock begins, in whole seconds: 0 where its times can be told as they are.
        is_exact = selection.start_ns >= 0 and selection.end_ns < LARGEST_EXACT_NS
        self.shift_ns = 0 if is_exact else selection.start_ns // _SECOND_NS * _SECOND_NS

    def header(self) -> dict[str, Any]:
        selection, facts = self.selection, self.selection.linked.trace.facts
        flags = {
            "record_shapes": facts.has_shapes,
            "with_stack": facts.has_stacks,
            "profile_memory": facts.has_memory,
        }
        ranks = {"distributedInfo": {"rank": facts.rank, "world_size": facts.world_size}}
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": facts.base_time_ns + self.shift_ns,
            "deviceProperties": [{"id": index, "name": name} for index, name in enumerate(facts.devices)],
            **{name: int(value) for name, value in flags.items() if value is not None},
            **facts.versions,
            "stepscope": {"version": __version__, "step": selection.step, "module": selection.module},
            **({} if facts.rank is None else ranks),
        }

    def lines(self) -> Iterator[str]:
        yield from self._names()
        yield from self._own()
        yield from lines_of(self._with_collectives(self.selection.host), self._host)
        yield from lines_of(self._with_collectives(self.places.device), self._device)
        yield from lines_of(self.places.device_ranges, lambda part: self._placed(part, "gpu_user_annotation"))
        yield from lines_of(self.places.syncs, lambda part: self._placed(part, "cuda_sync"))
        yield from lines_of(self.selection.memory, self._memory)
        yield from self._flows()

    # -- what is on the tracks -----------------------------------------------------------------------------------

    def _host(self, part: pl.DataFrame) -> pl.Expr:
        args = numbers(_HOST_ARGS) | recorded(part, _HOST_JSON) | texts(part, {"Call stack": "stack"})
        return event(args | self._collective(part), **self._complete(part, "host"), **self._thread())

    def _device(self, part: pl.DataFrame) -> pl.Expr:
        args = numbers(_DEVICE_ARGS) | recorded(part, {"grid": "grid", "block": "block"}) | texts(part, _DEVICE_TEXTS)
        return event(args | self._collective(part), **self._complete(part, "device"), **_PLACE)

    def _placed(self, part: pl.DataFrame, category: str) -> pl.Expr:
        args = numbers(_RANGE_ARGS if category == "gpu_user_annotation" else _SYNC_ARGS)
        return event(args, ph='"X"', cat=json.dumps(category), name=_name(part), **self._times(), **_PLACE)

    def _memory(self, part: pl.DataFrame) -> pl.Expr:
        time, args = self._microseconds("time_ns"), numbers(_MEMORY_ARGS)
        return event(args, ph='"i"', cat='"cpu_instant_event"', s='"t"', name='"[memory]"', ts=time, **self._thread())

    def _complete(self, part: pl.DataFrame, table: str) -> dict[str, pl.Expr]:
        kinds = pl.col("kind").cast(pl.String).replace_strict(self._categories(table), return_dtype=pl.String)
        return {"ph": pl.lit('"X"'), "cat": kinds, "name": _name(part), **self._times()}

    def _microseconds(self, column: str) -> pl.Expr:
        return microseconds(pl.col(column) - self.shift_ns)

    def _times(self) -> dict[str, pl.Expr]:
        return {"ts": self._microseconds("start_ns"), "dur": microseconds(pl.col("duration_ns"))}

    def _thread(self) -> dict[str, pl.Expr]:
        known = self.places.threads
        if not known["pid"]:
            return dict.fromkeys(("pid", "tid"), pl.lit('"unknown"'))
        return {name: pl.lit(pl.Series(ids, dtype=pl.String)).gather("thread") for name, ids in known.items()}

    def _categories(self, table: str) -> dict[str, str]:
        """The category of each kind as the trace spells it most often, as JSON."""
        counts = self.selection.linked.trace.counts.filter(pl.col("phase") == "X").sort("num_events")
        known = dict(_CATEGORY)
        for name in counts["category"]:
            where, kind = CATEGORIES.get(name.lower(), ("", ""))
            if where == table:
                known[kind] = name
        return {kind: json.dumps(name) for kind, name in known.items()}

    def _with_collectives(self, events: pl.DataFrame) -> pl.DataFrame:
        extra = self.collectives.rename({name: f"collective.{name}" for name in self.collectives.columns[1:]})
        return events.join(extra, on="event", how="left", maintain_order="left") if extra.height else events

    def _collective(self, part: pl.DataFrame) -> dict[str, pl.Expr]:
        return texts(part, _COLLECTIVE_TEXTS) | numbers(_COLLECTIVE_ARGS) if self.collectives.height else {}

    # -- what links them -----------------------------------------------------------------------------------------

    def _flows(self) -> Iterator[str]:
        """From each launch to its work, from each forward op to its backward: two ends with one number."""
        end = ("start_ns", "pid", "tid")
        columns = ("row", "parent", "forward", "sequence", "forward_thread", "kind", "start_ns")
        ends = self.selection.host.select(*columns, **self._thread())
        begin = ends.select(pl.col("row").alias("from"), pl.col(*end).name.prefix("from."))
        launches = self.places.device.select("start_ns", "pid", pl.col("tid").cast(pl.String), **{"from": "launch"})
        yield from self._pairs("ac2g", launches.join(begin, on="from", maintain_order="left"), 1)
        is_back = (pl.col("kind") == "op") & (pl.col("sequence") >= 0) & (pl.col("forward_thread") > 0)
        back = ends.filter(is_back & pl.col("forward").is_not_null())
        above = back.select("forward", parent="row")
        back = back.join(above, on=["parent", "forward"], how="anti", maintain_order="left")  # the outermost of each
        pairs = back.select(*end, **{"from": "forward"}).join(begin, on="from", maintain_order="left")
        yield from self._pairs("fwdbwd", pairs, 1 + launches.height)

    def _pairs(self, category: str, pairs: pl.DataFrame, first: int) -> Iterator[str]:
        name, number = json.dumps(category), pl.col("id").cast(pl.String)

        def one_end(phase: str, prefix: str, **more: str) -> pl.Expr:
            place = {key: pl.col(prefix + key) for key in ("pid", "tid")}
            time = self._microseconds(f"{prefix}start_ns")
            return event(None, ph=phase, cat=name, name=name, id=number, **place, ts=time, **more)

        both = pl.concat_str(one_end('"s"', "from."), one_end('"f"', "", bp='"e"'), separator=",\n")
        yield from lines_of(pairs.with_row_index("id", first), lambda _: both)

    # -- our own tracks, and names -------------------------------------------------------------------------------

    def _own(self) -> Iterator[str]:
        pid = self.places.own_pid
        for tid, track in enumerate(self.tracks, 1):
            for first in range(0, len(track.spans), 10_000):
                yield ",\n".join(
                    f'{{"ph":"X","cat":"stepscope","name":{json.dumps(span.name)},"pid":{pid},"tid":{tid},'
                    f'"ts":{_us(span.start_ns - self.shift_ns)},"dur":{_us(span.end_ns - span.start_ns)},'
                    f'"args":{json.dumps({k: v for k, v in span.args.items() if v is not None})}}}'
                    for span in track.spans[first : first + 10_000]
                )
        for counter in self.counters:
            yield ",\n".join(
                f'{{"ph":"C","cat":"stepscope","name":{json.dumps(counter.name)},"pid":{pid},'
                f'"ts":{_us(time - self.shift_ns)},"args":{{"bytes":{value}}}}}'
                for time, value in zip(counter.times_ns, counter.values)
            )

    def _names(self) -> Iterator[str]:
        own, rows = str(self.places.own_pid), list(self.places.names())
        if self.tracks or self.counters:
            rows.append((own, "0", "process_name", {"name": OWN_TRACKS}))
            rows.append((own, "0", "process_sort_index", {"sort_index": 0}))
        for tid, track in enumerate(self.tracks, 1):
            rows.append((own, str(tid), "thread_name", {"name": track.name}))
            rows.append((own, str(tid), "thread_sort_index", {"sort_index": tid}))
        yield ",\n".join(
            f'{{"ph":"M","pid":{pid},"tid":{tid},"ts":0,"name":"{name}","args":{json.dumps(args)}}}'
            for pid, tid, name, args in rows
        )


_PLACE = {"pid": pl.col("pid"), "tid": pl.col("tid").cast(pl.String)}


def _name(part: pl.DataFrame) -> pl.Expr:
    return texts(part, {"name": "name"})["name"].fill_null('""')


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
