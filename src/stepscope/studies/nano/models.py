"""The answers of the study `nano` about whole models, and about what its note compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.figures import (
    Record,
    host_paced,
    known,
    lines,
    listed,
    loss_said,
    said,
    span,
    table,
    told_apart,
)
from stepscope.studies.nano.answers import (
    BUSY,
    DENSE,
    FLEX,
    MASK,
    PEAK,
    TIME,
    beside_dense,
    in_mode,
    named,
    passes,
    pattern_of,
    speed,
)
from stepscope.studies.stored import Rows, Stored

ALONE_MODES = {"inference": "inference", "step": "forward+backward"}
"""Mode of a model → the mode of attention alone that is a part of it."""


def models(stored: Stored) -> Iterator[Any]:
    """What inference and training of the presets take."""
    rows = stored.rows("models").needed()
    presets = {preset: pairs for preset in rows.values("preset") if (pairs := _pairs(rows, preset))}
    shared = set.intersection(*map(set, presets.values())) if presets else set()
    sentences = []
    for preset, pairs in presets.items():
        for length in dict.fromkeys((max(shared or pairs), max(pairs))):
            step, run = pairs[length]
            sentences.append(
                f"{preset} ({step['num_parameters']:,} parameters) at {length} tokens: inference "
                f"{said(TIME, run[TIME])}, a training step {said(TIME, step[TIME])} "
                f"({step[TIME] / run[TIME]:.1f} times that), peak {said(PEAK, step[PEAK])}, loss {loss_said(step)}."
            )
    sentences = sentences or ["No preset has both an inference and a training time."]
    yield Text(" ".join([*sentences, *host_paced(rows.ok)]))
    yield Text(" ".join(_sizes(rows)))
    names = ("preset", "attention", "seq_len", "batch", "mode", TIME, BUSY, "tokens_per_s", PEAK, "num_parameters")
    yield table("models", "Whole models", rows, *known(rows, *names, "loss"))
    for mode in passes(rows):
        yield lines(
            f"models-{mode}", f"Models, {mode}", rows.where(mode=mode), "seq_len", TIME, ("preset", "attention")
        )


def _pairs(rows: Rows, preset: str) -> dict[int, tuple[Record, Record]]:
    """By length: a training step of a preset with dense attention, and its inference."""
    of = rows.ok.where(preset=preset, attention=DENSE)
    return {
        step["seq_len"]: (step, run)
        for step in of.where(mode="step")
        for run in of.where(mode="inference", seq_len=step["seq_len"])
    }


def _sizes(rows: Rows) -> Iterator[str]:
    """What the presets are, once."""
    for preset in rows.values("preset"):
        of = rows.where(preset=preset)
        record = next(iter(of))
        sparse = [pattern_of(each) for each in of.where(attention=(FLEX, MASK))]
        pattern = f"; sparse: {sparse[0]}" if sparse else ""
        yield (
            f"{preset}: {plural(record['layers'], 'layer')}, {plural(record['heads'], 'head')} of width "
            f"{record['head_width']}, {plural(record['batch'], 'sequence')}, in {record['dtype']}{pattern}."
        )


def faster_models(stored: Stored) -> Iterator[Any]:
    """Whether what is faster alone is faster in a model."""
    rows = stored.rows("models").needed()
    pairs = [pair for name in (FLEX, MASK) for pair in beside_dense(rows, name)]
    if not pairs:
        raise Unavailable("no model was measured with dense and with sparse attention")
    groups: dict[tuple[Any, ...], list[tuple[Record, Record]]] = {}
    for record, dense in pairs:
        groups.setdefault((record["preset"], record["seq_len"], record["attention"]), []).append((record, dense))
    on_gpu = bool(known(rows, BUSY))
    sentences = [
        f"In {preset} at {length} tokens {name} is {speed(of)}{_not_known(of) if on_gpu else ''}."
        for (preset, length, name), of in groups.items()
    ]
    yield Text(" ".join([*sentences, *host_paced(record for pair in pairs for record in pair)]))
    told = [text for of in groups.values() if (text := _beside_alone(stored, of))]
    if told:
        yield Text(f"By what attention takes alone, in the model's layers and batch: {'; '.join(told)}.")
    records = [{**record, "dense_ns": dense[TIME], "speedup": dense[TIME] / record[TIME]} for record, dense in pairs]
    names = ("preset", "seq_len", "batch", "mode", "attention", TIME, "dense_ns", "speedup", BUSY)
    yield table("faster-models", "Models with sparse attention beside dense", records, *known(records, *names))


def _not_known(pairs: Sequence[tuple[Record, Record]]) -> str:
    """In brackets: that nothing says who sets the pace of such a difference."""
    missing = any(record.get(BUSY) is None for pair in pairs for record in pair)
    return " (how busy the GPU is there was not measured)" if missing else ""


def _beside_alone(stored: Stored, pairs: Sequence[tuple[Record, Record]]) -> str:
    """What a sparse attention would save in a model if it were as it is alone, and what the model takes less."""
    told = []
    for record, dense in pairs:
        for saved in _saved_alone(stored, record):
            gain = dense[TIME] - record[TIME]
            would = "nothing" if saved <= 0 else f"{said(TIME, saved)} ({said('share', saved / dense[TIME])})"
            taken = f"takes {said(TIME, abs(gain))} {'less' if gain > 0 else 'more'}"
            if not told_apart(record, dense):
                taken = f"is not to be told from {DENSE}"
            told.append(f"{would} of {said(TIME, dense[TIME])} {in_mode(record['mode'])} (the model {taken})")
    first, _ = pairs[0]
    where = f"in {first['preset']} at {first['seq_len']} tokens {first['attention']}"
    return f"{where} would save {listed(told)}" if told else ""


def _saved_alone(stored: Stored, record: Record) -> Iterator[float]:
    """What one layer's attention takes less than dense alone, times the layers, by the batch."""
    knobs = ("preset", "heads", "head_width", "seq_len", "dtype", "window", "global_tokens", "random_keys")
    same = {name: record[name] for name in knobs} | {"mode": ALONE_MODES[record["mode"]]}
    for one, other in beside_dense(stored.rows("attention").ok.where(**same), str(record["attention"])):
        yield record["layers"] * record["batch"] / one["batch"] * (other[TIME] - one[TIME])


