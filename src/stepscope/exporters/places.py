"""Where each event of an export is drawn: processes, threads, streams, and tracks for what would overlap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import polars as pl

from stepscope.exporters.json_lines import id_of
from stepscope.exporters.selection import Selection
from stepscope.exporters.tracks import lanes

OWN_TRACKS = "Stepscope"
_GPU_SORT = 1_000_000
_STREAM, _RANGES, _SYNCS = "", " annotations", " synchronizations"

Name = tuple[str, str, str, dict[str, Any]]
"""Process and thread as JSON, what is said of them, and its arguments."""


class Places:
    """Processes and threads as recorded. GPU work is on a track a stream, annotations and synchronizations on tracks
    of their own, and what overlaps another in part goes to a further one: no viewer draws two such bars on one."""

    def __init__(self, selection: Selection) -> None:
        trace = selection.linked.trace
        self._selection = selection
        self.threads = {name: [id_of(value) for value in trace.threads[name]] for name in ("pid", "tid")}
        taken = set(trace.threads.join(self._used(), on="thread", how="semi")["pid"])
        frames = (selection.device, selection.device_ranges, selection.syncs)
        devices = sorted(pl.concat([frame["device"] for frame in frames]).drop_nulls().unique())
        numbers = [int(pid) for pid in taken if pid is not None and pid.isascii() and pid.isdigit() and len(pid) < 9]
        free = max([*numbers, *devices, 0]) + 1
        self._pids: dict[int | None, str] = {None: '"unknown device"'}
        for device in devices:  # a process may have the number of a device
            self._pids[device], free = (str(free), free + 1) if str(device) in taken else (str(device), free)
        self.own_pid = free
        streams = pl.concat([frame["stream"] for frame in frames]).drop_nulls()
        self._free_tids = count(max([*map(int, streams.unique()), 0]) + 1)
        self._tids: dict[tuple[int | None, int | None, str, int], int] = {}
        self.device = self._placed(selection.device, _STREAM)
        self.device_ranges = self._placed(selection.device_ranges, _RANGES)
        self.syncs = self._placed(selection.syncs, _SYNCS)

    def names(self) -> Iterator[Name]:
        """What the processes and threads are called, and their order."""
        threads = self._selection.linked.trace.threads
        seen: set[str] = set()
        for row in threads.join(self._used(), on="thread", how="semi", maintain_order="left").iter_rows(named=True):
            pid, tid = id_of(row["pid"]), id_of(row["tid"])
            if pid not in seen:
                seen.add(pid)
                yield pid, "0", "process_name", {"name": row["process_name"] or f"process {row['pid']}"}
                yield pid, "0", "process_labels", {"labels": row["process_labels"] or "CPU"}
                yield pid, "0", "process_sort_index", {"sort_index": len(seen)}
            yield pid, tid, "thread_name", {"name": row["thread_name"] or f"thread {row['tid']}"}
            yield pid, tid, "thread_sort_index", {"sort_index": row["thread"]}
        for number, (device, pid) in enumerate(self._pids.items()):
            if any(key[0] == device for key in self._tids):
                name = "GPU not named" if device is None else f"GPU {device}"
                yield pid, "0", "process_name", {"name": name}
                yield pid, "0", "process_labels", {"labels": name}
                yield pid, "0", "process_sort_index", {"sort_index": _GPU_SORT + number}
        ordered = sorted(self._tids.items(), key=lambda one: (one[0][1] or 0, *one[0][2:]))
        for place, ((device, stream, what, lane), track) in enumerate(ordered):
            name = f"stream {'?' if stream is None else stream}{what}{f' ({lane + 1})' if lane else ''}"
            yield self._pids[device], str(track), "thread_name", {"name": name}
            yield self._pids[device], str(track), "thread_sort_index", {"sort_index": place}

    def _used(self) -> pl.DataFrame:
        frames = (self._selection.host, self._selection.memory)
        return pl.concat([frame.select("thread") for frame in frames]).unique()

    def _placed(self, events: pl.DataFrame, what: str) -> pl.DataFrame:
        """Events with the `pid`, as JSON, and the `tid` of their track."""
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
