"""Answers of the study `tsmoe` about variants of one model: masks, and ways to dispatch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.document.model import Bars, Series, Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural, safe
from stepscope.studies.figures import Record, against, known, listed, meet, said, table
from stepscope.studies.stored import Stored
from stepscope.studies.tsmoe import note

if TYPE_CHECKING:
    from stepscope.session.attention_view import AttentionRow

TIME, PEAK, LAUNCHES = "time_median_ns", "peak_allocated_bytes", "num_kernel_launches"
LOOP = "loop"
SAME_SHARE = 0.01
"""Models whose losses on the same weights and batch differ by more are not the same."""


def size_said(record: Record) -> str:
    """What a row is of, in a sentence.

    >>> size_said({"preset": "538m", "layers": 4, "batch": 16, "seq_len": 4096, "routing": "balanced"})
    '538m with 4 layers, 16 × 4096, routing=balanced (even by construction)'
    """
    number = record.get("num_parameters")
    parameters = "" if number is None else f", {number:,} parameters"
    size = f"{record['preset']} with {plural(record['layers'], 'layer')}{parameters}"
    even = " (even by construction)" if record["routing"] == "balanced" else ""
    return f"{size}, {record['batch']} × {record['seq_len']}, routing={record['routing']}{even}"


def mask(stored: Stored) -> Iterator[Any]:
    """What a step takes with a mask; what an inverted one does; which back end ran, and for how long."""
    rows = stored.rows("masks").needed()
    plain, given = rows.one(mask="causal"), rows.one(mask="given")
    theirs = note.MASKED.step_ms / note.FLASH.step_ms
    yield Text(
        f"Measured on {size_said(plain)}. With a mask that says the same as is_causal a step takes "
        f"{said(TIME, given[TIME])} instead of {said(TIME, plain[TIME])}, {given[TIME] / plain[TIME]:.2f} times, "
        f"and peaks at {said(PEAK, given[PEAK])} instead of {said(PEAK, plain[PEAK])}. On the note's "
        f"{note.MASKED.device}, with {note.LAYERS} layers, it is {theirs:.2f} times ({note.MASKED.step_ms:.0f} and "
        f"{note.FLASH.step_ms:.0f} ms)."
    )
    yield from _inverted(stored)
    yield from _back_ends(stored, plain, given)


def _back_ends(stored: Stored, plain: Record, given: Record) -> Iterator[Any]:
    from stepscope.analysis.attention.reasons import BACK_ENDS
    from stepscope.session.attention_view import attention_report

    sides: list[list[dict[str, Any]]] = []
    for record in (plain, given):
        side = []
        for row in attention_report(stored.traced("masks", record).case).rows:
            times = {"attention_ns": float(row.call["total_ns"]), "step_ns": record[TIME]}
            side.append({**row.call, "mask": record["mask"], **times, "why_not_flash": _why_not_flash(row, record)})
        if not side:
            raise Unavailable(f"the trace with mask={record['mask']} shows no attention")
        sides.append(side)
    ends = [listed(sorted({BACK_ENDS.get(call["backend"], str(call["backend"])) for call in side})) for side in sides]
    without, with_mask = (sum(record["attention_ns"] for record in side) for side in sides)
    yield Text(
        f"With is_causal attention runs on {ends[0]} and takes {said('_ns', without)} of a traced step; with the "
        f"mask it runs on {ends[1]} and takes {said('_ns', with_mask)}, {with_mask / without:.2f} times that. "
        f"The note's ran on {note.FLASH_BACK_END} without and on {note.MASKED_BACK_END} with it, on "
        f"{note.MASKED.device}."
    )
    names = ("mask", "backend", "dtype", "num_calls", "forward_ns", "backward_ns", "beside_ns", "attention_ns",
             "step_ns", "why_not_flash")  # fmt: skip
    yield table("attention", "Attention in a traced step", [*sides[0], *sides[1]], *names)


def _why_not_flash(row: AttentionRow, record: Record) -> str:
    """In words. What nothing in the trace speaks against, and no setting of the row, is torch's own choice."""
    from stepscope.analysis.attention.reasons import in_words

    if row.call["backend"] == "flash":
        return "it is"
    told = []
    for reason in row.reasons:
        code = "preferred" if reason.code == "not_seen" and record["sdpa"] == "free" else reason.code
        if reason.backend == "flash":
            told.append(reason.said or (in_words(code, row.call) if code else ""))
    return safe("; ".join(told), 200) or "not said"