def compares(stored: Stored) -> Iterator[Any]:
    """Whether dense and sparse are the same but for the pattern, and what a call inside a profiler says."""
    rows = stored.rows("attention").ok.needed()
    longest = max(rows.where(attention=DENSE).needed().values("seq_len"))
    dense = next(iter(rows.where(attention=DENSE, seq_len=longest)))
    density, causal = (said("share", dense[name]) for name in ("fact_density", "fact_causal_density"))
    is_causal = "is causal too" if abs(dense["fact_causal_density"] - 1) < 0.01 else "is not causal"
    sentences = [
        f"Dense attention {is_causal}: of {longest} × {longest} pairs it sees {density}, {causal} of the causal ones."
    ]
    whole = stored.rows("models").ok
    for preset in whole.values("preset"):
        sizes = {record["attention"]: record["num_parameters"] for record in whole.where(preset=preset)}
        if len(sizes) > 1:
            told = ", ".join(f"{number:,} ({name})" for name, number in sizes.items())
            same = "as many" if len(set(sizes.values())) == 1 else "not as many"
            sentences.append(f"{preset} has {same} parameters with every attention: {told}.")
    traced = {row["hash"]: row.get("traced_ns") for row in stored.sweep("attention").rows}
    records = [
        {**record, "traced_ns": ns, "traced_more_ns": ns - record[TIME], "traced_ratio": ns / record[TIME]}
        for record in named(rows)
        if (ns := traced.get(record["hash"]))
    ]
    if records:
        more = [record["traced_more_ns"] for record in records]
        ends = [
            f"{said('ratio', record['traced_ratio'])} times as long at {record['seq_len']} tokens ({record['path']} "
            f"in {record['mode']})"
            for record in (pick(records, key=lambda each: each["traced_ratio"]) for pick in (min, max))
        ]
        sentences.append(
            "One call inside a profiler, here without stacks, which the note's had, takes "
            f"{said(TIME, median(more))} more than clean calls in the median ({said(TIME, min(more))} to "
            f"{said(TIME, max(more))}): from {ends[0]} to {ends[1]}."
        )
        sentences.append(_first_calls(rows))
    yield Text(" ".join(sentences))
    names = ("mode", "path", "seq_len", TIME, "traced_ns", "traced_more_ns", "traced_ratio", "first_call_ns")
    yield table("profiled", "Clean calls, and one inside a profiler", records, *names)


def _first_calls(rows: Rows) -> str:
    """What a first call takes by path: one is compiled in it, the others only load their kernels."""
    told = []
    for name in rows.values("attention"):
        times = [record["first_call_ns"] for record in rows.where(attention=name)]
        why = "is compiled in it" if name == FLEX else "loads its kernels"
        taken = span(TIME, times)
        told.append(f"{taken} with {name}, which {why}")
    return f"The first call of a process takes {listed(told)}."
