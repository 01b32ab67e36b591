"""Dense against sparse attention in a GPT: what a sparse pattern saves, and where it saves nothing.

Redoes the profiling suite of "Nano XYZ". There, sparsity was reported as density, the sparse path was the larger one,
dense attention was not causal while sparse attention was, and latency was one call inside a profiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Chart, Table, Text
from stepscope.studies.figures import compared, growth, in_words, lines, said, table
from stepscope.studies.outputs import csv, markdown, part, png, rows_json
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import REPORT, Question, Study, Sweep

DENSE, MASK, FLEX = "dense", "sparse_mask", "sparse_flex"
TIME, PEAK = "time_median_ns", "peak_allocated_bytes"
ALONE = {"part": "attention", "attention": [DENSE, MASK, FLEX]}
PATTERN = (
    "seq_len", "attention", "random", "fact_sparsity", "fact_density", "fact_causal_density",
    "fact_attention_formula_flops", "fact_attention_executed_flops",
)  # fmt: skip

ATTENTION = Sweep(
    id="attention",
    workload="nano",
    about="attention of one layer alone, by length",
    quick=[
        {"preset": "tiny", "part": "attention", "attention": [DENSE, MASK], "seq_len": [256, 512, 1024],
         "mode": ["inference", "forward+backward"], "steps": 5},
        {"preset": "tiny", "part": "attention", "attention": FLEX, "seq_len": [256, 512], "mode": "inference",
         "steps": 5},
    ],
    full=[
        {"preset": "decoder_medium", **ALONE, "dtype": "bf16", "batch": 4, "seq_len": [1024, 2048, 4096, 8192, 16384],
         "mode": ["inference", "forward+backward"]},
        {"preset": "decoder_medium", "part": "attention", "attention": FLEX, "random": "scattered", "dtype": "bf16",
         "batch": 4, "seq_len": [1024, 2048, 4096, 8192, 16384], "mode": ["inference", "forward+backward"]},
    ],
)  # fmt: skip
MODELS = Sweep(
    id="models",
    workload="nano",
    about="whole models",
    quick=[{"preset": "tiny", "seq_len": [128, 256], "attention": DENSE, "mode": ["inference", "step"], "steps": 5}],
    full=[
        {"preset": ["decoder_tiny", "decoder_small", "decoder_medium"], "seq_len": [512, 1024, 2048, 4096],
         "attention": [DENSE, FLEX], "dtype": "bf16", "mode": ["inference", "step"]},
    ],
)  # fmt: skip


def _passes(rows: Rows) -> list[str]:
    return [mode for mode in ("inference", "forward+backward", "step") if len(rows.where(mode=mode))]


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
            speed = compared(at[TIME], dense[at["seq_len"]][TIME], DENSE)
            wins = [record["seq_len"] for record in shared if record[TIME] < dense[record["seq_len"]][TIME]]
            where = f"it wins from {min(wins)} tokens on" if wins else "it never wins"
            if wins and sorted(wins) != sorted(r["seq_len"] for r in shared if r["seq_len"] >= min(wins)):
                where = f"it wins at {', '.join(map(str, sorted(wins)))} tokens only"
            sentences.append(f"{mode}: {name} at {at['seq_len']} tokens is {speed}; {where}.")
    if not sentences:
        raise CannotCheck("no length was measured with dense and with sparse attention")
    yield Text(" ".join(sentences))
    for mode in _passes(rows):
        by = ("attention", "random")
        yield lines(f"latency-{mode}", f"Attention, {mode}", rows.where(mode=mode), "seq_len", TIME, by)
    yield table("attention", "Attention alone", rows, "mode", "attention", "random", "seq_len", TIME, PEAK, "speedup")


def sparsity(stored: Stored) -> Iterator[Any]:
    """What the pattern leaves out, and what the hardware really skips."""
    rows = stored.rows("attention").ok.where(attention=(MASK, FLEX)).needed()
    longest = max(rows.values("seq_len"))
    sentences = []
    for record in rows.where(seq_len=longest, mode=_passes(rows)[0]):
        pattern = f"{record['attention']} ({record['random']})"
        executed, formula = record["fact_attention_executed_flops"], record["fact_attention_formula_flops"]
        left_out, density = (said("share", record[name]) for name in ("fact_sparsity", "fact_density"))
        sentences.append(
            f"At {longest} tokens {pattern} has a sparsity of {left_out}: so much of all pairs is left out, those "
            f"that are not causal among them (its density is {density}). It executes {executed / formula:.2f} times "
            f"the FLOPs that the pattern needs."
        )
    yield Text(" ".join(sentences))
    unique = {(r["seq_len"], r["attention"], r["random"]): r for r in stored.rows("attention").ok}
    yield table("sparsity", "Pattern and work", unique.values(), *PATTERN)
    executed = "fact_attention_executed_flops"
    yield lines("executed", "FLOPs that run", unique.values(), "seq_len", executed, ("attention", "random"))


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
        yield lines(
            f"memory-{each}", f"Peak of attention, {each}", rows.where(mode=each), "seq_len", PEAK,
            ("attention", "random"),
        )  # fmt: skip


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
