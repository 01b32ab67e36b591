"""Answers of the study `hydra` that hold points against each other: losses, routing, sizes, data, first calls."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.analysis.sweeps import OK
from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Bars, Series, Table, Text
from stepscope.studies.figures import against, beside, said, table
from stepscope.studies.hydra_step import NOTE, NOTED_PRESET, PARTS, is_noted, main_point, own_times, step_record
from stepscope.studies.stored import Recorded, Rows, Stored

if TYPE_CHECKING:
    from stepscope.report.source import Source

TIME, PEAK = "time_median_ns", "peak_allocated_bytes"
NOTED_TOKENS = {"one batch": 76_000.0, "text": 31_000.0}
NOTED_SHIFT = {"value shift": 20_000.0}
NOTED_CONTIGUOUS = {"contiguous first": 1.056}
NOTED_FIRST = {"blocks.0": 40.0}
NOTED_ROUTING = {"dynamic": 0.79}
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


def micro(stored: Stored) -> Iterator[Any]:
    """A copy in the open, in secret, or none; the shift of values in five ways."""
    convs, shifts = (stored.rows(name).needed() for name in ("contiguity", "value_shift"))
    mode = convs.values("mode")[-1]
    sliced = convs.one(implementation="sliced", mode=mode)
    sentences = [f"The convolutions of the queries take {said(TIME, sliced[TIME])} on a transposed slice ({mode})."]
    for name in ("contiguous", "padded"):
        record = convs.one(implementation=name, mode=mode)
        sentences.append(f"A {name} copy first is {against(record, sliced, 'that')}.")
    forward = shifts.ok.where(mode=shifts.values("mode")[0])
    best, *_, worst = sorted(forward.needed(), key=lambda record: float(record[TIME]))
    times = " and ".join(f"{said(TIME, each[TIME])} as {each['implementation']}" for each in (best, worst))
    sentences.append(f"The value shift takes {times} ({best['mode']}).")
    yield Text(" ".join(sentences))
    names = ("implementation", "mode", TIME, "time_p10_ns", "time_p90_ns", "speedup", PEAK)
    yield table("contiguity", "Convolutions on a slice", convs, *names)
    yield table("value_shift", "The value shift, five ways", shifts, *names)
    recorded, used = main_point(stored), _used(forward)
    if used is not None and all(recorded.axes[name] == used[name] for name in ("batch", "seq_len")):
        share = used[TIME] * recorded.axes["blocks"] / step_record(recorded)["step_ns"]
        yield Text(
            f"The model shifts as {used['implementation']}, once in each of {recorded.axes['blocks']} blocks: "
            f"{said('share', share)} of its step, forward alone."
        )
    if is_noted(recorded):
        contiguous = convs.one(implementation="contiguous", mode=mode)[TIME] / sliced[TIME]
        ours = [{"what": "contiguous first", "times_sliced": contiguous}]
        yield beside(ours, NOTED_CONTIGUOUS, "what", "times_sliced", NOTE)
        yield beside([{"what": "value shift", "call_ns": best[TIME]}], NOTED_SHIFT, "what", "call_ns", NOTE)


def _used(rows: Rows) -> dict[str, Any] | None:
    """The implementation that is the model's own (`workloads/models/ccgqa.py`): pad and crop."""
    return next(iter(rows.where(implementation="pad")), None)


def routing(stored: Stored) -> Iterator[Any]:
    """Static against dynamic depth, of one model at one size, with what was really executed."""
    rows = stored.rows("routing").needed()
    sentences: list[str] = []
    times_static: dict[str, float] = {}
    for preset in rows.values("preset"):
        of = rows.where(preset=preset, compile="off")
        static = of.one(routing="static", capacity=1.0)
        for record in of.ok:
            if record is static:
                continue
            if record["num_parameters"] != static["num_parameters"]:
                raise CannotCheck(f"{preset}: {record['routing']} has another number of parameters than static")
            how = f"{record['routing']} ({record['dispatch']}, capacity {record['capacity']:g})"
            sentences.append(
                f"{preset}, {static['num_parameters']:,} parameters in both: {how} executes "
                f"{said('share', record['fact_executed_fraction'])} of the MLP's rows, and its step of "
                f"{said(TIME, record[TIME])} is {against(record, static, 'static')}."
            )
        dynamic = of.ok.where(routing="dynamic", dispatch="gather", capacity=1.0)
        times_static |= {preset: next(iter(dynamic))[TIME] / static[TIME]} if len(dynamic) else {}
    for record in rows.ok.where(compile=[name for name in rows.values("compile") if name != "off"]):
        eager = rows.where(preset=record["preset"], compile="off").one(routing=record["routing"], capacity=1.0)
        speed = against(record, eager, "eager")
        sentences.append(f"Compiled with CUDA graphs ({record['compile']}), {record['routing']} is {speed}.")
    yield Text(" ".join(sentences) or "Only one routing has a time.")
    records = [record | {"executed_share": record.get("fact_executed_fraction")} for record in rows]
    names = ("preset", "routing", "dispatch", "capacity", "compile", "executed_share", TIME, "tokens_per_s", PEAK)
    yield table("routing", "Routing at equal topology", records, *names, "num_parameters")
    if NOTED_PRESET in times_static:
        ours = [{"routing": "dynamic", "times_static": times_static[NOTED_PRESET]}]
        where = f"{NOTE}; there two sizes were compared, with routing switched off"
        yield beside(ours, NOTED_ROUTING, "routing", "times_static", where)


