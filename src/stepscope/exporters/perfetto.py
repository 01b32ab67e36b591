"""A trace for ui.perfetto.dev and chrome://tracing: the events of the selection, its links, and our own tracks.

Written from the tables: what no table keeps of an event is not in it (docs/export.md). Text is made a chunk at a
time, so that memory stays that of the tables.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import polars as pl

from stepscope.exporters.places import GPU_SORT, OnTimeline, Places
from stepscope.exporters.selection import Selection
from stepscope.exporters.tracks import counters_of, tracks_of
from stepscope.findings.finding import Finding
from stepscope.trace.tables import CATEGORIES
from stepscope.version import __version__

ROWS_A_CHUNK = 50_000  # rows that are text at one time: what bounds the memory


def lines_of(frame: pl.DataFrame, line: Callable[[pl.DataFrame], pl.Expr]) -> Iterator[str]:
    """Yield the lines of a table, a chunk at a time, separated by a comma and a new line."""
    for part in frame.iter_slices(ROWS_A_CHUNK):
        yield ",\n".join(part.select(line(part).alias("line"))["line"])


def event(args: Mapping[str, pl.Expr] | None = None, /, **fields: pl.Expr | str) -> pl.Expr:
    """Return one object per row from JSON texts by name, constant or not; those that are null are left out."""
    parts = [_pair(name, pl.lit(value) if isinstance(value, str) else value) for name, value in fields.items()]
    if args is not None:
        inside = pl.concat_str([_pair(name, value) for name, value in args.items()], separator=",", ignore_nulls=True)
        parts.append(_pair("args", pl.concat_str(pl.lit("{"), inside, pl.lit("}"))))
    whole = pl.concat_str(parts, separator=",", ignore_nulls=True)
    return pl.concat_str(pl.lit("{"), whole, pl.lit("}"))


def _pair(name: str, value: pl.Expr) -> pl.Expr:
    return pl.concat_str(pl.lit(f"{json.dumps(name)}:"), value)


def microseconds(ns: pl.Expr) -> pl.Expr:
    """Return nanoseconds, not negative, as microseconds with three decimals: exact, as the format wants them."""
    return pl.concat_str((ns // 1000).cast(pl.String), pl.lit("."), (ns % 1000).cast(pl.String).str.zfill(3))


def numbers(columns: Mapping[str, str]) -> dict[str, pl.Expr]:
    """Return columns of numbers as JSON, by the name of the argument."""
    return {name: pl.col(column).cast(pl.String) for name, column in columns.items()}


def texts(frame: pl.DataFrame, columns: Mapping[str, str]) -> dict[str, pl.Expr]:
    """Return columns of untrusted text as JSON strings, in ASCII, by the name of the argument."""
    return {name: pl.lit(mapped(frame[column], json.dumps)) for name, column in columns.items()}


def recorded(frame: pl.DataFrame, columns: Mapping[str, str]) -> dict[str, pl.Expr]:
    """Return columns that were recorded as JSON unchanged, and other text as JSON strings."""
    return {name: pl.lit(mapped(frame[column], _json_or_text)) for name, column in columns.items()}


def mapped(column: pl.Series, to: Callable[[str], str]) -> pl.Series:
    """Return a column with `to` applied to each text, once per distinct one."""
    values = column.cast(pl.String)
    different = values.drop_nulls().unique()
    made: pl.Series = values.replace_strict(different, [to(one) for one in different], return_dtype=pl.String)
    return made


def _json_or_text(value: str) -> str:
    try:
        msgspec.json.decode(value)
    except (ValueError, RecursionError):  # msgspec's DecodeError is a ValueError
        return json.dumps(value)
    return value


ENDINGS = (".json", ".json.gz")
LARGEST_EXACT_NS = 2**53
"""From here on a reader that takes microseconds as a double loses nanoseconds: such a clock is moved."""
_SECOND_NS = 1_000_000_000
_CATEGORY = {
    "op": "cpu_op", "annotation": "user_annotation", "runtime": "cuda_runtime", "driver": "cuda_driver",
    "python": "python_function", "overhead": "overhead", "other": "other",
    "kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset",
}  # fmt: skip
_HOST_ARGS = {"External id": "external_id", "Record function id": "record_function", "Sequence number": "sequence",
              "Fwd thread id": "forward_thread", "correlation": "correlation"}  # fmt: skip
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


def clock_shift_ns(start_ns: int, end_ns: int) -> int:
    """Return what to subtract from every time, in whole seconds: 0 if the file can hold the times as they are."""
    return 0 if start_ns >= 0 and end_ns < LARGEST_EXACT_NS else start_ns // _SECOND_NS * _SECOND_NS


def perfetto_texts(selection: Selection, findings: Sequence[Finding] = ()) -> Iterator[str]:
    made = _Perfetto(selection, findings)
    yield from _document(made.header(), made.lines())


def timeline_texts(
    header: Mapping[str, Any], parts: Iterable[tuple[Selection, Sequence[Finding], int, int]]
) -> Iterator[str]:
    """Yield one file of several ranks: part, findings, number and clock offset of each, one in memory at a time."""
    return _document(header, _ranks(parts))


def _ranks(parts: Iterable[tuple[Selection, Sequence[Finding], int, int]]) -> Iterator[str]:
    first = 1
    for selection, findings, rank, offset_ns in parts:
        made = _Perfetto(selection, findings, OnTimeline(rank, offset_ns, first))
        yield from made.lines()
        first += made.num_arrows + made.places.num_pids


def _document(header: Mapping[str, Any], texts: Iterable[str]) -> Iterator[str]:
    yield f'{json.dumps(header)[:-1]}, "traceEvents": [\n'
    separator = ""
    for lines in filter(None, texts):
        yield separator + lines
        separator = ",\n"
    yield "\n]}\n"


class _Perfetto:
    def __init__(self, selection: Selection, findings: Sequence[Finding], among: OnTimeline | None = None) -> None:
        self.selection, self.among = selection, among
        self.tracks = tracks_of(selection, findings)
        self.counters = list(counters_of(selection))
        self.places = Places(selection, among)
        self.collectives = selection.linked.trace.collectives
        self.num_arrows = 0
        self.shift_ns = among.offset_ns if among else clock_shift_ns(selection.start_ns, selection.end_ns)

    def header(self) -> dict[str, Any]:
        selection, facts = self.selection, self.selection.linked.trace.facts
        had = {"record_shapes": facts.has_shapes, "with_stack": facts.has_stacks, "profile_memory": facts.has_memory}
        ranks = {"distributedInfo": {"rank": facts.rank, "world_size": facts.world_size}}
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": facts.base_time_ns + self.shift_ns,
            "deviceProperties": [{"id": index, "name": name} for index, name in enumerate(facts.devices)],
            **{name: int(value) for name, value in had.items() if value is not None},
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
        """Return the category of each kind, as the trace spells it most often, as JSON."""
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
        """Yield arrows from each launch to its work and each forward op to its backward: two ends with one id."""
        end = ("start_ns", "pid", "tid")
        columns = ("row", "parent", "forward", "sequence", "forward_thread", "kind", "start_ns")
        ends = self.selection.host.select(*columns, **self._thread())
        begin = ends.select(pl.col("row").alias("from"), pl.col(*end).name.prefix("from."))
        launches = self.places.device.select("start_ns", "pid", pl.col("tid").cast(pl.String), **{"from": "launch"})
        yield from self._pairs("ac2g", launches.join(begin, on="from", maintain_order="left"))
        is_back = (pl.col("kind") == "op") & (pl.col("sequence") >= 0) & (pl.col("forward_thread") > 0)
        back = ends.filter(is_back & pl.col("forward").is_not_null())
        above = back.select("forward", parent="row")
        back = back.join(above, on=["parent", "forward"], how="anti", maintain_order="left")  # the outermost of each
        pairs = back.select(*end, **{"from": "forward"}).join(begin, on="from", maintain_order="left")
        yield from self._pairs("fwdbwd", pairs)

    def _pairs(self, category: str, pairs: pl.DataFrame) -> Iterator[str]:
        name, number = json.dumps(category), pl.col("id").cast(pl.String)

        def one_end(phase: str, prefix: str, **more: str) -> pl.Expr:
            place = {key: pl.col(prefix + key) for key in ("pid", "tid")}
            time = self._microseconds(f"{prefix}start_ns")
            return event(None, ph=phase, cat=name, name=name, id=number, **place, ts=time, **more)

        both = pl.concat_str(one_end('"s"', "from."), one_end('"f"', "", bp='"e"'), separator=",\n")
        first = (self.among.first if self.among else 1) + self.num_arrows
        self.num_arrows += pairs.height
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
        for name, levels in self.counters:
            yield ",\n".join(
                f'{{"ph":"C","cat":"stepscope","name":{json.dumps(name)},"pid":{pid},'
                f'"ts":{_us(time - self.shift_ns)},"args":{{"bytes":{value}}}}}'
                for time, value in levels
            )

    def _names(self) -> Iterator[str]:
        own, rows = self.places.own_pid, list(self.places.names())
        if self.tracks or self.counters:
            rows.append((own, "0", "process_name", {"name": "Stepscope"}))
            rows.append((own, "0", "process_sort_index", {"sort_index": 0}))
        for tid, track in enumerate(self.tracks, 1):
            rows.append((own, str(tid), "thread_name", {"name": track.name}))
            rows.append((own, str(tid), "thread_sort_index", {"sort_index": tid}))
        yield ",\n".join(
            f'{{"ph":"M","pid":{pid},"tid":{tid},"ts":0,"name":"{name}","args":{self._said(name, args)}}}'
            for pid, tid, name, args in rows
        )

    def _said(self, name: str, args: dict[str, Any]) -> str:
        """Return the metadata of a process or a thread as JSON; with several ranks, a process names its own."""
        if self.among and name == "process_name":
            args = {"name": f"rank {self.among.rank}: {args['name']}"}
        if self.among and name == "process_sort_index":
            args = {"sort_index": self.among.rank * 2 * GPU_SORT + args["sort_index"]}
        return json.dumps(args)


_PLACE = {"pid": pl.col("pid"), "tid": pl.col("tid").cast(pl.String)}


def _name(part: pl.DataFrame) -> pl.Expr:
    return texts(part, {"name": "name"})["name"].fill_null('""')


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
