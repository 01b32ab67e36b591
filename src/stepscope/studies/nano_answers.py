"""The answers of the study `nano`: speed, sparsity and memory of attention, alone and in models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from stepscope.analysis.sweeps import OK
from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Text
from stepscope.report.text import plural, safe
from stepscope.studies.figures import Record, against, host_paced, known, lines, listed, meet, said, table
from stepscope.studies.lengths import grows
from stepscope.studies.stored import Rows, Stored

PATHS = ("dense", "sparse_mask", "sparse_flex")
DENSE, MASK, FLEX = PATHS
TIME, PEAK, BUSY = "time_median_ns", "peak_allocated_bytes", "gpu_busy_share"
PATTERN = {
    "sparsity_share": "fact_sparsity", "density_share": "fact_density", "causal_density_share": "fact_causal_density",
    "needed_flops": "fact_attention_formula_flops", "executed_flops": "fact_attention_executed_flops",
}  # fmt: skip


def _passes(rows: Rows) -> list[str]:
    return [mode for mode in ("inference", "forward+backward", "step") if len(rows.where(mode=mode))]


def _path(record: Record) -> str:
    """What a row's attention is, in a word or two."""
    return f"{record['attention']} scattered" if record["random"] == "scattered" else str(record["attention"])


def _named(rows: Iterable[Record]) -> list[dict[str, Any]]:
    return [{**record, "path": _path(record)} for record in rows]


def _beside_dense(rows: Rows, name: str) -> list[tuple[Record, Record]]:
    """The rows of a sparse attention, each with that of dense attention of its sizes and mode."""
    ok, knobs = rows.ok.where(random="blocks"), ("preset", "part", "seq_len", "batch", "mode")
    return [
        (record, dense)
        for record in ok.where(attention=name)
        for dense in ok.where(attention=DENSE, **{knob: record[knob] for knob in knobs})
    ]


def _speed(pairs: Iterable[tuple[Record, Record]]) -> str:
    return listed(f"{against(record, dense, DENSE)} {_in(record['mode'])}" for record, dense in pairs)


def _in(mode: str) -> str:
    return "in a step" if mode == "step" else f"in {mode}"


def faster(stored: Stored) -> Iterator[Any]:
    """Which of the paths is the fastest at which length."""
    rows = stored.rows("attention").needed()
    found = {name: pairs for name in (FLEX, MASK) if (pairs := _beside_dense(rows, name))}
    if not found:
        raise CannotCheck("no length was measured with dense and with sparse attention")
    places = "; ".join(f"{name} wins {_where(pairs)}" for name, pairs in found.items())
    speeds = []
    for name, pairs in found.items():
        longest = max(record["seq_len"] for record, _ in pairs)
        speed = _speed(pair for pair in pairs if pair[0]["seq_len"] == longest)
        speeds.append(f"At {longest} tokens {name} is {speed}.")
    yield Text(f"Against dense attention, {places}. {speeds[0]}")
    details = [*speeds[1:], *host_paced(rows.ok), *_not_ranked(rows)]
    if details:
        yield Text(" ".join(details))
    for mode in _passes(rows):
        yield lines(f"latency-{mode}", f"Attention, {mode}", _named(rows.where(mode=mode)), "seq_len", TIME, "path")
    names = ("mode", "attention", "random", "seq_len", "batch", TIME, BUSY, PEAK, "speedup", "loss")
    yield table("attention", "Attention alone", rows, *known(rows, *names))


def _where(pairs: Sequence[tuple[Record, Record]]) -> str:
    """At which lengths the first of each pair is faster, beyond noise, by mode where that makes a difference."""
    modes: dict[str, list[str]] = {}
    for mode in dict.fromkeys(record["mode"] for record, _ in pairs):
        of = sorted((record["seq_len"], _wins(record, dense)) for record, dense in pairs if record["mode"] == mode)
        wins = [length for length, is_won in of if is_won]
        where = f"at {listed(wins)} tokens only" if wins else "nowhere"
        if wins and len(wins) == sum(length >= wins[0] for length, _ in of):
            where = f"from {wins[0]} tokens on"
        modes.setdefault(where, []).append(_in(mode))
    if len(modes) == 1:
        return next(iter(modes))
    return listed(f"{where} {listed(each)}" for where, each in modes.items())


def _wins(record: Record, dense: Record) -> bool:
    return bool(record[TIME] < dense[TIME]) and not meet(record, dense)


def _not_ranked(rows: Rows) -> Iterator[str]:
    """Which rows have no part in it, and why."""
    for name in rows.values("attention"):
        left_out = [record for record in rows.where(attention=name) if record["status"] != OK]
        if left_out:
            statuses = ", ".join(dict.fromkeys(str(record["status"]) for record in left_out))
            yield (
                f"{plural(len(left_out), 'row')} of {name} not ranked: {statuses}, "
                f"{safe(str(left_out[0]['reason']), 200)}."
            )


