"""Dense against sparse attention in a GPT: what a sparse pattern saves, and where it saves nothing.

Redoes the profiling suite of "Nano XYZ". There, sparsity was reported as density, the sparse path was the larger one,
dense attention was not causal while sparse attention was, and latency was one call inside a profiler.
"""

from __future__ import annotations

from stepscope.document.model import Chart, Table
from stepscope.studies.nano import answers, models
from stepscope.studies.nano.answers import DENSE, FLEX, MASK
from stepscope.studies.outputs import csv, markdown, part, png, rows_json
from stepscope.studies.study import REPORT, Question, Study, Sweep

ALONE = {"preset": "decoder_medium", "part": "attention", "dtype": "bf16", "batch": 4}

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
        {"preset": "decoder_medium", "seq_len": [2048, 16384], "attention": DENSE, "dtype": "bf16",
         "mode": ["inference", "step"]},
        {"preset": "decoder_medium", "seq_len": [4096, 16384], "attention": FLEX, "dtype": "bf16",
         "mode": ["inference", "step"]},
    ],
)  # fmt: skip

STUDY = Study(
    name="nano",
    title="Dense against sparse attention in a GPT",
    about="Latency, memory, sparsity and FLOPs of dense, masked and block-sparse attention, alone and in models.",
    measures=(ATTENTION, MODELS),
    questions=(
        Question(title="Is sparse attention faster, and from which length?", answer=answers.faster),
        Question(title="How sparse is it, and how much of it is skipped?", answer=answers.sparsity),
        Question(title="Does memory grow linearly or quadratically?", answer=answers.memory),
        Question(title="Is sparse attention faster in a whole model too?", answer=models.faster_models),
        Question(title="What do the presets take?", answer=models.models),
        Question(
            title="Are dense and sparse comparable, and is one profiled call a latency?", answer=models.compares
        ),
    ),
    files={
        "attention_profile.json": rows_json("attention"),
        "model_profile.json": rows_json("models"),
        "attention_latency.png": png(part(answers.faster, Chart, "latency-inference")),
        "attention_memory.png": png(part(answers.memory, Chart, "memory-inference")),
        "attention_efficiency.png": png(part(answers.sparsity, Chart, "executed")),
        "model_performance.png": png(part(models.models, Chart, "models-step")),
        "attention_summary.csv": csv(part(answers.faster, Table, "attention")),
        "attention_summary.md": markdown(part(answers.faster, Table, "attention")),
        "model_summary.csv": csv(part(models.models, Table, "models")),
        "model_summary.md": markdown(part(models.models, Table, "models")),
        "profiling_report.md": REPORT,
    },
)
