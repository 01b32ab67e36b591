"""Predictions as text: one of them in full, several as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.report.text import count, flops, percent, plural, safe, significant, size

OWNERS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations",
    "autocast_weight_cast": "autocast weight casts",
    "input": "inputs",
    "temporary": "temporaries",
    "workspace": "workspaces",
    "allocator_rounding": "allocator rounding",
}
MOST_MODULES = 6
BAR = 24


def plans_text(rows: Sequence[Mapping[str, Any]], width: int = 100) -> str:
    """What `stepscope plan` prints."""
    lines = list(_one(rows[0], width)) if len(rows) == 1 else list(_table(rows))
    notes = dict.fromkeys(note for row in rows for note in row["unmodelled"])
    if notes:
        lines += ["", "not modelled, or assumed:"]
        for note in notes:
            lines += textwrap.wrap(safe(note, 500), width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _one(row: Mapping[str, Any], width: int) -> Iterator[str]:
    yield f"{_name(row)} on {row['device']}"
    yield ""
    yield from _fact("verdict", _verdict(row))
    reserved = "" if row["peak_reserved_bytes"] is None else f"   {size(row['peak_reserved_bytes'])} reserved"
    settles = f", settled from step {row['settles_at_step']} on" if row["settles_at_step"] else ""
    yield from _fact("peak", f"{size(row['peak_allocated_bytes'])} allocated{reserved}{settles}")
    yield from _fact("parameters", f"{row['parameters']:,}")
    yield from _fact("FLOPs", f"{flops(row['flops'])} a step")
    bound = row["lower_bound"]
    if bound is not None:
        tokens = "" if row["tokens_per_s"] is None else f"   at most {count(row['tokens_per_s'])} tokens/s"
        parts = f"compute {significant(bound['compute_ms'])} ms, bandwidth {significant(bound['bandwidth_ms'])} ms"
        yield from _fact(
            "least time", f"{significant(bound['ms'])} ms a step: {bound['binds']} binds ({parts}){tokens}"
        )
    for key, title in (("max_batch", "largest batch"), ("max_seq_len", "longest sequence")):
        if row.get(key) is not None:
            yield from _fact(title, f"{row[key]:,}" if row[key] else "not even 1 fits")
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


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    searched = [name for name in ("max_batch", "max_seq_len") if any(row.get(name) is not None for row in rows)]
    titles = ["point", "device", "peak", "reserved", "verdict", "least ms", "binds", *searched]
    lines = [titles]
    for row in rows:
        bound = row["lower_bound"]
        lines.append(
            [
                _name(row),
                row["device"],
                size(row["peak_allocated_bytes"]),
                "" if row["peak_reserved_bytes"] is None else size(row["peak_reserved_bytes"]),
                row["fits"] or "",
                "" if bound is None else significant(bound["ms"]),
                "" if bound is None else bound["binds"],
                *("" if row.get(name) is None else f"{row[name]:,}" for name in searched),
            ]
        )
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]
    left = {0, 1, 4, 6}
    for line in lines:
        cells = [
            text.ljust(wide) if place in left else text.rjust(wide)
            for place, (text, wide) in enumerate(zip(line, widths))
        ]
        yield "  ".join(cells).rstrip()


def _name(row: Mapping[str, Any]) -> str:
    shown = [f"{name}={row['config'][name]}" for name in ("batch", "seq_len") if name in row["config"]]
    run = row["run"]
    return " ".join(
        filter(None, (safe(row["workload"]), safe(row["preset"] or ""), *shown, run["dtype"], run["mode"]))
    )


def _verdict(row: Mapping[str, Any]) -> str:
    if row["fits"] is None:
        return "a CPU's memory is whatever the machine has"
    room = f"{size(row['usable_bytes'])} for tensors"
    retries = f", after {plural(row['num_retries'], 'flush')} of the allocator" if row["num_retries"] else ""
    return f"{row['fits']}{retries}; the device has {room}"


def _fact(title: str, text: str) -> Iterator[str]:
    yield f"  {title:<17}{text}"