def _inverted(stored: Stored) -> Iterator[Any]:
    rows = stored.rows("masks").needed()
    gates = {row["hash"]: row.get("gate") or {} for row in stored.sweep("masks").rows}
    records = []
    for record in rows:
        deviations = gates[record["hash"]].get("deviations") or {}
        deviation = {f"{name}_deviation": deviations.get(name) for name in ("outputs", "loss", "gradients")}
        records.append({**record, **deviation, "what": safe(str(record["reason"] or "the same model"), 200)})
    wrong = [record for record in records if record["mask"] == "inverted"]
    if wrong and wrong[0]["status"] == "wrong":
        off = wrong[0]["outputs_deviation"]
        right = [record["outputs_deviation"] for record in records if record["mask"] == "given"]
        held = f", where the mask as it should be is off by {right[0]:.1e}" if right and right[0] is not None else ""
        figure = "no numbers" if off is None else f"off by {off:.2f} of their norm"
        yield Text(
            "SDPA shows a query the keys where a bool mask is True. With the mask the other way round, as the note "
            f"has it, the outputs are {figure}{held}{_gate_size(gates[wrong[0]['hash']])}: that row is not timed."
        )
    elif wrong:
        yield Text(f"The inverted mask is {wrong[0]['status']}: {safe(str(wrong[0]['reason']), 200)}.")
    names = ("mask", "status", "outputs_deviation", "loss_deviation", "gradients_deviation", TIME, "loss", "what")
    yield table("masks", "Masks held against is_causal", records, *known(records, *names))


def _gate_size(gate: Mapping[str, Any]) -> str:
    """The small size at which a variant is held against the reference, in brackets."""
    sizes = gate.get("sizes")
    if not sizes:
        return ""
    size = f"{plural(sizes['layers'], 'layer')}, {sizes['batch']} × {sizes['seq_len']}"
    return f" (at the size of the check: d_model {sizes['d_model']}, {size})"


def _loss(record: Record) -> float:
    value = record.get("loss")
    if value is None:
        raise Unavailable(f"dispatch={record['dispatch']} has no loss")
    return float(value)


