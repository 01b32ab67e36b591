"""Dense against sparse attention in a GPT: what a sparse pattern saves, and where it saves nothing.

Redoes the profiling suite of "Nano XYZ". There, sparsity was reported as density, the sparse path was the larger one,
dense attention was not causal while sparse attention was, and latency was one call inside a profiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from stepscope.analysis.sweeps import OK
from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Chart, Table, Text
from stepscope.report.text import plural, safe
from stepscope.studies.figures import Record, against, growth, in_words, known, lines, said, table
from stepscope.studies.outputs import csv, markdown, part, png, rows_json
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import REPORT, Question, Study, Sweep

DENSE, MASK, FLEX = "dense", "sparse_mask", "sparse_flex"
TIME, PEAK = "time_median_ns", "peak_allocated_bytes"
ALONE = {"preset": "decoder_medium", "part": "attention", "dtype": "bf16", "batch": 4}
PATTERN = {
    "sparsity_share": "fact_sparsity", "density_share": "fact_density", "causal_density_share": "fact_causal_density",
    "needed_flops": "fact_attention_formula_flops", "executed_flops": "fact_attention_executed_flops",
}  # fmt: skip

ATTENTION = Sweep(
    id="attention",
    workload="nano",
    about="attention of one layer alone, by length",
    quick=[
        {"preset": "tiny", "part": "attention", "attention": [DENSE, MASK], "seq_len": [256, 512, 1024],
         "mode": ["inference", "forward+backward"], "steps": 5},
        # FlexAttention skips blocks in a kernel of its own, and has none here: a row to be told, not to be ranked.
        {"preset": "tiny", "part": "attention", "attention": FLEX, "seq_len": 512, "mode": "inference", "steps": 5},
    ],
    full=[
        {**ALONE, "attention": [DENSE, MASK, FLEX], "seq_len": [1024, 2048, 4096, 16384],
         "mode": ["inference", "forward+backward"]},
        {**ALONE, "attention": FLEX, "random": "scattered", "seq_len": 4096, "mode": "forward+backward"},
    ],
)  # fmt: skip
MODELS = Sweep(
    id="models",
    workload="nano",
    about="whole models",
    quick=[
        {"preset": "tiny", "seq_len": [128, 256], "attention": [DENSE, MASK], "mode": ["inference", "step"],
         "steps": 5},
    ],
    full=[
        {"preset": ["decoder_tiny", "decoder_small", "decoder_medium"], "seq_len": [1024, 4096], "attention": DENSE,
         "dtype": "bf16", "mode": ["inference", "step"]},
        {"preset": "decoder_medium", "seq_len": 4096, "attention": FLEX, "dtype": "bf16",
         "mode": ["inference", "step"]},
    ],
)  # fmt: skip


def _passes(rows: Rows) -> list[str]:
    return [mode for mode in ("inference", "forward+backward", "step") if len(rows.where(mode=mode))]


def _path(record: Record) -> str:
    """What a row's attention is, in a word or two."""
    return f"{record['attention']} scattered" if record["random"] == "scattered" else str(record["attention"])


def _named(rows: Iterable[Record]) -> list[dict[str, Any]]:
    return [{**record, "path": _path(record)} for record in rows]


