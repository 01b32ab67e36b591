"""Builds predictions as a document: one in full, several as a table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import varying_axes
from stepscope.document.model import Bars, Document, Fact, Facts, Part, Section, Series, Table, Value
from stepscope.document.tables import columns_of
from stepscope.formatting import count, duration, flops, plural, safe, size, whole_percent

OWNERS = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients", "optimizer_state": "optimizer state",
    "activation": "activations", "autocast_weight_cast": "autocast weight casts", "input": "inputs",
    "unsharded_parameter": "unsharded parameters", "unsharded_gradient": "unsharded gradients",
    "communication": "communication buffers", "temporary": "temporaries", "workspace": "workspaces",
    "allocator_rounding": "allocator rounding",
}  # fmt: skip
SEARCHED = {"max_batch": "largest batch", "max_seq_len": "longest sequence", "min_ranks": "fewest GPUs"}
SHOWN = ("preset", "batch", "seq_len", "dtype", "mode", "compile", "sdpa", "optimizer")  # knobs that the title names
DEFAULTS = {"compile": "off", "sdpa": "free", "optimizer": "adamw"}  # values that the title leaves out
NUM_MODULES = 6


def plan_document(rows: Sequence[Mapping[str, Any]]) -> Document:
    """Return the predictions of `stepscope plan`; a row is what `plan --json` prints."""
    parts: list[Part] = list(_one(rows[0])) if len(rows) == 1 else [_table(rows)]
    bounds = {} if len(rows) == 1 else {row["device"]: why for row in rows for why in row["bounded_by"].values()}
    if bounds:
        parts.append(Facts(tuple(Fact(device, why) for device, why in bounds.items()), "what else limits the search"))
    if notes := dict.fromkeys(note for row in rows for note in row["unmodelled"]):
        parts.append(Facts(tuple(Fact("", note) for note in notes), "not modeled, or assumed"))
    device = f" on {rows[0]['device']}" if len(rows) == 1 else ""
    axes = _axes(rows[0]) if len(rows) == 1 else varying_axes([_axes(row) for row in rows])[1]
    title = f"{_title(rows[0], axes)}{device}"
    return Document(title, title, (Section("plan", "", tuple(parts)),))


def _one(row: Mapping[str, Any]) -> Iterator[Part]:
    reserved = "" if row["peak_reserved_bytes"] is None else f", {size(row['peak_reserved_bytes'])} reserved"
    settles = f"constant from step {row['settles_at_step']} on"
    if growth := row["growth_bytes_per_step"]:
        settles = f"at step {row['peak_step']}, and {size(growth)} more with every step"
    facts = [
        Fact("verdict", _verdict(row)),
        Fact("peak", f"{size(row['peak_allocated_bytes'])} allocated{reserved}; {settles}"),
    ]
    if peaks := row.get("stage_peak_bytes"):
        facts.append(Fact("stages", f"{', '.join(map(size, peaks))} allocated; all else is of the highest"))
    if row.get("error_bar"):
        facts.append(Fact("error bar", f"±{whole_percent(row['error_bar'])} of the allocated bytes"))
    facts += [Fact("parameters", f"{row['parameters']:,}"), Fact("FLOPs", f"{flops(row['flops'])} per step")]
    if (bound := row["lower_bound"]) is not None:
        other = "bandwidth" if bound["binds"] == "compute" else "compute"
        alone = f"({other} alone: {_ms(bound[f'{other}_ms'])})"
        tokens = "" if row["tokens_per_s"] is None else f"; at most {count(row['tokens_per_s'])} tokens/s"
        text = f"{_ms(bound['ms'])} per step, limited by {bound['binds']} {alone}{tokens}"
        facts.append(Fact("least time", text))
    for key, title in SEARCHED.items():
        if key in row:
            why = row["bounded_by"].get(key)
            found = "unknown" if row[key] is None else f"{row[key]:,}" if row[key] else "not even 1 fits"
            facts.append(Fact(title, found + (f": {why}" if why else "")))
    yield Facts(tuple(facts))
    live, peak = row["live_at_peak"], row["peak_allocated_bytes"]
    labels, series = [OWNERS.get(owner, owner) for owner in live], (Series("live at the peak", list(live.values())),)
    yield Bars("live_at_peak", f"live at the peak of {size(peak)}", labels, series, "live_bytes", peak)
    if modules := {name: num_bytes for name, num_bytes in row["live_at_peak_by_module"].items() if name}:
        columns = {"module": list(modules), "live_bytes": list(modules.values())}
        yield Table("modules", "modules that hold the most of it", columns, num_shown=NUM_MODULES)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    axes = [_axes(row) for row in rows]
    varying, _ = varying_axes(axes)
    columns: dict[str, list[Value]] = {name: [safe(each.get(name, ""), 30) for each in axes] for name in varying}
    columns |= columns_of(
        rows,
        f"device verdict peak_bytes:peak_allocated_bytes {' '.join(key for key in SEARCHED if key in rows[0])} "
        "reserved_bytes:peak_reserved_bytes least_time_ns limited_by",
        verdict=lambda row: row["fits"] or "",
        least_time_ns=lambda row: bound["ms"] * 1e6 if (bound := row["lower_bound"]) else None,
        limited_by=lambda row: (row["lower_bound"] or {}).get("binds", ""),
    )
    return Table("plans", "Predictions", columns, num_shown=len(rows), screen=tuple(columns))


def _axes(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of a point; a whole step of the user's own ignores the run knobs."""
    preset = {} if row["preset"] in (None, "default") else {"preset": row["preset"]}
    return {**preset, **row["config"], **({} if row["is_whole_step"] else row["run"])}


def _title(row: Mapping[str, Any], axes: Mapping[str, Any]) -> str:
    named = {name: axes[name] for name in SHOWN if name in axes and DEFAULTS.get(name) != axes[name]}
    bare = ("preset", "dtype", "mode")
    words = [str(value) if name in bare else f"{name}={value}" for name, value in named.items()]
    rank = f", one rank of {row['num_ranks']}" if row.get("num_ranks", 1) > 1 else ""
    return safe(" ".join((row["workload"], *words)), 200) + (", a whole step" if row["is_whole_step"] else rank)


def _verdict(row: Mapping[str, Any]) -> str:
    if row["fits"] is None:
        return "a CPU is limited only by the machine's memory"
    usable, growth = row["usable_bytes"], row["growth_bytes_per_step"]
    retries = f", after {plural(row['num_retries'], 'allocator flush')}" if row["num_retries"] else ""
    free = usable - row["peak_reserved_bytes"] if growth else 0
    full = f", full after {count(row['peak_step'] + free // growth)} steps" if free > 0 else ""
    return f"{row['fits']}{retries}; the device has {size(usable)} for tensors{full}"


def _ms(milliseconds: float) -> str:
    return duration(milliseconds * 1e6, digits=3)
