"""Answers of the study `cs336` about memory: peaks, what is alive at them, and what autocast adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stepscope.document.model import Lines, Table, Text, Value
from stepscope.errors import Unavailable
from stepscope.studies.cs336 import note
from stepscope.studies.cs336.time import AUTOCAST, FP32, Record, model_of, plain
from stepscope.studies.figures import listed, said, table
from stepscope.studies.stored import Recorded, Rows, Stored

if TYPE_CHECKING:
    from stepscope.analysis.memory.account import Account

PEAK, RESERVED = "peak_allocated_bytes", "peak_reserved_bytes"
ACTIVATION, TEMPORARY, CAST = "activation", "temporary", "autocast_weight_cast"
"""Owners as recordings have them; the last of a weight's cast copy."""
WORDS = {"inference": "inference", "forward": "a forward", "step": "a step"}
MODES = tuple(WORDS)
STAY = ("parameter", "gradient", "optimizer_state")
MIN_SHARE = 0.01
"""Of the peak, to be named in a sentence."""
NUM_LARGEST = 10
COLUMNS = ("op", "module", "each_bytes", "num_allocations", "shape", "dtype", "owner")
"""Of the largest allocations."""


def size(num_bytes: float | None) -> str:
    return said("bytes", num_bytes)


def recorded(stored: Stored, mode: str, dtype: str) -> Recorded:
    """The recording of the model whose memory is looked at: the largest there is of that kind."""
    found = [each for each in stored.recordings("recordings", mode=mode, dtype=dtype) if each.folder]
    if not found:
        raise Unavailable(f"there is no recording of {mode} in {dtype}")
    return max(found, key=lambda each: each.axes["d_model"])


def account_of(stored: Stored, mode: str, dtype: str) -> Account:
    return recorded(stored, mode, dtype).source.memory.account


def _peak_rows(stored: Stored) -> Rows:
    """Rows of the models that were measured in both precisions."""
    rows = plain(stored).where(mode=MODES)
    return rows.where(preset=tuple(rows.where(dtype=AUTOCAST).values("preset"))).needed()


def peaks(stored: Stored) -> Iterator[Any]:
    """The peaks, allocated and reserved."""
    rows = _peak_rows(stored)
    ok = rows.ok
    largest = max(ok, key=lambda record: record["num_parameters"])["preset"]
    of = ok.where(preset=largest)
    at = max(of.where(dtype=AUTOCAST).values("seq_len"))
    sentences = []
    for mode in MODES:
        pair = [of.where(mode=mode, dtype=dtype, seq_len=at) for dtype in (FP32, AUTOCAST)]
        if not all(map(len, pair)):
            continue
        wide, narrow = (next(iter(found))[PEAK] for found in pair)
        change = f"{size(abs(narrow - wide))} {'more' if narrow > wide else 'less'}"
        sentences.append(
            f"The peak of {WORDS[mode]} of {largest} at {at} tokens is {size(wide)}, under autocast {change}."
        )
    sentences += [*_graph(of), *_reserved(of)]
    yield Text(" ".join(sentences) or "No model has a peak in both precisions.")
    names = ["preset", "seq_len", "mode", "dtype", PEAK]
    names += [RESERVED] if any(record[RESERVED] for record in rows) else []
    yield table("peaks", "Peak memory, fp32 and autocast", rows, *names, num_shown=48)
    yield _residual(stored, of)
    yield from _timelines(stored)


def _graph(rows: Rows) -> Iterator[str]:
    """What a forward that keeps its graph takes more than inference."""
    for kept in rows.where(mode="forward", dtype=FP32):
        for free in rows.where(mode="inference", dtype=FP32, seq_len=kept["seq_len"]):
            yield (
                f"A forward of {model_of(kept)} that keeps its graph, which the note called inference, has a peak of "
                f"{size(kept[PEAK])}; without the graph it is {size(free[PEAK])}."
            )
            return


def _reserved(rows: Rows) -> Iterator[str]:
    """What the allocator held above what was ever allocated."""
    known = [record for record in rows if record[RESERVED]]
    if known:
        worst = max(known, key=lambda record: record[RESERVED] - record[PEAK])
        yield (
            "Reserved segments, which the note read for a peak when its snapshot was written, are up to "
            f"{size(worst[RESERVED] - worst[PEAK])} above it ({worst['mode']} of {model_of(worst)} in "
            f"{worst['dtype']})."
        )


def _residual(stored: Stored, rows: Rows) -> Table:
    """The residual stream by its formula, and in the recorded step the tensors of its shape."""
    step = recorded(stored, "step", FP32)
    axes, shape = step.axes, [step.axes["batch"], step.axes["seq_len"], step.axes["d_model"]]
    alike = [
        each for each in step.source.allocations["allocations"]
        if each.get("shape") == shape and each.get("dtype") == "float32" and each.get("owner") == ACTIVATION
    ]  # fmt: skip
    lengths = sorted({*rows.values("seq_len"), axes["seq_len"]})
    first = next(iter(rows))
    width, batch = first["d_model"], first["batch"]
    columns: dict[str, Sequence[Value]] = {
        "seq_len": lengths,
        "formula": [f"{batch} × {length} × {width} × 4" for length in lengths],
        "residual_bytes": [batch * length * width * 4 for length in lengths],
        "num_kept_in_a_step": [len(alike) if length == axes["seq_len"] else None for length in lengths],
    }
    text = f"of {first['preset']} in fp32; kept: activations of exactly this shape in the recorded step"
    return Table("residual-stream", "One tensor of the residual stream", columns, 12, text)


