"""Answers of the study `hydra` that hold variants and sizes against each other: losses, routing, presets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.document.model import Bars, Series, Text
from stepscope.errors import Unavailable
from stepscope.studies.figures import Record, against, beside, busy_ns, compared, known, listed, paced, said, table
from stepscope.studies.hydra import note
from stepscope.studies.hydra.ops import own_times
from stepscope.studies.hydra.step import PARTS, step_record
from stepscope.studies.stored import Recorded, Rows, Stored

if TYPE_CHECKING:
    from stepscope.session.source import Source

TIME, PEAK = "time_median_ns", "peak_allocated_bytes"
SAME_LOSS = 1e-4
"""Of the loss on one batch: rows that differ by less compute the same."""
AT_FLOOR = 1.01
"""So many times the fewest rows that can be executed, at most: nearly every token stops at once."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")


def losses(stored: Stored) -> Iterator[Any]:
    """Three ways to the same loss."""
    rows = stored.rows("losses").needed()
    full = rows.one(knob_loss="full")
    values = [record["loss"] for record in rows.ok]
    sentences = [
        f"At {_shape(full)}, a step with all logits takes {said(TIME, full[TIME])} and {said(PEAK, full[PEAK])} at "
        "its peak.",
    ]
    for record in rows.ok:
        if record is not full:
            saved = 1 - record[PEAK] / full[PEAK]
            change = f"{said('share', abs(saved))} {'less' if saved >= 0 else 'more'} at the peak"
            sentences.append(f"{record['knob_loss']}: {against(record, full, 'that')}, with {change}.")
    spread = max(values) - min(values)
    sentences.append(f"The losses are {values[0]:.4f} and differ by {spread:.1g}: it is one model.")
    yield Text(" ".join(sentences))
    names = ("knob_loss", TIME, "tokens_per_s", PEAK, "before_backward_bytes", "loss", "speedup")
    yield table("losses", "The loss, three ways", rows, *names)
    ok = list(rows.ok)
    yield Bars(
        id="losses", title="Peak by implementation of the loss", labels=[record["knob_loss"] for record in ok],
        series=(Series("peak", [record[PEAK] for record in ok]),), unit="peak_bytes",
    )  # fmt: skip


def routing(stored: Stored) -> Iterator[Any]:
    """Static against dynamic depth, of one model at one size, with what was really executed."""
    rows = stored.rows("routing").needed()
    sentences = [f"All at {_shape(next(iter(rows)))}."]
    times_static: dict[str, tuple[float, Record]] = {}
    others: list[str] = []
    for preset in rows.values("preset"):
        of = rows.where(preset=preset, compile="off")
        static = of.one(routing="static", capacity=1.0)
        variants = [record for record in of.ok if record is not static]
        if any(record["num_parameters"] != static["num_parameters"] for record in variants):
            raise Unavailable(f"{preset}: a variant has another number of parameters than static")
        sentences.append(f"{preset}, {static['num_parameters']:,} parameters: static takes {_told(static)}.")
        for record in variants:
            is_main = (record["routing"], record["dispatch"], record["capacity"]) == ("dynamic", "gather", 1)
            (sentences if is_main else others).append(_variant_sentence(record, static))
            times_static |= {preset: (record[TIME] / static[TIME], record)} if is_main else {}
    pairs = [
        (record, rows.where(preset=record["preset"], compile="off").one(routing=record["routing"], capacity=1.0))
        for record in rows.ok.where(compile=[name for name in rows.values("compile") if name != "off"])
    ]
    sentences += [
        f"Compiled with CUDA graphs ({record['compile']}), {record['routing']} takes {_told(record)}, "
        f"{against(record, eager, 'eager')}."
        for record, eager in pairs
    ]
    yield Text(" ".join(sentences))
    yield Text(" ".join([*others, *_floor(rows), *_same_functions(rows)]))
    records = [
        record | {"executed_share": record.get("fact_executed_fraction"), "step_flops": record.get("flops_counted")}
        for record in rows
    ]
    names = ("preset", "routing", "dispatch", "capacity", "compile", "loss", "executed_share", "step_flops", TIME,
             "tokens_per_s", "mfu_share", "num_kernels", PEAK, "peak_reserved_bytes", "gpu_busy_share", "time_p10_ns",
             "time_p90_ns", "num_parameters")  # fmt: skip
    remarks = "; ".join(f"{record['compile']}: {record['notes']}" for record in rows if record.get("notes"))
    yield table("routing", "Routing at equal topology", records, *known(records, *names), note=remarks)
    if note.PRESET in times_static:
        ours = [{"routing": "dynamic", "times_static": times_static[note.PRESET][0]}]
        where = f"{note.NOTE}; there two sizes were compared, with routing switched off"
        yield beside(ours, note.ROUTING, "routing", "times_static", where)
        told = listed(
            f"{times:.2f} times static's at {preset}{paced(record)}"
            for preset, (times, record) in times_static.items()
        )
        yield Text(
            f"The note's {note.ROUTING['dynamic']:.2f} is one model's step beside another's of another size. Of one "
            f"model, a dynamic step is {told}."
        )
    for record, eager in pairs:
        yield Text(_why_compiled(stored, record, eager))