def data(stored: Stored) -> Iterator[Any]:
    """One batch that is there already against a text that a DataLoader reads."""
    recorded = main_point(stored)
    arms = {"one batch": recorded}
    for measure, name in (("text", "text"), ("workers", "text, 2 workers")):
        try:
            found = [each for each in stored.recordings(measure) if dict(each.axes) == dict(recorded.axes)]
        except CannotCheck:
            continue  # --quick leaves it out
        arms |= {name: found[0]} if found and found[0].status == OK else {}
    if len(arms) < 2:
        raise CannotCheck("no point was trained on the text")
    records = []
    for name, arm in arms.items():
        waits = next(phase.host_ns for phase in arm.source.card.summary.phases if phase.name == "data")
        record = step_record(arm)
        records.append(record | {"data": name, "data_wait_ns": waits, "wait_share": waits / record["step_ns"]})
    base = records[0]
    sentences = [f"On one batch that is there already: {base['tokens_per_s']:,.0f} tokens/s."]
    for record in records[1:]:
        sentences.append(
            f"On {record['data']}: {record['tokens_per_s']:,.0f} tokens/s, {against(record, base, 'that')}; a step "
            f"waits {said('time_ns', record['data_wait_ns'])} for data ({said('share', record['wait_share'])} of it)."
        )
    yield Text(" ".join(sentences))
    names = ("data", "step_ns", "tokens_per_s", "data_wait_ns", "wait_share")
    yield table("data", "Synthetic and real data", records, *names, note="the wait is on the host's clock")
    if is_noted(recorded):
        where = f"{NOTE}; withdrawn by its author"
        yield beside(records, NOTED_TOKENS, "data", "tokens_per_s", where)


def first_call(stored: Stored) -> Iterator[Any]:
    """What each layer takes in the first pass of a process, and once it is warm."""
    row = next((row for row in stored.sweep("first_call").rows if row["status"] == OK and row.get("layers")), None)
    if row is None:
        raise CannotCheck("no first call was timed layer by layer")
    first, warm = row["layers"]["first_call_ns"], row["layers"]["warm_ns"]
    blocks = [name for name in first if name.startswith("blocks.")]
    if len(blocks) < 2:
        raise CannotCheck("the model has not two layers to compare")
    others, others_warm = ([times[name] for name in blocks[1:]] for times in (first, warm))
    head = blocks[0]
    cold, settled = (times[head] / statistics.median(rest) for times, rest in ((first, others), (warm, others_warm)))
    yield Text(
        f"In the first call of a process {head} takes {said('time_ns', first[head])}, {cold:.1f} times the median of "
        f"the other layers; once warm it takes {said('time_ns', warm[head])}, {settled:.2f} times theirs. The first "
        f"step as a whole takes {said('time_ns', row['first_call_ns'])}, a later one "
        f"{said('time_ns', statistics.median(row['samples_device_ns']))}."
    )
    columns: dict[str, Any] = {
        "layer": list(first),
        "first_call_ns": list(first.values()),
        "warm_ns": [warm[name] for name in first],
        "ratio": [first[name] / warm[name] for name in first],
    }
    more = [max(0, ns - columns["warm_ns"][place]) for place, ns in enumerate(columns["first_call_ns"])]
    yield Bars(
        id="first_call", title="First call and later ones, by layer", labels=columns["layer"], unit="first_call_ns",
        series=(Series("once warm", columns["warm_ns"]), Series("more in the first call", more)),
    )  # fmt: skip
    note = (
        "the forward of each layer, the device done with it before the next begins; warm: the median of later passes"
    )
    yield Table("first_call", "First call and later ones, by layer", columns, 40, note)
    if row["preset"] == NOTED_PRESET:
        yield beside([{"layer": head, "beside_others": cold}], NOTED_FIRST, "layer", "beside_others", NOTE)


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
        f"From {first['preset']} to {last['preset']} ({larger:.1f} times the parameters) a step takes {longer:.1f} "
        f"times as long. Shares go: {moves}. What "
        f"moves most is {_title(furthest)}, by {100 * abs(last[furthest] - first[furthest]):.1f} points. The largest "
        f"op by its own time is {tops[0]} in {same} of {len(tops)}."
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
