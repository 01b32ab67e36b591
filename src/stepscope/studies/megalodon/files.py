"""Further files of the megalodon study: a summary of steps, averages by op, the trace of each window."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepscope.errors import Unavailable, UsageError
from stepscope.formatting import cell
from stepscope.studies.figures import PEAK, TIME, table
from stepscope.studies.stored import Recorded, Stored

SUMMARY = ("dtype", "bf16_reduction", "seq_len", "batch_size", "ms_per_step", "peak_mem_gb")
SCHEDULES = ("short", "long")
_NUM_OPS = 40


def summary_csv(stored: Stored) -> str:
    """Return summary.csv with rows added to those it already has; no row is ever removed."""
    from stepscope.render.csv import csv_of

    return appended(stored.folder / "summary.csv", csv_of(table("summary", "Steps", _summary(stored), *SUMMARY)))


def appended(path: Path, content: str) -> str:
    """Return what a CSV file has, and below it those lines of `content` that it does not have yet."""
    header, *lines = content.splitlines()
    kept = (path.read_text(encoding="utf-8").splitlines() if path.is_file() else []) or [header]
    if kept[:1] != [header]:
        raise UsageError(f"{path} has other columns than {header}. Move the file away")
    known = Counter(kept)
    for line in lines:  # two equal rows, such as two that ran out of memory, are two lines
        if known[line] > 0:
            known[line] -= 1
        else:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _summary(stored: Stored) -> Iterator[dict[str, Any]]:
    """Yield one row per point: milliseconds per step and the peak in 10⁹ bytes, or its status."""
    for record in stored.rows("steps").needed():
        time_ns, peak = record[TIME], record[PEAK]
        row = {**record, "batch_size": record["batch"]}
        row["ms_per_step"] = record["status"] if time_ns is None else round(time_ns / 1e6, 4)
        row["peak_mem_gb"] = record["status"] if peak is None else round(peak / 1e9, 6)
        yield {name: row[name] for name in SUMMARY}


def figure_text(name: str) -> Callable[[Stored], str]:
    """Return one figure of the summary, one line per point."""
    names = (*SUMMARY[:4], name)
    return lambda stored: _text("", [{each: str(row[each]) for each in names} for row in _summary(stored)])


def recorded(stored: Stored) -> Iterator[tuple[str, Recorded]]:
    """Yield the recordings with their names: schedule, path, length."""
    for schedule in SCHEDULES:
        for one in stored.recordings(schedule):
            if one.status == "ok" and one.folder is not None:
                yield f"{schedule}_{one.axes['ema']}_{one.axes['seq_len']}", one


def key_averages(stored: Stored) -> dict[str, str]:
    """Return tables by op of every recording: device time (host time on a CPU), and memory."""
    made = {}
    for name, one in recorded(stored):
        made[f"key_averages_{name}_device_time.txt"] = _by_time(one)
        made[f"key_averages_{name}_memory.txt"] = _by_memory(one)
    if not made:
        raise Unavailable("nothing was recorded")
    return made


def traces(stored: Stored) -> dict[str, bytes]:
    """Return the trace of every window, by the number of its last step."""
    made = {}
    for name, one in recorded(stored):
        assert one.folder is not None
        for number, window in windows_of(one):
            made[f"{name}/speed_step{number}.json.gz"] = gzip.decompress((one.folder / window["file"]).read_bytes())
    if not made:
        raise Unavailable("no trace was recorded")
    return made


def windows_of(one: Recorded) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the trace windows of a recording: the number of the last step, and the facts of the window."""
    recording = one.source.recording
    first = recording.facts.get("trace")
    if not first:
        return
    steps = [sample.step for sample in recording.window("trace")]
    for window in (first, *first.get("repeated", ())):
        traced, steps = steps[: window["num_steps"]], steps[window["num_steps"] :]
        yield traced[-1], window


def _by_time(one: Recorded) -> str:
    account = one.source.analysis.ranks[0]
    num_steps = max(1, account.steps.height)
    names = ["host_self_ns", "host_total_ns"]
    if account.ops.head(_NUM_OPS)["device_self_ns"].sum():
        names = ["device_self_ns", "device_total_ns", *names]
    whole = max(1, account.ops[names[0]].sum())
    rows = [
        {"op": "(no op)" if row["op"] is None else row["op"],
         **{name: row[name] / num_steps for name in ("num_calls", *names)}, "share": row[names[0]] / whole}
        for row in account.ops.head(_NUM_OPS).to_dicts()
    ]  # fmt: skip
    return _text(f"One step by op, {num_steps} steps of the first trace window, {account.ops.height} ops", rows)


def _by_memory(one: Recorded) -> str:
    from stepscope.analysis.memory.by_owner import memory_by_op

    ops = memory_by_op(one.source.allocations)
    names = ("op", "num_allocations", "allocated_bytes", "largest_bytes", "at_peak_bytes")
    rows = [{name: getattr(op, name) for name in names} for op in ops[:_NUM_OPS]]
    peak = cell("peak_bytes", one.source.memory.account.peak_bytes)
    return _text(f"One step by op, by bytes allocated; the peak is {peak}, {len(ops)} ops", rows)


def _text(title: str, rows: list[dict[str, Any]]) -> str:
    """Return rows as aligned text, however wide."""
    from stepscope.render.terminal import table_lines

    lines = table_lines(table("", "", rows, *(rows[0] if rows else ())), len(rows), width=1 << 20)
    return "\n".join([title, "", *lines] if title else lines) + "\n"
