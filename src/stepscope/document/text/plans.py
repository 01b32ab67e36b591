"""Predictions as text: one of them in full, several as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import varying_axes
from stepscope.formatting import count, duration, flops, percent, plural, safe, size

OWNERS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations",
    "autocast_weight_cast": "autocast weight casts",
    "input": "inputs",
    "unsharded_parameter": "unsharded parameters",
    "unsharded_gradient": "unsharded gradients",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "workspace": "workspaces",
    "allocator_rounding": "allocator rounding",
}
SEARCHED = {"max_batch": "largest batch", "max_seq_len": "longest sequence"}
SHOWN = ("preset", "batch", "seq_len", "dtype", "mode", "compile", "sdpa", "optimizer")
"""What a heading says of a point; what differs between points is always said."""
USUAL = {"compile": "off", "sdpa": "free", "optimizer": "adamw"}
"""What goes without saying."""
DISPENSABLE = ("binds", "least time", "reserved")
"""Columns that a table does without where there is no room."""
MOST_MODULES = 6
BAR = 24


def plans_text(rows: Sequence[Mapping[str, Any]], width: int = 100) -> str:
    """What `stepscope plan` prints."""
    lines = list(_one(rows[0], width)) if len(rows) == 1 else list(_table(rows, width))
    bounds = [] if len(rows) == 1 else _bounds(rows)
    for title, notes in (
        ("what bounds a search, besides the memory:", bounds),
        ("not modeled, or assumed:", [note for row in rows for note in row["unmodelled"]]),
    ):
        if notes:
            lines += ["", title]
        for note in dict.fromkeys(notes):
            lines += textwrap.wrap(safe(note, 500), width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _one(row: Mapping[str, Any], width: int) -> Iterator[str]:
    yield _cut(f"{_heading(row, _axes(row))} on {row['device']}", width)
    yield ""
    yield from _fact("verdict", _verdict(row), width)
    reserved = "" if row["peak_reserved_bytes"] is None else f", {size(row['peak_reserved_bytes'])} reserved"
    yield from _fact("peak", f"{size(row['peak_allocated_bytes'])} allocated{reserved}; {_settles(row)}", width)
    if row.get("error_bar"):
        yield from _fact("error bar", f"±{row['error_bar']:.0%} of what is allocated", width)
    yield from _fact("parameters", f"{row['parameters']:,}", width)
    yield from _fact("FLOPs", f"{flops(row['flops'])} a step", width)
    bound = row["lower_bound"]
    if bound is not None:
        other = "bandwidth" if bound["binds"] == "compute" else "compute"
        text = f"{_ms(bound['ms'])} a step: {bound['binds']} binds ({other} alone {_ms(bound[f'{other}_ms'])})"
        tokens = "" if row["tokens_per_s"] is None else f"; at most {count(row['tokens_per_s'])} tokens/s"
        yield from _fact("least time", text + tokens, width)
    for key, title in SEARCHED.items():
        if key in row:
            why = row["bounded_by"].get(key)
            found = "not known" if row[key] is None else f"{row[key]:,}" if row[key] else "not even 1 fits"
            yield from _fact(title, found + (f": {why}" if why else ""), width)
    yield ""
    yield f"live at the peak of {size(row['peak_allocated_bytes'])}"
    for owner, num_bytes in row["live_at_peak"].items():
        share = num_bytes / max(1, row["peak_allocated_bytes"])
        bar = "█" * round(share * BAR)
        yield f"  {OWNERS.get(owner, owner):<22}{size(num_bytes):>10}  {percent(share):>7}  {bar}".rstrip()
    modules = [(name, num_bytes) for name, num_bytes in row["live_at_peak_by_module"].items() if name]
    if modules:
        yield ""
        yield "modules that hold the most of it"
        for name, num_bytes in modules[:MOST_MODULES]:
            yield f"  {size(num_bytes):>10}  {safe(name, width - 14)}"


def _table(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    axes = [_axes(row) for row in rows]
    varying, constants = varying_axes(axes)
    yield _cut(_heading(rows[0], constants).rstrip(","), width)
    yield ""
    lines = [
        {name: safe(values.get(name, ""), 30) for name in varying} | _cells(row) for row, values in zip(rows, axes)
    ]
    columns = {name: [name, *(line.get(name, "") for line in lines)] for line in lines for name in line}
    left_out = []
    for name in DISPENSABLE:
        if sum(max(map(len, column)) + 2 for column in columns.values()) - 2 > width:
            left_out.append(columns.pop(name)[0])
    left = {"device", "verdict", "binds", *(name for name in varying if isinstance(axes[0].get(name), str))}
    widths = {name: max(map(len, column)) for name, column in columns.items()}
    for cells in zip(*columns.values()):
        placed = [
            text.ljust(widths[name]) if name in left else text.rjust(widths[name])
            for name, text in zip(columns, cells)
        ]
        yield _cut("  ".join(placed).rstrip(), width)
    if left_out:
        yield ""
        yield f"no room for: {', '.join(left_out)} (--json has them)"


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    bound = row["lower_bound"]
    return {
        "device": row["device"],
        "peak": size(row["peak_allocated_bytes"]),
        "reserved": "" if row["peak_reserved_bytes"] is None else size(row["peak_reserved_bytes"]),
        "verdict": row["fits"] or "",
        "least time": "" if bound is None else _ms(bound["ms"]),
        "binds": "" if bound is None else bound["binds"],
        **{key: "" if row[key] is None else f"{row[key]:,}" for key in SEARCHED if key in row},
    }


def _axes(row: Mapping[str, Any]) -> dict[str, Any]:
    """What says which point it is; a whole step runs as it likes, whatever the knobs of a run say."""
    preset = {} if row["preset"] in (None, "default") else {"preset": row["preset"]}
    return {**preset, **row["config"], **({} if row["is_whole_step"] else row["run"])}


def _heading(row: Mapping[str, Any], axes: Mapping[str, Any]) -> str:
    plain = ("preset", "dtype", "mode")
    said = {name: axes[name] for name in SHOWN if name in axes and USUAL.get(name) != axes[name]}
    words = [str(value) if name in plain else f"{name}={value}" for name, value in said.items()]
    rank = f", one rank of {row['fsdp']}," if row.get("fsdp") else ""
    return safe(" ".join((row["workload"], *words)), 200) + (", a whole step," if row["is_whole_step"] else rank)


def _bounds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{row['device']}: {why}" for row in rows for why in row["bounded_by"].values()]


def _verdict(row: Mapping[str, Any]) -> str:
    if row["fits"] is None:
        return "a CPU's memory is whatever the machine has"
    usable, growth = row["usable_bytes"], row["growth_bytes_per_step"]
    retries = f", after {plural(row['num_retries'], 'flush')} of the allocator" if row["num_retries"] else ""
    full = ""
    if growth and row["peak_reserved_bytes"] < usable:
        full = f", full after {count(row['peak_step'] + (usable - row['peak_reserved_bytes']) // growth)} steps"
    return f"{row['fits']}{retries}; the device has {size(usable)} for tensors{full}"


def _settles(row: Mapping[str, Any]) -> str:
    if row["growth_bytes_per_step"]:
        return f"at step {row['peak_step']}, and {size(row['growth_bytes_per_step'])} more with every step"
    return f"settled from step {row['settles_at_step']} on"


def _ms(milliseconds: float) -> str:
    return duration(milliseconds * 1e6, digits=3)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _fact(title: str, text: str, width: int) -> Iterator[str]:
    """A title and its text, in as many lines as it takes."""
    indent = " " * 19
    yield from textwrap.wrap(safe(text, 500), width, initial_indent=f"  {title:<17}", subsequent_indent=indent)
