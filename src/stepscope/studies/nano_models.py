"""The answers of the study `nano` about whole models, and about what its note compared."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Text
from stepscope.report.text import plural
from stepscope.studies.figures import Record, host_paced, known, lines, listed, loss_said, said, table
from stepscope.studies.nano_answers import (
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
    sentences = []
    for preset in rows.values("preset"):
        of = rows.ok.where(preset=preset, attention=DENSE)
        pairs = [
            (step, run)
            for step in of.where(mode="step")
            for run in of.where(mode="inference", seq_len=step["seq_len"])
        ]
        if pairs:
            step, run = max(pairs, key=lambda pair: pair[0]["seq_len"])
            sentences.append(
                f"{preset} ({step['num_parameters']:,} parameters) at {step['seq_len']} tokens: inference "
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
        raise CannotCheck("no model was measured with dense and with sparse attention")
    groups: dict[tuple[Any, ...], list[tuple[Record, Record]]] = {}
    for record, dense in pairs:
        groups.setdefault((record["preset"], record["seq_len"], record["attention"]), []).append((record, dense))
    sentences = [
        f"In {preset} at {length} tokens {name} is {speed(of)}." for (preset, length, name), of in groups.items()
    ]
    yield Text(" ".join([*sentences, *host_paced(record for pair in pairs for record in pair)]))
    at_most = [text for record, dense in pairs for text in _at_most(stored, record, dense)]
    if at_most:
        yield Text(" ".join(at_most))
    records = [{**record, "dense_ns": dense[TIME], "speedup": dense[TIME] / record[TIME]} for record, dense in pairs]
    names = ("preset", "seq_len", "batch", "mode", "attention", TIME, "dense_ns", "speedup")
    yield table("faster-models", "Models with sparse attention beside dense", records, *names)


def _at_most(stored: Stored, record: Record, dense: Record) -> Iterator[str]:
    """What the attention of a model would save if it were as it is alone, by the batch."""
    knobs = ("preset", "heads", "head_width", "seq_len", "dtype", "window", "global_tokens", "random_keys")
    same = {name: record[name] for name in knobs} | {"mode": ALONE_MODES[record["mode"]]}
    alone = stored.rows("attention").ok.where(**same)
    for one, other in beside_dense(alone, str(record["attention"])):
        scale = record["layers"] * record["batch"] / one["batch"]
        saved = scale * (other[TIME] - one[TIME])
        sizes = f"{record['layers']} layers, scaled from {plural(one['batch'], 'sequence')} to {record['batch']}"
        begin = f"{in_mode(record['mode']).capitalize()} of {record['preset']} at {record['seq_len']} tokens"
        if saved <= 0:
            yield f"{begin} {one['attention']} saves nothing: alone it is no faster."
            continue
        yield (
            f"{begin} {one['attention']} could save at most {said(TIME, saved)} of {said(TIME, dense[TIME])}, "
            f"{said('share', saved / dense[TIME])}: {said(TIME, other[TIME])} − {said(TIME, one[TIME])} alone "
            f"({one['mode']}), for {sizes}."
        )


def compares(stored: Stored) -> Iterator[Any]:
    """Whether dense and sparse are the same but for the pattern, and what a call inside a profiler says."""
    rows = stored.rows("attention").ok.needed()
    longest = max(rows.where(attention=DENSE).needed().values("seq_len"))
    dense = rows.where(attention=DENSE, seq_len=longest).one()
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
        taken = " to ".join(dict.fromkeys(said(TIME, ns) for ns in (min(times), max(times))))
        told.append(f"{taken} with {name}, which {why}")
    return f"The first call of a process takes {listed(told)}."
