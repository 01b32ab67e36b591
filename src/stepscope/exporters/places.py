"""Where events are on a timeline: processes, threads, and the tracks of each GPU's streams, with their names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import polars as pl

from stepscope.exporters.selection import Selection
from stepscope.exporters.tracks import lanes

GPU_SORT = 1_000_000  # GPUs come after every process of a rank
_STREAM, _RANGES, _SYNCS = "", " annotations", " synchronizations"


def id_of(value: str | None) -> str:
    """Return a process or a thread as JSON: a number if it is one, as profilers write them.

    >>> id_of("42"), id_of("Spans"), id_of("007"), id_of(None)
    ('42', '"Spans"', '"007"', '"unknown"')
    """
    if value is None:
        return '"unknown"'
    is_number = value.isascii() and value.removeprefix("-").isdigit() and str(int(value[:18])) == value
    return value if is_number else json.dumps(value)


@dataclass(frozen=True)
class OnTimeline:
    """A rank on a timeline of several."""

    rank: int
    offset_ns: int  # how far its clock is ahead of the timeline's
    first: int  # no process and no arrow of an earlier rank has this number or a higher one


class Places:
    """Processes and threads as recorded. GPU work has one track per stream, and annotations and synchronizations have
    their own. Events that partly overlap go to another track: no viewer draws two such bars on one."""

    def __init__(self, selection: Selection, among: OnTimeline | None) -> None:
        trace = selection.linked.trace
        self._selection, self._among = selection, among
        self._numbers: dict[str, int] = {}
        self.threads = {
            "pid": [self._pid(id_of(value)) for value in trace.threads["pid"]],
            "tid": [id_of(value) for value in trace.threads["tid"]],
        }
        taken = set(trace.threads.join(self._used(), on="thread", how="semi")["pid"])
        frames = (selection.device, selection.device_ranges, selection.syncs)
        devices = sorted(pl.concat([frame["device"] for frame in frames]).drop_nulls().unique())
        known = [int(pid) for pid in taken if pid is not None and pid.isascii() and pid.isdigit() and len(pid) < 9]
        free = max([*known, *devices, 0]) + 1
        pids: dict[int | None, str] = {None: '"unknown device"'}
        for device in devices:  # a process may have the number of a device
            pids[device], free = (str(free), free + 1) if str(device) in taken else (str(device), free)
        self._pids = {device: self._pid(pid) for device, pid in pids.items()}
        self.own_pid = self._pid(str(free))
        streams = set(pl.concat([frame["stream"] for frame in frames]))
        self._free_tids = (tid for tid in count(1) if tid not in streams)
        self._tids: dict[tuple[int | None, int | None, str, int], int] = {}
        self.device = self._placed(selection.device, _STREAM)
        self.device_ranges = self._placed(selection.device_ranges, _RANGES)
        self.syncs = self._placed(selection.syncs, _SYNCS)

    def names(self) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        """Yield process and thread as JSON, and their metadata: their names and their order."""
        threads = self._selection.linked.trace.threads
        seen: set[str] = set()
        for row in threads.join(self._used(), on="thread", how="semi", maintain_order="left").iter_rows(named=True):
            pid, tid = self._pid(id_of(row["pid"])), id_of(row["tid"])
            if pid not in seen:
                seen.add(pid)
                yield pid, "0", "process_name", {"name": row["process_name"] or f"process {row['pid']}"}
                yield pid, "0", "process_labels", {"labels": row["process_labels"] or "CPU"}
                yield pid, "0", "process_sort_index", {"sort_index": len(seen)}
            yield pid, tid, "thread_name", {"name": row["thread_name"] or f"thread {row['tid']}"}
            yield pid, tid, "thread_sort_index", {"sort_index": row["thread"]}
        used = {device for device, *_ in self._tids}
        for number, (device, pid) in enumerate(self._pids.items()):
            if device in used:
                name = "GPU not named" if device is None else f"GPU {device}"
                yield pid, "0", "process_name", {"name": name}
                yield pid, "0", "process_labels", {"labels": name}
                yield pid, "0", "process_sort_index", {"sort_index": GPU_SORT + number}
        ordered = sorted(self._tids.items(), key=lambda one: (one[0][1] or 0, *one[0][2:]))
        for place, ((device, stream, what, lane), track) in enumerate(ordered):
            name = f"stream {'?' if stream is None else stream}{what}{f' ({lane + 1})' if lane else ''}"
            yield self._pids[device], str(track), "thread_name", {"name": name}
            yield self._pids[device], str(track), "thread_sort_index", {"sort_index": place}

    @property
    def num_pids(self) -> int:
        return len(self._numbers)

    def _pid(self, recorded: str) -> str:
        """Return a process as JSON; with several ranks, a new number, because ranks may have the same ones."""
        if self._among is None:
            return recorded
        return str(self._among.first + self._numbers.setdefault(recorded, len(self._numbers)))

    def _used(self) -> pl.DataFrame:
        frames = (self._selection.host, self._selection.memory)
        return pl.concat([frame.select("thread") for frame in frames]).unique()

    def _placed(self, events: pl.DataFrame, what: str) -> pl.DataFrame:
        """Return events with the `pid`, as JSON, and the `tid` of their track."""
        key = ["device", "stream"]
        end = pl.col("start_ns") + pl.col("duration_ns")
        ordered = events.with_columns(end.alias("end_ns")).sort(
            *key, "start_ns", "end_ns", descending=[False, False, False, True], nulls_last=True
        )
        tids: list[pl.Series] = []
        for (device, stream), part in ordered.group_by(*key, maintain_order=True):
            is_apart = not (part["start_ns"] < part["end_ns"].cum_max().shift(1)).any()
            own = [0] * part.height if is_apart else lanes(part["start_ns"], part["end_ns"])
            chosen = pl.Series(own, dtype=pl.Int64)
            known = {lane: self._tid(device, stream, what, lane) for lane in sorted(chosen.unique())}
            tids.append(chosen.replace_strict(known, return_dtype=pl.Int64))
        tid = pl.concat(tids) if tids else pl.Series([], dtype=pl.Int64)
        pid = pl.col("device").replace_strict(self._pids, return_dtype=pl.String)
        return ordered.with_columns(tid.alias("tid"), pid.alias("pid"))

    def _tid(self, device: Any, stream: Any, what: str, lane: int) -> int:
        key = (device, stream, what, lane)
        if key not in self._tids:
            is_stream = what == _STREAM and not lane and stream is not None
            self._tids[key] = int(stream) if is_stream else next(self._free_tids)
        return self._tids[key]