def _shape(record: Record) -> str:
    """Batch, length and dtype in a sentence."""
    return f"{record['batch']} × {record['seq_len']} tokens, {record['dtype']}"


def _name(record: Record) -> str:
    """A variant in a sentence."""
    if record["capacity"] != 1:
        return f"{record['routing']} (capacity {record['capacity']:g})"
    if record["compile"] != "off":
        return f"{record['routing']} (compiled)"
    return str(record["routing"]) if record["routing"] == "static" else f"{record['routing']} ({record['dispatch']})"


def _told(record: Record) -> str:
    """A step's time with how it spreads, what it reaches and who sets its pace."""
    text = said(TIME, record[TIME])
    if record["is_noisy"]:
        text += f" (p10 to p90: {said('_ns', record['time_p10_ns'])} to {said('_ns', record['time_p90_ns'])})"
    if record.get("mfu_share") is not None:
        text += f" at MFU {said('share', record['mfu_share'])}"
    return f"{text}{paced(record)}"


def _floor(rows: Rows) -> list[str]:
    """How few rows there can be, and what it means that no router was trained; nothing where none routes."""
    dynamic = rows.ok.where(routing="dynamic", dispatch="gather", capacity=1.0)
    if not len(dynamic):
        return []
    depths = listed(dynamic.values("recursions"))
    text = f"A token runs the MLP once at least: the floor is 1 ÷ {depths} recursions of the rows. No router here is "
    text += "trained: where a trained one would stop tokens is not known."
    lowest = [r for r in dynamic if r["fact_executed_fraction"] * r["recursions"] <= AT_FLOOR]
    if lowest:
        text += f" At {listed(r['preset'] for r in lowest)} the rows are at the floor, nearly every token stops at "
        text += "once: what that saves is the most that dynamic depth can, and no trained router's saving."
    return [text]


def _same_functions(rows: Rows) -> list[str]:
    """Which rows compute the same, by the loss on the same weights and batch, and which of those is faster."""
    groups: list[list[Record]] = []
    for record in rows.ok:
        for group in groups:
            first = group[0]
            if record["preset"] == first["preset"] and abs(record["loss"] / first["loss"] - 1) < SAME_LOSS:
                group.append(record)
                break
        else:
            groups.append([record])
    same = [group for group in groups if len(group) > 1]
    told = [f"{listed(map(_name, group))} at {group[0]['preset']} ({group[0]['loss']:.4f})" for group in same]
    sentences = [f"Rows with one loss compute the same: {'; '.join(told) or 'no two do'}."]
    if all(len({record["routing"] for record in group}) == 1 for group in groups):
        losses = listed(f"{group[0]['loss']:.4f} of {_name(group[0])} at {group[0]['preset']}" for group in groups)
        sentences.append(f"Static and dynamic are no one function: the losses are {losses}.")
    for gather, *rest in (group for group in same if group[0]["routing"] == "dynamic"):
        sentences += [
            f"Of one function, {_name(gather)} is {against(gather, other, _name(other))}, "
            f"{said(TIME, gather[TIME])} and {said(TIME, other[TIME])}."
            for other in rest
        ]
    return sentences


def _why_compiled(stored: Stored, record: Record, eager: Record) -> str:
    """How much of a compiled step's speed launches can explain: no more than the eager step is idle."""
    knobs = ("preset", "batch", "seq_len", "dtype", "routing", "capacity")
    idle = step_record(stored.recording("step", **{name: eager[name] for name in knobs})).get("gpu_idle_share")
    if idle is None:
        raise Unavailable("how long the eager step is idle is not known on this device")
    whole, by_launches = eager[TIME] / record[TIME], 1 / (1 - idle)
    most = "fewer and fused kernels are" if whole / by_launches > by_launches else "what the host no longer does is"
    return (
        f"Why {_name(record)} at {record['preset']} is {compared(record[TIME], eager[TIME], 'eager')}: of the eager "
        f"step, recorded, the GPU has nothing to do for {said('share', idle)}, so that launches explain "
        f"{by_launches:.2f} times at most; the other {whole / by_launches:.2f} times are the kernels', "
        f"{record['num_kernels']:,} instead of {eager['num_kernels']:,}: {most} the most of it."
    )


