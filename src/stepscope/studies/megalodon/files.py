"""The files of the study `megalodon`: a summary of steps, averages by op, a trace of each window."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import Any

from stepscope.document.model import Table, Value
from stepscope.errors import Unavailable
from stepscope.formatting import cell, safe
from stepscope.studies.stored import Recorded, Stored

SUMMARY = ("dtype", "bf16_reduction", "seq_len", "batch_size", "ms_per_step", "peak_mem_gb")
SCHEDULES = ("short", "long")
_WIDTH = 100
_NUM_OPS = 40


def summary(stored: Stored) -> Table:
    """A row for each point: milliseconds a step and the peak in 10⁹ bytes, or what became of it instead."""
    columns: dict[str, list[Value]] = {name: [] for name in SUMMARY}
    for record in stored.rows("steps").needed():
        time_ns, peak = record["time_median_ns"], record["peak_allocated_bytes"]
        found = {
            **record,
            "batch_size": record["batch"],
            "ms_per_step": record["status"] if time_ns is None else round(time_ns / 1e6, 4),
            "peak_mem_gb": record["status"] if peak is None else round(peak / 1e9, 6),
        }
        for name in SUMMARY:
            columns[name].append(found[name])
    return Table("summary", "Steps", columns, 60)


def figure_text(name: str) -> Callable[[Stored], str]:
    """One figure of the summary, a line a point."""

    def content(stored: Stored) -> str:
        from stepscope.document.text.trace_tables import Column, table_lines

        columns = summary(stored).columns
        points = [" ".join(map(str, point)) for point in zip(*(columns[each] for each in SUMMARY[:4]))]
        figures = Column(name, [str(value) for value in columns[name]])
        return _text(table_lines(" ".join(SUMMARY[:4]), points, [figures], _WIDTH))

    return content


def recorded(stored: Stored) -> Iterator[tuple[str, Recorded]]:
    """The recordings that were made, each under its name: schedule, path, length."""
    for schedule in SCHEDULES:
        for one in stored.recordings(schedule):
            if one.status == "ok" and one.folder is not None:
                yield f"{schedule}_{one.axes['ema']}_{one.axes['seq_len']}", one


def key_averages(stored: Stored) -> dict[str, str]:
    """By op of every recording: device time (on a CPU the host's), and memory."""
    made = {}
    for name, one in recorded(stored):
        made[f"key_averages_{name}_device_time.txt"] = _by_time(one)
        made[f"key_averages_{name}_memory.txt"] = _by_memory(one)
    if not made:
        raise Unavailable("nothing was recorded")
    return made


def traces(stored: Stored) -> dict[str, bytes]:
    """The trace of every window that was traced, by the number of its last step."""
    made = {}
    for name, one in recorded(stored):
        assert one.folder is not None
        for number, window in windows_of(one):
            made[f"{name}/speed_step{number}.json.gz"] = gzip.decompress((one.folder / window["file"]).read_bytes())
    if not made:
        raise Unavailable("no trace was recorded")
    return made


def windows_of(one: Recorded) -> Iterator[tuple[int, dict[str, Any]]]:
    """The trace windows of a recording: the number of the last step of each, and what is known of it."""
    recording = one.source.card.recording
    first = recording.facts.get("trace")
    if not first:
        return
    steps = [sample.step for sample in recording.window("trace")]
    for window in (first, *first.get("repeated", ())):
        traced, steps = steps[: window["num_steps"]], steps[window["num_steps"] :]
        yield traced[-1], window


def _by_time(one: Recorded) -> str:
    from stepscope.document.text.trace_tables import Column, table_lines

    account = one.source.analysis.ranks[0]
    ops = account.ops.head(_NUM_OPS)
    num_steps = max(1, account.steps.height)
    on_device = bool(ops["device_self_ns"].sum())
    names = ["device_self_ns", "device_total_ns"] if on_device else []
    names += ["host_self_ns", "host_total_ns"]
    whole = account.ops[names[0]].sum()
    columns = [Column("calls", [cell("num_calls", value / num_steps) for value in ops["num_calls"]])]
    for name in names:
        cells = [cell(name, value / num_steps) for value in ops[name]]
        columns.append(Column(name.removesuffix("_ns").replace("_", " "), cells))
    columns.append(Column("share", [cell("share", value / max(1, whole)) for value in ops[names[0]]]))
    by = "device self time" if on_device else "host self time: it ran on a CPU"
    known = [safe(op) if op is not None else "(no op)" for op in ops["op"]]
    title = f"A step by op, by {by}; {num_steps} steps of the first trace window, {account.ops.height} ops"
    return _text([title, "", *table_lines("op", known, columns, _WIDTH)])


def _by_memory(one: Recorded) -> str:
    from stepscope.analysis.memory.by_op import memory_by_op
    from stepscope.document.text.trace_tables import Column, table_lines

    source = one.source
    rows = memory_by_op(source.allocations)
    shown = rows[:_NUM_OPS]
    columns = [Column("allocations", [cell("num_", row.num_allocations) for row in shown])]
    for name in ("allocated_bytes", "largest_bytes", "at_peak_bytes"):
        title = name.removesuffix("_bytes").replace("_", " ")
        columns.append(Column(title, [cell(name, getattr(row, name)) for row in shown]))
    peak = cell("peak_bytes", source.memory.account.peak_bytes)
    title = f"A step by op, by what it allocated; the peak is {peak}, {len(rows)} ops"
    return _text([title, "", *table_lines("op", [safe(row.op) for row in shown], columns, _WIDTH)])


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