def faster(stored: Stored) -> Iterator[Any]:
    """Which of the paths is the fastest at which length."""
    rows = stored.rows("attention").needed()
    sentences = []
    for mode in _passes(rows):
        ok = rows.ok.where(mode=mode, random="blocks")
        dense = {record["seq_len"]: record for record in ok.where(attention=DENSE)}
        for name in (FLEX, MASK):
            shared = [record for record in ok.where(attention=name) if record["seq_len"] in dense]
            if not shared:
                continue
            at = max(shared, key=lambda record: record["seq_len"])
            speed = against(at, dense[at["seq_len"]], DENSE)
            wins = [record["seq_len"] for record in shared if record[TIME] < dense[record["seq_len"]][TIME]]
            where = f"it wins from {min(wins)} tokens on" if wins else "it never wins"
            if wins and sorted(wins) != sorted(r["seq_len"] for r in shared if r["seq_len"] >= min(wins)):
                where = f"it wins at {', '.join(map(str, sorted(wins)))} tokens only"
            sentences.append(f"{mode}: {name} at {at['seq_len']} tokens is {speed}; {where}.")
    if not sentences:
        raise CannotCheck("no length was measured with dense and with sparse attention")
    yield Text(" ".join([*sentences, *_not_ranked(rows)]))
    for mode in _passes(rows):
        yield lines(f"latency-{mode}", f"Attention, {mode}", _named(rows.where(mode=mode)), "seq_len", TIME, "path")
    names = ("mode", "attention", "random", "seq_len", TIME, PEAK, "speedup", "loss")
    yield table("attention", "Attention alone", rows, *known(rows, *names))


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
            f"that are not causal among them. Its density, which the note prints under that name, is {density}. The "
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
    mode = _passes(rows)[-1]
    sentences = []
    for name in rows.values("attention"):
        measured = rows.ok.where(attention=name, mode=mode, random="blocks")
        if len(measured.values("seq_len")) > 1:
            power = in_words(growth(measured, "seq_len", PEAK))
            sentences.append(f"The peak of {name} attention grows {power} with the length ({mode}).")
    models = stored.rows("models").ok
    for preset in models.values("preset"):
        of = models.where(preset=preset, attention=DENSE, mode="step")
        if len(of.values("seq_len")) > 1:
            sentences.append(f"That of a step of {preset} grows {in_words(growth(of, 'seq_len', PEAK))}.")
    if not sentences:
        raise CannotCheck("there are not two lengths of anything")
    yield Text(" ".join(sentences))
    for each in _passes(rows):
        title = f"Peak of attention, {each}"
        yield lines(f"memory-{each}", title, _named(rows.where(mode=each)), "seq_len", PEAK, "path")


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
    yield Text(" ".join(sentences) or "No preset has both an inference and a training time.")
    names = ("preset", "attention", "seq_len", "mode", TIME, "tokens_per_s", PEAK, "num_parameters", "loss")
    yield table("models", "Whole models", rows, *names)
    for mode in _passes(rows):
        yield lines(
            f"models-{mode}", f"Models, {mode}", rows.where(mode=mode), "seq_len", TIME, ("preset", "attention")
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
            f"{median(record['first_call_ratio'] for record in records):.1f} times."
        )
    yield Text(" ".join(sentences))
    names = ("mode", "attention", "seq_len", TIME, "traced_ns", "traced_ratio", "first_call_ns", "first_call_ratio")
    yield table("profiled", "Clean calls, and one inside a profiler", records, *names)


STUDY = Study(
    name="nano",
    title="Dense against sparse attention in a GPT",
    about="Latency, memory, sparsity and FLOPs of dense, masked and block-sparse attention, alone and in models.",
    measures=(ATTENTION, MODELS),
    questions=(
        Question(title="Is sparse attention faster, and from which length?", answer=faster),
        Question(title="How sparse is it, and how much of it is skipped?", answer=sparsity),
        Question(title="Does memory grow linearly or quadratically?", answer=memory),
        Question(title="What do the presets take?", answer=models),
        Question(title="Are dense and sparse comparable, and is one profiled call a latency?", answer=compares),
    ),
    files={
        "attention_profile.json": rows_json("attention"),
        "model_profile.json": rows_json("models"),
        "attention_latency.png": png(part(faster, Chart, "latency-inference")),
        "attention_memory.png": png(part(memory, Chart, "memory-inference")),
        "attention_efficiency.png": png(part(sparsity, Chart, "executed")),
        "model_performance.png": png(part(models, Chart, "models-step")),
        "attention_summary.csv": csv(part(faster, Table, "attention")),
        "attention_summary.md": markdown(part(faster, Table, "attention")),
        "model_summary.csv": csv(part(models, Table, "models")),
        "model_summary.md": markdown(part(models, Table, "models")),
        "profiling_report.md": REPORT,
    },
)