def timeline_of(mode: str, dtype: str) -> Callable[[Stored], Lines]:
    """The picture of memory over a pass."""

    def chart(stored: Stored) -> Lines:
        from stepscope.analysis.memory.by_owner import known_split, levels_by
        from stepscope.document.sections.memory import timeline

        point = recorded(stored, mode, dtype)
        memory = point.source.allocations
        found = timeline(point.source.memory.account, levels_by(memory, known_split(memory)))
        return replace(
            found, id=f"memory-{mode}-{dtype}", title=f"Memory of {mode} of {model_of(point.axes)}, {dtype}"
        )

    return chart


def _timelines(stored: Stored) -> Iterator[Lines]:
    for mode, dtype in (("inference", FP32), ("step", FP32), ("step", AUTOCAST)):
        yield timeline_of(mode, dtype)(stored)


def alive(stored: Stored) -> Iterator[Any]:
    """What is alive at the peak, and the largest allocations."""
    accounts = {dtype: account_of(stored, "step", dtype) for dtype in (FP32, AUTOCAST)}
    model = model_of(recorded(stored, "step", FP32).axes)
    parts = {dtype: {part.name: part for part in found.live_at_peak.by_owner} for dtype, found in accounts.items()}
    first = accounts[FP32]
    alike = [each for each in first.largest if each.bytes == first.largest[0].bytes]
    counts: Counter[str | None] = Counter()
    for each in alike:
        counts[each.owner] += each.num_at_peak
    alive_now = listed(f"{number} {_words(owner)}" for owner, number in counts.most_common() if number)
    yield Text(
        f"{' '.join(_peaks_said(stored))} The largest single allocations have {size(alike[0].bytes)}: "
        f"{sum(each.num_allocations for each in alike)} of them in a step of {model}, {counts.total()} alive at the "
        f"peak{f' ({alive_now})' if alive_now else ''}. An owner is what a tensor is for, by what made and holds it; "
        "the note's categories hung on line numbers."
    )
    owners = list(dict.fromkeys(name for found in parts.values() for name in found))
    columns: dict[str, Sequence[Value]] = {"owner": [_words(name) for name in owners]}
    for dtype in (FP32, AUTOCAST):
        columns[f"{dtype}_bytes"] = [parts[dtype][name].bytes if name in parts[dtype] else 0 for name in owners]
    yield Table("live-at-peak", f"Alive at the peak of a step of {model}", columns, 12)
    from stepscope.document.sections.memory import largest

    for dtype, found in accounts.items():
        forward = replace(found, largest=tuple(each for each in found.largest if each.phase == "forward"))
        for of, id, what, more in (
            (found, "largest", "a step", ("num_at_peak", "phase")),
            (forward, "largest-forward", "its forward", ("called_at",)),
        ):
            rows = largest(of, NUM_LARGEST)
            columns = {name: rows.columns[name] for name in (*COLUMNS, *more) if name in rows.columns}
            title = f"The {NUM_LARGEST} largest allocations of {what}, {dtype}"
            yield replace(rows, id=f"{id}-{dtype}", title=title, columns=columns)
    title = "The largest single allocation of each module, forward"
    yield _in_both(accounts, "largest-by-module", title, "module")
    title = "The largest single allocation of each op of a module, forward"
    yield _in_both(accounts, "largest-by-op", title, "module", "op")


def _peaks_said(stored: Stored) -> Iterator[str]:
    """Of every recorded step in fp32, where its peak is and what is alive there."""
    for step in stored.recordings("recordings", mode="step", dtype=FP32):
        found = step.source.memory.account
        parts = [part for part in found.live_at_peak.by_owner if part.share >= MIN_SHARE]
        most = ", ".join(f"{_words(part.name)} {said('share', part.share)}" for part in parts)
        text = (
            f"The peak of a step of {model_of(step.axes)} is {size(found.peak_bytes)}, in {found.peak_stage}: {most}"
        )
        made = [each for each in found.largest if each.owner == TEMPORARY and each.num_at_peak]
        if made and any(part.name == TEMPORARY for part in parts):
            text += f", the most of the temporary by {max(made, key=lambda each: each.bytes * each.num_at_peak).op}"
        yield f"{text}."


def _words(name: str | None) -> str:
    return "not known" if name is None else name.replace("_", " ")


