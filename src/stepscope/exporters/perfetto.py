"""A trace for ui.perfetto.dev and chrome://tracing: the events of the selection, its links, and our own tracks.

Written from the tables: what no table keeps of an event is not in it (docs/export.md). Text is made a chunk at a
time, so that memory stays that of the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from stepscope.exporters.json_lines import event, lines_of, microseconds, number, recorded, text
from stepscope.exporters.places import OWN_TRACKS, Places
from stepscope.exporters.selection import Selection
from stepscope.exporters.tracks import Counter, Track, counters_of, tracks_of
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
_COLLECTIVE_TEXTS = {"Collective name": "collective", "dtype": "dtype", "Process Group Name": "group",
                     "Process Group Ranks": "group_ranks"}  # fmt: skip
_COLLECTIVE_ARGS = {"In msg nelems": "num_in_elements", "Out msg nelems": "num_out_elements",
                    "Group size": "group_size"}  # fmt: skip


def perfetto_texts(selection: Selection, findings: Sequence[Finding] = ()) -> Iterator[str]:
    """The file, piece by piece."""
    yield from _Perfetto(selection, findings).texts()


class _Perfetto:
    def __init__(self, selection: Selection, findings: Sequence[Finding]) -> None:
        self.selection = selection
        self.tracks: list[Track] = tracks_of(selection, findings)
        self.counters: list[Counter] = list(counters_of(selection))
        self.places = Places(selection)
        self.shift_ns = _shift_ns(selection)
        self.collectives = selection.linked.trace.collectives

    def texts(self) -> Iterator[str]:
        header = json.dumps(self._header())
        yield f'{header[:-1]}, "traceEvents": [\n'
        is_first = True
        for lines in self._lines():
            if lines:
                yield lines if is_first else ",\n" + lines
                is_first = False
        yield "\n]}\n"

    def _header(self) -> dict[str, Any]:
        selection, facts = self.selection, self.selection.linked.trace.facts
        flags = {
            "record_shapes": facts.has_shapes,
            "with_stack": facts.has_stacks,
            "profile_memory": facts.has_memory,
        }
        header: dict[str, Any] = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": facts.base_time_ns + self.shift_ns,
            "deviceProperties": [{"id": index, "name": name} for index, name in enumerate(facts.devices)],
            **{name: int(value) for name, value in flags.items() if value is not None},
            **facts.versions,
            "stepscope": {"version": __version__, "step": selection.step, "module": selection.module},
        }
        if facts.rank is not None:
            header["distributedInfo"] = {"rank": facts.rank, "world_size": facts.world_size}
        return header

    def _lines(self) -> Iterator[str]:
        yield from self._names()
        yield from self._own()
        yield from self._host()
        yield from self._device()
        yield from lines_of(self.places.device_ranges, self._range)
        yield from lines_of(self.places.syncs, self._sync)
        yield from lines_of(self.selection.memory, self._memory)
        yield from self._flows()

    # -- what is on the tracks -----------------------------------------------------------------------------------

    def _host(self) -> Iterator[str]:
        host = self._with_collectives(self.selection.host)
        category = self._categories("host")

        def line(part: pl.DataFrame) -> pl.Expr:
            args = {name: number(column) for name, column in _HOST_ARGS.items()}
            args |= {name: recorded(part, column) for name, column in _HOST_JSON.items()}
            args["Call stack"] = text(part, "stack")
            return event({**self._complete(part, category), **self._thread()}, args | self._collective(part))

        yield from lines_of(host, line)

    def _device(self) -> Iterator[str]:
        device = self._with_collectives(self.places.device)
        category = self._categories("device")

        def line(part: pl.DataFrame) -> pl.Expr:
            args = {name: number(column) for name, column in _DEVICE_ARGS.items()}
            args |= {name: recorded(part, name) for name in ("grid", "block")}
            args |= {name: text(part, column) for name, column in (("op", "op_name"), ("module", "module"))}
            args |= {name: text(part, name) for name in ("phase", "class")}
            where = {"pid": pl.col("pid"), "tid": number("tid")}
            return event({**self._complete(part, category), **where}, args | self._collective(part))

        yield from lines_of(device, line)

    def _range(self, part: pl.DataFrame) -> pl.Expr:
        return self._placed(part, "gpu_user_annotation", _RANGE_ARGS)

    def _sync(self, part: pl.DataFrame) -> pl.Expr:
        return self._placed(part, "cuda_sync", _SYNC_ARGS)

    def _placed(self, part: pl.DataFrame, category: str, args: dict[str, str]) -> pl.Expr:
        fields: dict[str, pl.Expr | str] = {"ph": '"X"', "cat": json.dumps(category), "name": self._name(part)}
        fields |= {**self._times(), "pid": pl.col("pid"), "tid": number("tid")}
        return event(fields, {name: number(column) for name, column in args.items()})

    def _memory(self, part: pl.DataFrame) -> pl.Expr:
        fields: dict[str, pl.Expr | str] = {
            "ph": '"i"',
            "cat": '"cpu_instant_event"',
            "s": '"t"',
            "name": '"[memory]"',
        }
        fields |= {"ts": microseconds(pl.col("time_ns") - self.shift_ns), **self._thread()}
        return event(fields, {name: number(column) for name, column in _MEMORY_ARGS.items()})

    def _complete(self, part: pl.DataFrame, category: dict[str, str]) -> dict[str, pl.Expr | str]:
        kinds = pl.col("kind").cast(pl.String).replace_strict(category, return_dtype=pl.String)
        return {"ph": '"X"', "cat": kinds, "name": self._name(part), **self._times()}

    def _name(self, part: pl.DataFrame) -> pl.Expr:
        return text(part, "name").fill_null('""')

    def _times(self) -> dict[str, pl.Expr]:
        start = microseconds(pl.col("start_ns") - self.shift_ns)
        return {"ts": start, "dur": microseconds(pl.col("duration_ns"))}

    def _thread(self) -> dict[str, pl.Expr]:
        return {name: _looked_up(pl.col("thread"), self.places.threads[name]) for name in ("pid", "tid")}

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
        if not self.collectives.height:
            return {}
        texts = {name: text(part, f"collective.{column}") for name, column in _COLLECTIVE_TEXTS.items()}
        return texts | {name: number(f"collective.{column}") for name, column in _COLLECTIVE_ARGS.items()}

    # -- what links them -----------------------------------------------------------------------------------------

    def _flows(self) -> Iterator[str]:
        """From each launch to its work, from each forward op to its backward: two ends with one number."""
        host, device = self.selection.host, self.places.device
        threads = {name: _looked_up(pl.col("thread"), self.places.threads[name]) for name in ("pid", "tid")}
        ends = host.select("row", "parent", "forward", "sequence", "forward_thread", "kind", "start_ns", **threads)
        begin = ends.select(pl.col("row").alias("from"), *(pl.col(c).alias(f"from.{c}") for c in _END))
        launches = device.select(pl.col("launch").alias("from"), "start_ns", "pid", number("tid").alias("tid"))
        yield from self._pairs("ac2g", launches.join(begin, on="from", maintain_order="left"), 1)
        is_back = (pl.col("kind") == "op") & (pl.col("sequence") >= 0) & (pl.col("forward_thread") > 0)
        back = ends.filter(is_back & pl.col("forward").is_not_null())
        above = back.select(pl.col("row").alias("parent"), "forward")
        back = back.join(above, on=["parent", "forward"], how="anti", maintain_order="left")  # the outermost of each
        pairs = back.select(pl.col("forward").alias("from"), *_END).join(begin, on="from", maintain_order="left")
        yield from self._pairs("fwdbwd", pairs, 1 + launches.height)

    def _pairs(self, category: str, pairs: pl.DataFrame, first: int) -> Iterator[str]:
        numbered = pairs.with_row_index("id", first)
        name = json.dumps(category)

        def line(part: pl.DataFrame) -> pl.Expr:
            common: dict[str, pl.Expr | str] = {"cat": name, "name": name, "id": number("id")}
            starts, finishes = pl.col("from.start_ns") - self.shift_ns, pl.col("start_ns") - self.shift_ns
            start = {"pid": pl.col("from.pid"), "tid": pl.col("from.tid"), "ts": microseconds(starts)}
            finish: dict[str, pl.Expr | str] = {
                "pid": pl.col("pid"),
                "tid": pl.col("tid"),
                "ts": microseconds(finishes),
                "bp": '"e"',
            }
            both = event({"ph": '"s"', **common, **start}), event({"ph": '"f"', **common, **finish})
            return pl.concat_str(both, separator=",\n")

        yield from lines_of(numbered, line)

    # -- our own tracks, and names -------------------------------------------------------------------------------

    def _own(self) -> Iterator[str]:
        pid = self.places.own_pid
        for tid, track in enumerate(self.tracks, 1):
            spans = track.spans
            for first in range(0, len(spans), 10_000):
                yield ",\n".join(
                    f'{{"ph":"X","cat":"stepscope","name":{json.dumps(span.name)},"pid":{pid},"tid":{tid},'
                    f'"ts":{self._us(span.start_ns)},"dur":{_us(span.end_ns - span.start_ns)},'
                    f'"args":{json.dumps({k: v for k, v in span.args.items() if v is not None})}}}'
                    for span in spans[first : first + 10_000]
                )
        for counter in self.counters:
            yield ",\n".join(
                f'{{"ph":"C","cat":"stepscope","name":{json.dumps(counter.name)},"pid":{pid},'
                f'"ts":{self._us(time)},"args":{{"bytes":{value}}}}}'
                for time, value in zip(counter.times_ns, counter.values)
            )

    def _names(self) -> Iterator[str]:
        pid = str(self.places.own_pid)
        rows = list(self.places.names())
        if self.tracks or self.counters:
            rows += [
                (pid, "0", "process_name", {"name": OWN_TRACKS}),
                (pid, "0", "process_sort_index", {"sort_index": 0}),
            ]
        for tid, track in enumerate(self.tracks, 1):
            rows.append((pid, str(tid), "thread_name", {"name": track.name}))
            rows.append((pid, str(tid), "thread_sort_index", {"sort_index": tid}))
        yield ",\n".join(
            f'{{"ph":"M","pid":{pid},"tid":{tid},"ts":0,"name":"{name}","args":{json.dumps(args)}}}'
            for pid, tid, name, args in rows
        )

    def _us(self, time_ns: int) -> str:
        return _us(time_ns - self.shift_ns)


_END = ("start_ns", "pid", "tid")


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _looked_up(rows: pl.Expr, values: list[str]) -> pl.Expr:
    return pl.lit(pl.Series(values, dtype=pl.String)).gather(rows) if values else pl.lit('"unknown"')


def _shift_ns(selection: Selection) -> int:
    """How much earlier the file's clock begins, in whole seconds: 0 where its times can be told as they are."""
    if selection.start_ns >= 0 and selection.end_ns < LARGEST_EXACT_NS:
        return 0
    return selection.start_ns // _SECOND_NS * _SECOND_NS