def _variant_sentence(record: Record, static: Record) -> str:
    text = (
        f"{_name(record)} executes {said('share', record['fact_executed_fraction'])} of the MLP's rows "
        f"and takes {_told(record)}, {against(record, static, 'static')}"
    )
    differs = []
    if record.get("flops_counted") and record["flops_counted"] != static["flops_counted"]:
        less = 1 - record["flops_counted"] / static["flops_counted"]
        differs.append(f"{said('share', abs(less))} {'fewer' if less > 0 else 'more'} FLOPs")
    if record.get("num_kernels") is not None:
        differs.append(f"{record['num_kernels']:,} kernels instead of {static['num_kernels']:,}")
    text += f", with {' and '.join(differs)}" if differs else ""
    if record.get("num_kernels") is not None and (record["routing"], record["dispatch"]) == ("dynamic", "gather"):
        text += f"; each of {record['blocks']} blocks waits for the GPU to learn how many tokens go on"
    if paced(record) and static.get("gpu_busy_share") is not None:
        work, other = (said("_ns", busy_ns(each)) for each in (record, static))
        text += f"; the GPU's work is {work} instead of {other}"
    return f"{text}."


def sizes(stored: Stored) -> Iterator[Any]:
    """The same figures of larger presets, at one number of tokens."""
    groups: dict[tuple[Any, ...], list[Recorded]] = {}
    for recorded in stored.recordings("step"):
        if recorded.status == OK:
            shape = tuple(recorded.axes[name] for name in ("batch", "seq_len", "dtype"))
            groups.setdefault(shape, []).append(recorded)
    alike = max(groups.values(), key=len, default=[])
    if len(alike) < 2:
        raise Unavailable("no two presets were recorded at one batch, length and dtype")
    records = [step_record(each) | _patterns(each.source) for each in alike]
    first, last = records[0], records[-1]
    names = [*(f"{part}_share" for part in PARTS), "products_share", "copies_share"]
    moves = ", ".join(f"{_title(name)} from {said(name, first[name])} to {said(name, last[name])}" for name in names)
    tops = [record["largest_op"] for record in records]
    same = tops.count(tops[0])
    furthest = max(names, key=lambda name: abs(last[name] - first[name]))
    larger, longer = (last[name] / first[name] for name in ("num_parameters", "step_ns"))
    yield Text(
        f"From {first['preset']} to {last['preset']}, {first['num_parameters']:,} to {last['num_parameters']:,} "
        f"parameters ({larger:.1f} times), a step takes {longer:.1f} times as long. Shares go: {moves}. What moves "
        f"most is {_title(furthest)}, by {100 * abs(last[furthest] - first[furthest]):.1f} points. The largest op by "
        f"its own time is {tops[0]} in {same} of {len(tops)}."
    )
    idle = ("gpu_idle_share",) if "gpu_idle_share" in first else ()
    columns = ("preset", "num_parameters", "step_ns", "tokens_per_s", *names, *idle, "peak_bytes", "largest_op")
    yield table("sizes", "Presets at one number of tokens", records, *columns)


def _title(name: str) -> str:
    return name.removesuffix("_share")


def _patterns(source: Source) -> dict[str, Any]:
    """What a recording's trace and memory say, to be held against another preset's."""
    from stepscope.analysis.kernels.copy_sources import copy_sources

    rows, where = own_times(source)
    rank = source.analysis.ranks[0]
    whole_ns = max(1, sum(ns for _, _, ns in rows))
    gemm = [row["share"] for row in rank.kernel_classes.to_dicts() if row["class"] == "gemm"]
    products = sum(ns for op, _, ns in rows if op in PRODUCTS) / whole_ns
    step_ns = max(1, int(rank.steps["duration_ns"].sum()))
    copied_ns = int(copy_sources(source.case.linked)["duration_ns"].sum())
    return {
        "products_share": (gemm[0] if gemm else 0.0) if where == "device" else products,
        "copies_share": copied_ns / (rank.gpu_time.busy_ns if where == "device" else step_ns),
        "largest_op": rows[0][0] if rows else None,
        "peak_bytes": source.memory.account.peak_bytes,
    }