def same_model(stored: Stored) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of one model, and those whose loss says that they are of another; each with how far it is off."""
    rows = stored.rows("dispatch").ok.needed()
    reference = rows.one(dispatch=LOOP, compile="off")
    same: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []
    for record in rows:
        off = abs(_loss(record) / _loss(reference) - 1)
        (same if off <= SAME_SHARE else other).append({**record, "loss_off_share": off})
    return same, other


def dispatch(stored: Stored) -> Iterator[Any]:
    """The losses first, then the times."""
    same, other = same_model(stored)
    losses, off = [_loss(record) for record in same], max(record["loss_off_share"] for record in same)
    spread = " to ".join(dict.fromkeys(f"{loss:.5f}" for loss in (min(losses), max(losses))))
    furthest = f", at most {off:.0e} of it from the loop's" if off else ""
    text = f"{plural(len(same), 'variant')} of one model ({size_said(same[0])}): on the same weights "
    text += f"and batch their losses are {spread}{furthest}. "
    if other:
        text += f"Not ranked, since their losses are others: {', '.join(name_of(record) for record in other)}. "
    plain = next(record for record in same if name_of(record) == LOOP)
    for what, group in (
        ("Eager", [record for record in same if record["compile"] == "off"]),
        ("Compiled", [record for record in same if record["compile"] != "off"]),
    ):
        if group:
            best, worst = min(group, key=lambda r: r[TIME]), max(group, key=lambda r: r[TIME])
            speed = "" if best is plain else f", {against(best, plain, 'the eager loop')}"
            reached = "" if best["mfu_share"] is None else f" (MFU {said('share', best['mfu_share'])})"
            text += f"{what}, {name_of(best)} is the fastest at {said(TIME, best[TIME])}{reached}{speed}"
            text += f"{_tied(best, group, plain)}; the slowest is {name_of(worst)} at {said(TIME, worst[TIME])}. "
    yield Text(f"{text}{_what_counts(same)}")
    yield Text(
        f"The note holds {note.CAPACITY_MS:.0f} ms against {note.SORTED_MS:.0f} ms of two models whose losses "
        f"are {note.LOSS_CAPACITY:.1f} and {note.LOSS_SORTED:.2f}, {note.LOSS_CAPACITY / note.LOSS_SORTED:.0f} times "
        "apart, which is no comparison."
    )
    ranked = sorted(same, key=lambda record: record[TIME])
    yield Bars(
        id="dispatch-times",
        title="A step by dispatch",
        labels=[name_of(record) for record in ranked],
        series=(Series("a step", [record[TIME] for record in ranked]),),
        unit=TIME,
        caption=f"The median step of {plural(len(ranked), 'variant')} with one loss.",
    )
    gates = {row["hash"]: (row.get("gate") or {}).get("deviations") or {} for row in stored.sweep("dispatch").rows}
    apart = {record["hash"]: record["loss_off_share"] for record in (*same, *other)}
    every = [
        {**record, "loss_off_share": apart.get(record["hash"]),
         "gradients_deviation": gates[record["hash"]].get("gradients"),
         **{name: record.get(f"fact_{name}") for name in ("padded_share", "dropped_share")}}
        for record in stored.rows("dispatch")
    ]  # fmt: skip
    names = ("dispatch", "compile", "optimizer", "status", TIME, "tokens_per_s", "mfu_share", "speedup", "loss",
             "gradients_deviation", PEAK, "peak_reserved_bytes", LAUNCHES, "padded_share", "dropped_share",
             "loss_off_share")  # fmt: skip
    remarks = "; ".join(f"{name_of(record)}: {record['notes']}" for record in every if record.get("notes"))
    yield table("dispatch", "Ways to dispatch", every, *known(every, *names), note=remarks)


def _tied(best: Record, group: Sequence[Record], plain: Record) -> str:
    """Those that the fastest cannot be told from, and which of them have another optimizer than the loop."""
    tied = [record for record in group if record is not best and meet(best, record)]
    if not tied:
        return ""
    text = f", not to be told from {listed(f'{name_of(r)} at {said(TIME, r[TIME])}' for r in tied)} "
    text += "(the 95 % intervals of the medians meet"
    for record in (best, *tied):
        if record["optimizer"] != plain["optimizer"]:
            text += f"; {name_of(record)} has optimizer={record['optimizer']}, the loop {plain['optimizer']}"
    return f"{text})"


def _what_counts(same: Sequence[Record]) -> str:
    """How far eager ways are apart, the slowest aside, and what the compiler makes of one and the same."""
    *near, slowest = sorted((r for r in same if r["compile"] == "off"), key=lambda r: float(r[TIME]))
    if len(near) < 2:
        return ""
    text = f"Without {name_of(slowest)} the eager ones differ by {said('share', near[-1][TIME] / near[0][TIME] - 1)} "
    text += "at most"
    eager = {(record["dispatch"], record["optimizer"]): record[TIME] for record in (*near, slowest)}
    gains = [
        eager[key] / record[TIME]
        for record in same
        if record["compile"] != "off" and (key := (record["dispatch"], record["optimizer"])) in eager
    ]
    if not gains:
        return f"{text}."
    times = " to ".join(dict.fromkeys(f"{gain:.2f}" for gain in (min(gains), max(gains))))
    return f"{text}; the compiler makes one and the same way {times} times as fast."


def name_of(record: Record) -> str:
    compiled = "" if record["compile"] == "off" else f" compiled ({record['compile']})"
    return f"{record['dispatch']}{compiled}"
