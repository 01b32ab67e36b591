"""Answers of the study `tsmoe` to the note's two open questions: the slow dispatch, and grouped products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import safe
from stepscope.studies.figures import against, said, table
from stepscope.studies.stored import Stored
from stepscope.studies.tsmoe.amp import pair_of, parts_of
from stepscope.studies.tsmoe.variants import LAUNCHES, LOOP, TIME, same_model, size_said

if TYPE_CHECKING:
    from stepscope.session.source import Source

CAPACITY, INDEXED, GROUPED = "capacity", "indexed", "grouped"


def _op_times(source: Source) -> tuple[dict[str, tuple[float, float]], str]:
    """By op: its own time in a step and its calls; and whose time that is."""
    account = source.analysis.ranks[0]
    num_steps = max(1, account.steps.height)
    on_gpu = bool(account.gpu_time.busy_ns)
    column = "device_self_ns" if on_gpu else "host_self_ns"
    rows = account.ops.select("op", column, "num_calls").iter_rows()
    times = {str(op): (ns / num_steps, calls / num_steps) for op, ns, calls in rows if op is not None}
    return times, "GPU time" if on_gpu else "host time"


def half(stored: Stored) -> Iterator[Any]:
    """`indexed` against `capacity`: the same products, another way to the rows and back."""
    rows = stored.rows("dispatch")
    slow, fast = (rows.one(dispatch=name, compile="off") for name in (INDEXED, CAPACITY))
    slots = slow["batch"] * slow["seq_len"] * slow["top_k"]
    unfilled = round(slots * slow["fact_padded_share"])
    yield Text(
        f"Measured on {size_said(slow)}. {INDEXED} takes {said(TIME, slow[TIME])} a step and is "
        f"{against(slow, fast, CAPACITY)}, with the same products over the same rows and losses of "
        f"{slow['loss']:.5f} and {fast['loss']:.5f}. In a layer {unfilled:,} of {slots + unfilled:,} rows are "
        "nobody's and read token 0: the backward of x[index] adds their gradients to that one row in turn, "
        f"{CAPACITY} never adds them."
    )
    sources = [stored.traced("dispatch", record) for record in (slow, fast)]
    (slow_ops, of), (fast_ops, _) = (_op_times(source) for source in sources)
    none = (0.0, 0.0)
    deltas = {op: slow_ops.get(op, none)[0] - fast_ops.get(op, none)[0] for op in {*slow_ops, *fast_ops}}
    most, more = max(deltas, key=lambda op: deltas[op]), sum(ns for ns in deltas.values() if ns > 0)
    yield Text(
        f"Of what single ops take longer in a traced step ({of}), {said('_ns', more)}, {safe(most, 60)} is "
        f"{said('_ns', deltas[most])}, {said('share', deltas[most] / more if more else 0.0)}. "
        f"{_by_index(slow_ops, fast_ops)}"
    )
    largest = sorted(deltas, key=lambda op: -abs(deltas[op]))[:10]
    differing = [
        {"op": safe(op, 80), f"{INDEXED}_ns": slow_ops.get(op, none)[0], f"{CAPACITY}_ns": fast_ops.get(op, none)[0],
         "difference_ns": deltas[op], f"num_{INDEXED}_calls": slow_ops.get(op, none)[1],
         f"num_{CAPACITY}_calls": fast_ops.get(op, none)[1]}
        for op in largest
    ]  # fmt: skip
    yield table("indexing", f"Ops by how much they differ ({of}, a traced step)", differing, *differing[0])
    findings = [found for found in sources[0].diagnosis.findings if found.id == "serialized_scatter"]
    if not findings:
        raise Unavailable(
            "stepscope diagnose finds no serialized_scatter in the trace: on a CPU it looks for none, and on a GPU "
            "the scatter is then as fast as it should be"
        )
    yield Text(f"stepscope diagnose says of it: {safe(findings[0].sentence, 400)}")


def _by_index(slow: Mapping[str, tuple[float, float]], fast: Mapping[str, tuple[float, float]]) -> str:
    """What the ops take that the backward of x[index] calls."""
    ours, theirs = (sum(ns for op, (ns, _) in ops.items() if "index_put" in op) for ops in (slow, fast))
    return (
        f"What the backward of x[index] calls, index_put, takes {said('_ns', ours)} instead of {said('_ns', theirs)}."
    )


def grouped(stored: Stored) -> Iterator[Any]:
    """One product for all experts against one for each."""
    same, _ = same_model(stored)
    sentences = []
    for mode in dict.fromkeys(record["compile"] for record in same):
        found = {record["dispatch"]: record for record in same if record["compile"] == mode}
        if GROUPED not in found:
            continue
        one = found[GROUPED]
        others = [found[name] for name in (LOOP, CAPACITY) if name in found]
        if not others:
            continue
        told = " and ".join(against(one, other, str(other["dispatch"])) for other in others)
        text = f"{'Eager' if mode == 'off' else f'Compiled ({mode})'}, {GROUPED} is {told}"
        if one[LAUNCHES] is not None:
            launches = " and ".join(f"{other[LAUNCHES]:,} of {other['dispatch']}" for other in others)
            text += f", with {one[LAUNCHES]:,} launches instead of {launches}"
        sentences.append(f"{text}.")
    if not sentences:
        raise Unavailable(f"{GROUPED} and what it is held against were not measured")
    yield Text(f"Measured on {size_said(same[0])}. {' '.join(sentences)}")
    eager = {record["dispatch"]: record for record in same if record["compile"] == "off"}
    base, new = (stored.traced("dispatch", eager[name]).path for name in (LOOP, GROUPED))
    difference = parts_of(pair_of(base, new))
    rows = [
        {"what": safe(row.name, 80), f"{LOOP}_ns": row.base, f"{GROUPED}_ns": row.new, "difference_ns": row.delta}
        for row in difference.rows[:10]
    ]
    saved = [row for row in difference.rows if row.delta < 0][:2]
    added = [row for row in difference.rows if row.delta > 0][:2]
    text = f"Traced ({difference.of}, by {difference.by.replace('_', ' ')}), it saves {_told(saved)}"
    yield Text(f"{text}, and adds {_told(added)}.")
    yield table("grouped", f"{LOOP} and {GROUPED}, {difference.of}", rows, *rows[0])


def _told(rows: Sequence[Any]) -> str:
    return ", ".join(f"{said('_ns', abs(row.delta))} of {safe(row.name, 60)}" for row in rows) or "nothing"
