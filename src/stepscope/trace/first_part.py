"""The rows of a trace's tables; of a trace too large to hold, those of its first part in time.

The analyses need 200 to 600 bytes per row, and a file can have any number of them. Beyond millions of rows, more
steps say little about where a step goes. Whoever wants them all raises the limit.
"""

import polars as pl

from stepscope.border import limit
from stepscope.trace.tables import COLLECTIVES, DEVICE_TABLE, HOST

_SHARE_KEPT = 0.75  # of the rows, each time there are too many
_BYTES_PER_ROW = 600  # of memory, at most: diagnose and report need more than analyze

Frames = dict[str, list[pl.DataFrame]]


class FirstPart:
    """Takes the tables of slices in file order, in which times may come in any order."""

    def __init__(self) -> None:
        self.frames: Frames = {}
        self._most_rows = limit("TRACE_ROWS")
        self._num_rows = self._num_read = 0
        self._until_ns: int | None = None  # what ends at this time or later is left out
        self._last_ns = 0  # of all that was read

    def add(self, frames: dict[str, pl.DataFrame]) -> None:
        parts = {name: [frame] for name, frame in frames.items()}
        self._num_read += _num_rows(parts)
        if self._until_ns is not None:
            self._last_ns = max(self._last_ns, _last_ns(parts))
            parts = _ending_before(self._until_ns, parts)
        for name, more in parts.items():
            self.frames.setdefault(name, []).extend(more)
        self._num_rows += _num_rows(parts)
        if self._num_rows > self._most_rows:
            self._last_ns = max(self._last_ns, _last_ns(self.frames))
            ends = pl.concat(_end(frame) for parts in self.frames.values() for frame in parts if _has_times(frame))
            self._until_ns = int(ends.quantile(_SHARE_KEPT, "lower") or 0)
            self.frames = _ending_before(self._until_ns, self.frames)
            self._num_rows = _num_rows(self.frames)

    def close(self) -> str | None:
        """End with a step whose work the device has done. Return what was left out."""
        if self._until_ns is None:
            return None
        host, device = (self.frames.get(table.name, []) for table in (HOST, DEVICE_TABLE))
        starts = [frame["start_ns"].min() for frame in (*host, *device)]
        first_ns = min((start for start in starts if isinstance(start, int)), default=0)
        until_ns = self._until_ns - _longest_lag_ns(host, device)
        if until_ns - first_ns < (self._until_ns - first_ns) / 2:
            until_ns = self._until_ns
        until_ns = _end_of_step(host, until_ns)
        kept = _ending_before(until_ns, {**self.frames, DEVICE_TABLE.name: []})
        launches = _columns(kept.get(HOST.name, []), "correlation").to_series().unique().implode()
        is_done = pl.col("start_ns") < until_ns
        or_launched = is_done | pl.col("correlation").is_in(launches)
        kept[DEVICE_TABLE.name] = [
            frame.filter(or_launched if "correlation" in frame.columns else is_done) for frame in device
        ]
        kept[COLLECTIVES.name] = _of(kept, self.frames.get(COLLECTIVES.name, []))
        self.frames = kept
        num_kept, num = _num_rows(kept), self._num_read
        kept_s, all_s = (until_ns - first_ns) / 1e9, (self._last_ns - first_ns) / 1e9
        return (
            f"only the first {kept_s:.4g} of {all_s:.4g} s were kept, {num_kept:,} of {num:,} events, to save memory "
            f"(all figures are of that part): STEPSCOPE_MAX_TRACE_ROWS={num} keeps all, which takes about "
            f"{_BYTES_PER_ROW * num / 1e9:.1f} GB"
        )


def _num_rows(frames: Frames) -> int:
    return sum(frame.height for parts in frames.values() for frame in parts)


def _has_times(frame: pl.DataFrame) -> bool:
    return "start_ns" in frame.columns or "time_ns" in frame.columns


def _end(frame: pl.DataFrame) -> pl.Series:
    if "time_ns" in frame.columns:
        return frame["time_ns"]
    return frame["start_ns"] + frame["duration_ns"] if "duration_ns" in frame.columns else frame["start_ns"]


def _last_ns(frames: Frames) -> int:
    ends = [_end(frame).max() for parts in frames.values() for frame in parts if _has_times(frame)]
    return max((end for end in ends if isinstance(end, int)), default=0)


def _ending_before(until_ns: int, frames: Frames) -> Frames:
    kept: Frames = {}
    for name, parts in frames.items():
        if name != COLLECTIVES.name:
            kept[name] = [part for frame in parts if not (part := frame.filter(_end(frame) < until_ns)).is_empty()]
    if COLLECTIVES.name in frames:
        kept[COLLECTIVES.name] = _of(kept, frames[COLLECTIVES.name])
    return kept


def _of(kept: Frames, collectives: list[pl.DataFrame]) -> list[pl.DataFrame]:
    """Return the collectives whose op or kernel was kept."""
    owners = [*kept.get(HOST.name, []), *kept.get(DEVICE_TABLE.name, [])]
    is_kept = pl.col("event").is_in(_columns(owners, "event").to_series().implode())
    return [frame.filter(is_kept) for frame in collectives]


def _columns(parts: list[pl.DataFrame], *names: str) -> pl.DataFrame:
    found = [frame.select(*names, end_ns=_end(frame)) for frame in parts if set(names) <= set(frame.columns)]
    schema = {name: HOST.schema[name] for name in names} | {"end_ns": pl.Int64()}
    return pl.concat([pl.DataFrame(schema=schema), *found])


def _end_of_step(host: list[pl.DataFrame], until_ns: int) -> int:
    """Return the end of the last step that the profiler labeled before a time; that time if there is none."""
    annotations = _columns([frame.filter(pl.col("kind") == "annotation") for frame in host], "name")
    is_label = pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#")
    last = annotations.filter(is_label, pl.col("end_ns") < until_ns)["end_ns"].max()
    return last + 1 if isinstance(last, int) else until_ns


def _longest_lag_ns(host: list[pl.DataFrame], device: list[pl.DataFrame]) -> int:
    """Return the longest time from a launch to the end of its work on the device."""
    begun = _columns(host, "correlation", "start_ns").group_by("correlation").agg(pl.col("start_ns").min())
    done = _columns(device, "correlation").group_by("correlation").agg(pl.col("end_ns").max())
    lag = begun.drop_nulls().join(done, on="correlation").select((pl.col("end_ns") - pl.col("start_ns")).max()).item()
    return max(0, lag or 0)
