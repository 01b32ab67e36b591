"""Answers of the study `hydra` that hold variants and sizes against each other: losses, routing, presets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.analysis.sweeps import OK
from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Bars, Series, Text
from stepscope.studies import hydra_note as note
from stepscope.studies.figures import Record, against, beside, known, listed, paced, said, table
from stepscope.studies.hydra_ops import own_times
from stepscope.studies.hydra_step import PARTS, step_record
from stepscope.studies.stored import Recorded, Stored

if TYPE_CHECKING:
    from stepscope.report.source import Source

TIME, PEAK = "time_median_ns", "peak_allocated_bytes"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")


def losses(stored: Stored) -> Iterator[Any]:
    """Three ways to the same loss."""
    rows = stored.rows("losses").needed()
    full = rows.one(knob_loss="full")
    values = [record["loss"] for record in rows.ok]
    sentences = [
        f"With all logits a step takes {said(TIME, full[TIME])} and {said(PEAK, full[PEAK])} at its peak.",
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
    sentences: list[str] = []
    times_static: dict[str, float] = {}
    for preset in rows.values("preset"):
        of = rows.where(preset=preset, compile="off")
        static = of.one(routing="static", capacity=1.0)
        variants = [record for record in of.ok if record is not static]
        if any(record["num_parameters"] != static["num_parameters"] for record in variants):
            raise CannotCheck(f"{preset}: a variant has another number of parameters than static")
        sentences.append(f"{preset}, {static['num_parameters']:,} parameters: static takes {_told(static)}.")
        sentences += [_variant_sentence(record, static) for record in variants]
        dynamic = of.ok.where(routing="dynamic", dispatch="gather", capacity=1.0)
        times_static |= {preset: next(iter(dynamic))[TIME] / static[TIME]} if len(dynamic) else {}
    for record in rows.ok.where(compile=[name for name in rows.values("compile") if name != "off"]):
        eager = rows.where(preset=record["preset"], compile="off").one(routing=record["routing"], capacity=1.0)
        sentences.append(
            f"Compiled with CUDA graphs ({record['compile']}), {record['routing']} takes {_told(record)}, "
            f"{against(record, eager, 'eager')}."
        )
    yield Text(" ".join(sentences))
    records = [record | {"executed_share": record.get("fact_executed_fraction")} for record in rows]
    names = ("preset", "routing", "dispatch", "capacity", "compile", "executed_share", TIME, "tokens_per_s",
             "num_kernels", "gpu_busy_share", PEAK, "peak_reserved_bytes", "num_parameters")  # fmt: skip
    remarks = "; ".join(f"{record['compile']}: {record['notes']}" for record in rows if record.get("notes"))
    yield table("routing", "Routing at equal topology", records, *known(records, *names), note=remarks)
    if note.PRESET in times_static:
        ours = [{"routing": "dynamic", "times_static": times_static[note.PRESET]}]
        where = f"{note.NOTE}; there two sizes were compared, with routing switched off"
        yield beside(ours, note.ROUTING, "routing", "times_static", where)
        told = listed(f"{times:.2f} times static's at {preset}" for preset, times in times_static.items())
        yield Text(
            f"The note's {note.ROUTING['dynamic']:.2f} is one model's step beside another's of another size. Of one "
            f"model, a dynamic step is {told}."
        )


def _told(record: Record) -> str:
    """A step's time with what it is made of."""
    return f"{said(TIME, record[TIME])}{paced(record)}"


def _variant_sentence(record: Record, static: Record) -> str:
    how = record["dispatch"] if record["capacity"] == 1 else f"capacity {record['capacity']:g}"
    text = (
        f"{record['routing']} ({how}) executes {said('share', record['fact_executed_fraction'])} of the MLP's rows "
        f"and takes {_told(record)}, {against(record, static, 'static')}"
    )
    if record.get("num_kernels") is None:
        return f"{text}."
    text += f", with {record['num_kernels']:,} kernels instead of {static['num_kernels']:,}"
    if (record["routing"], record["dispatch"]) == ("dynamic", "gather"):
        text += f"; each of {record['blocks']} blocks waits for the GPU to learn how many tokens go on"
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
        raise CannotCheck("no two presets were recorded at one batch, length and dtype")
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
    yield Bars(
        id="sizes", title="Shares by preset", labels=[record["preset"] for record in records], unit="share",
        series=tuple(Series(part, [r[f"{part}_share"] for r in records], colour=part) for part in PARTS),
    )  # fmt: skip


def _title(name: str) -> str:
    return name.removesuffix("_share")


def _patterns(source: Source) -> dict[str, Any]:
    """What a recording's trace and memory say, to be held against another preset's."""
    from stepscope.analysis.copy_sources import copy_sources

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