def sparsity(stored: Stored) -> Iterator[Any]:
    """What the pattern leaves out, and what the hardware really skips."""
    rows = stored.rows("attention").ok.where(attention=(MASK, FLEX)).needed()
    longest = max(rows.values("seq_len"))
    sentences = []
    at = rows.where(seq_len=longest, mode=_passes(rows)[0])
    for value in at.values("fact_sparsity"):
        same = list(at.where(fact_sparsity=value))
        left_out, density = said("share", value), said("share", same[0]["fact_density"])
        executed, needed = "fact_attention_executed_flops", "fact_attention_formula_flops"
        times = ", ".join(f"{record[executed] / record[needed]:.2f} times by {_path(record)}" for record in same)
        sentences.append(
            f"At {longest} tokens the pattern has a sparsity of {left_out}: so much of all pairs is left out, those "
            f"that are not causal among them. Its density, which the note prints as its sparsity, is {density}. The "
            f"FLOPs that it needs are executed {times}."
        )
    yield Text(" ".join(sentences))
    unique = {(r["seq_len"], r["attention"], r["random"]): r for r in stored.rows("attention").ok}
    records = [{**r, **{name: r.get(fact) for name, fact in PATTERN.items()}} for r in unique.values()]
    yield table("sparsity", "Pattern and work", records, "seq_len", "attention", "random", *PATTERN)
    yield lines("executed", "FLOPs that run", _named(records), "seq_len", "executed_flops", "path")


def memory(stored: Stored) -> Iterator[Any]:
    """Linear or quadratic."""
    rows = stored.rows("attention").needed()
    blocks = rows.ok.where(random="blocks").needed()
    for mode in _passes(blocks):
        peaks = {f"{name} attention {_in(mode)}": blocks.where(attention=name, mode=mode) for name in PATHS}
        yield Text(_grow(peaks))
    yield Text(
        f"A token is one of the whole batch of {blocks.values('batch')[0]}; a pair is one of length × length, "
        "counted once for the batch."
    )
    for mode in _passes(rows):
        title = f"Peak of attention, {mode}"
        yield lines(f"memory-{mode}", title, _named(rows.where(mode=mode)), "seq_len", PEAK, "path")
    whole = stored.rows("models").ok.where(attention=DENSE, mode="step").needed()
    grow = _grow({f"a step of {preset}": whole.where(preset=preset) for preset in whole.values("preset")})
    yield Text(f"{grow} The weights and the optimizer's state are there whatever the length.")


def _grow(peaks: Mapping[str, Rows]) -> str:
    found = {what: of for what, of in peaks.items() if len(of.values("seq_len")) > 1}
    if not found:
        raise CannotCheck(f"there are not two lengths of {' or of '.join(peaks)}")
    return " ".join(f"The peak of {what} {grows(of, PEAK)}." for what, of in found.items())


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
                f"({step[TIME] / run[TIME]:.1f} times that), peak {said(PEAK, step[PEAK])}, loss {step['loss']:.3f}."
            )
    sentences = sentences or ["No preset has both an inference and a training time."]
    yield Text(" ".join([*sentences, *host_paced(rows.ok)]))
    names = ("preset", "attention", "seq_len", "batch", "mode", TIME, BUSY, "tokens_per_s", PEAK, "num_parameters")
    yield table("models", "Whole models", rows, *known(rows, *names, "loss"))
    for mode in _passes(rows):
        yield lines(
            f"models-{mode}", f"Models, {mode}", rows.where(mode=mode), "seq_len", TIME, ("preset", "attention")
        )


def faster_models(stored: Stored) -> Iterator[Any]:
    """Whether what is faster alone is faster in a model."""
    rows = stored.rows("models").needed()
    pairs = [pair for name in (FLEX, MASK) for pair in _beside_dense(rows, name)]
    if not pairs:
        raise CannotCheck("no model was measured with dense and with sparse attention")
    groups: dict[tuple[Any, ...], list[tuple[Record, Record]]] = {}
    for record, dense in pairs:
        groups.setdefault((record["preset"], record["seq_len"], record["attention"]), []).append((record, dense))
    sentences = [
        f"In {preset} at {length} tokens {name} is {_speed(of)}." for (preset, length, name), of in groups.items()
    ]
    yield Text(" ".join([*sentences, *host_paced(record for pair in pairs for record in pair)]))
    records = [{**record, "dense_ns": dense[TIME], "speedup": dense[TIME] / record[TIME]} for record, dense in pairs]
    names = ("preset", "seq_len", "batch", "mode", "attention", TIME, "dense_ns", "speedup")
    yield table("faster-models", "Models with sparse attention beside dense", records, *names)


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
        {**record, "traced_ns": traced[record["hash"]], "traced_ratio": traced[record["hash"]] / record[TIME],
         "first_call_ratio": record["first_call_ns"] / record[TIME]}
        for record in rows
        if traced.get(record["hash"])
    ]  # fmt: skip
    if records:
        ratios = [record["traced_ratio"] for record in records]
        sentences.append(
            f"One call inside a profiler takes {median(ratios):.2f} times the median of clean calls, between "
            f"{min(ratios):.2f} and {max(ratios):.2f} times; the first call of all "
            f"{said('ratio', median(record['first_call_ratio'] for record in records))} times."
        )
    yield Text(" ".join(sentences))
    names = ("mode", "path", "seq_len", TIME, "traced_ns", "traced_ratio", "first_call_ns", "first_call_ratio")
    yield table("profiled", "Clean calls, and one inside a profiler", _named(records), *names)