def _in_both(accounts: dict[str, Account], id: str, title: str, *names: str) -> Table:
    """The largest single allocation in the forward of what made one in both precisions, by these names."""
    most: dict[tuple[str, ...], dict[str, int]] = {}
    for dtype, found in accounts.items():
        for large in found.largest:
            if large.module and large.phase == "forward":
                of = most.setdefault(tuple(str(getattr(large, name)) for name in names), {})
                of[dtype] = max(of.get(dtype, 0), large.bytes)
    shared = {key: of for key, of in most.items() if len(of) == len(accounts)}
    columns: dict[str, Sequence[Value]] = {name: [key[at] for key in shared] for at, name in enumerate(names)}
    columns |= {
        "fp32_bytes": [of[FP32] for of in shared.values()],
        "autocast_bytes": [of[AUTOCAST] for of in shared.values()],
        "ratio": [of[AUTOCAST] / of[FP32] for of in shared.values()],
    }
    return Table(id, title, columns, 24)


def autocast(stored: Stored) -> Iterator[Any]:
    """Where the extra memory under autocast is."""
    point = recorded(stored, "step", AUTOCAST)
    found = point.source.memory.account
    casts = [each for each in point.source.allocations["allocations"] if each.get("owner") == CAST]
    kept = [each for each in _alive_at_backward(point) if each.get("owner") == CAST]
    if not casts:
        raise Unavailable("the recorded step under autocast has no cast copy of a weight")
    total, largest = sum(each["bytes"] for each in casts), max(each["bytes"] for each in casts)
    alive_bytes = next((part.bytes for part in found.live_at_peak.by_owner if part.name == CAST), 0)
    axes = point.axes
    width, hidden = axes["d_model"], axes["d_ff"]
    is_mlp = largest == 2 * width * hidden
    formula = f" = {width} × {hidden} in bf16, a matrix of the MLP" if is_mlp else ""
    text = (
        f"A step of {model_of(axes)} under autocast makes {len(casts)} bf16 copies of weights, {size(total)} in all; "
        f"{len(kept)} are still alive when the backward begins, {size(alive_bytes)} at the peak. The largest is "
        f"{size(largest)}{formula}"
    )
    if largest == note.EINSUM_CAST_BYTES:
        text += "; it is the one that the note laid to einsum"
    yield Text(f"{text}. {_halved(stored, sum(each['bytes'] for each in kept))} {_without_einsum(stored)}")
    shapes: dict[tuple[Any, ...], list[Record]] = {}
    for each in casts:
        shapes.setdefault((each["bytes"], str(each.get("op"))), []).append(each)
    columns: dict[str, Sequence[Value]] = {
        "each_bytes": [each_bytes for each_bytes, _ in shapes],
        "op": [op for _, op in shapes],
        "num_copies": [len(alike) for alike in shapes.values()],
        "all_bytes": [sum(each["bytes"] for each in alike) for alike in shapes.values()],
    }
    yield Table("weight-casts", "Copies of weights that autocast keeps", columns, 12)


def _alive_at_backward(point: Recorded) -> list[Record]:
    stages = point.source.allocations.get("stages") or []
    begins = next((stage["event"] for stage in stages if stage["name"] == "backward"), None)
    if begins is None:
        raise Unavailable("the recorded step has no backward")
    return [
        each for each in point.source.allocations["allocations"]
        if (each["born"] is None or each["born"] < begins) and (each["died"] is None or each["died"] >= begins)
    ]  # fmt: skip


def _halved(stored: Stored, cast_bytes: int) -> str:
    """What is halved when the backward begins, and what stays at the peak."""
    activations = {}
    for dtype in (FP32, AUTOCAST):
        there = _alive_at_backward(recorded(stored, "step", dtype))
        activations[dtype] = sum(each["bytes"] for each in there if each["owner"] == ACTIVATION)
    text = (
        f"Activations are then {size(activations[AUTOCAST])} in the place of {size(activations[FP32])}, with the "
        f"copies {size(activations[AUTOCAST] + cast_bytes)}."
    )
    accounts = {dtype: account_of(stored, "step", dtype) for dtype in (FP32, AUTOCAST)}
    wide, narrow = ({p.name: p.bytes for p in found.live_at_peak.by_owner} for found in accounts.values())
    same = [name for name in wide if name in STAY and narrow.get(name) == wide[name]]
    if same:
        kept = ", ".join(f"{_words(name)} {size(wide[name])}" for name in same)
        text += f" The peak of a step is in {accounts[AUTOCAST].peak_stage}; what stays as it is there: {kept}."
    return text


def _without_einsum(stored: Stored) -> str:
    """The peak with functional.linear in the place of einsum."""
    rows = stored.rows("models").ok.where(mode="forward")
    for other in rows.where(linear="linear", dtype=AUTOCAST):
        same = rows.where(linear="einsum", preset=other["preset"], seq_len=other["seq_len"])
        for written in same.where(dtype=AUTOCAST):
            change = other[PEAK] - written[PEAK]
            how = "the same" if abs(change) < 0.01 * written[PEAK] else f"{change / written[PEAK]:+.1%}"
            wide = [f", {size(record[PEAK])} in fp32" for record in same.where(dtype=FP32)]
            return (
                f"The peak of a forward of {model_of(other)} that keeps its graph is {size(written[PEAK])} under "
                f"autocast{''.join(wide)}; with functional.linear in the place of einsum {size(other[PEAK])}: {how}."
            )
    return "Nothing was measured without einsum."
