"""Training a time-series mixture of experts: what it reaches, what AMP, masks, dispatch and the compiler do to it.

Redoes the "FoundationTS training notes". There, a token cost 12·N FLOPs, attention none, and the peak was the one
with sparsity; speeds were ranked between models whose losses were 260 and 3; the attention mask was inverted; one
NVML field was printed under two names; and two questions stayed open: why one dispatch is half as fast, and what
others do about it.
"""

from __future__ import annotations

from stepscope.document.model import Chart, Table
from stepscope.studies.outputs import csv, markdown, part, png, rows_json
from stepscope.studies.study import REPORT, Question, Recordings, Study, Sweep
from stepscope.studies.tsmoe.amp import amp
from stepscope.studies.tsmoe.compiled import compiled
from stepscope.studies.tsmoe.experts import grouped, half
from stepscope.studies.tsmoe.training import mfu, training
from stepscope.studies.tsmoe.variants import dispatch, mask

AMP, FP32 = "autocast_bf16", "fp32"
# Short enough for a processor that emulates bfloat16.
TINY = {"preset": "tiny", "seq_len": 16, "batch": 1}
LARGER = {"d_model": 128, "d_ff": 128, "d_expert": 128}
# A third of the layers of 538m: every layer is like the others, and the compiler's time grows with them.
PART = {"preset": "538m", "layers": 4}
# Experts filled as a trained router fills them; a fifth of the rows of `capacity` and `indexed` are nobody's.
EVEN = {"routing": "balanced", "capacity_factor": 1.25}

TRAINING = Recordings(
    id="training",
    workload="tsmoe",
    about="AMP and fp32, a small and a large model, and the small one on few tokens",
    quick=[{**TINY, "dtype": [FP32, AMP]}, {**TINY, **LARGER, "dtype": [FP32, AMP]}],
    full=[
        {"preset": "23m", "batch": 1, "seq_len": 512, "routing": "balanced", "dtype": [FP32, AMP]},
        {"preset": "23m", "batch": 4, "routing": "balanced", "dtype": [FP32, AMP]},
        {"preset": "538m", "routing": "balanced", "dtype": [FP32, AMP]},
    ],
    options=("--warmup", "2", "--clean", "6", "--trace", "1"),
)
COMPILED = Recordings(
    id="compiled",
    workload="tsmoe",
    about="compiled, with a router that learns",
    quick=(),
    full=[
        {"preset": "538m", "layers": 2, "batch": 4, "dtype": AMP, "dispatch": ["loop", "grouped"], "compile": mode}
        for mode in ("default", "reduce-overhead")
    ],
    options=("--warmup", "8", "--clean", "6", "--trace", "1"),
)
DISPATCH = Sweep(
    id="dispatch",
    workload="tsmoe",
    about="ways to dispatch against the loop",
    trace=True,
    quick=[
        {**TINY, **EVEN, "layers": 1, "dtype": AMP, "steps": 3, "warmup": 1,
         "dispatch": ["loop", "capacity", "one_hot", "tile", "grouped", "indexed"]},
    ],
    full=[
        {**PART, **EVEN, "dtype": AMP, "steps": 8, "warmup": 2,
         "dispatch": ["loop", "capacity", "one_hot", "tile", "grouped", "indexed"]},
        {**PART, **EVEN, "dtype": AMP, "steps": 8, "warmup": 2, "compile": "default",
         "dispatch": ["loop", "capacity", "grouped"]},
        {**PART, **EVEN, "dtype": AMP, "steps": 8, "warmup": 2, "compile": "reduce-overhead", "optimizer": "fused",
         "dispatch": "capacity"},
    ],
)  # fmt: skip
MASKS = Sweep(
    id="masks",
    workload="tsmoe",
    about="masks against is_causal",
    trace=True,
    quick=[{**TINY, "dtype": FP32, "steps": 3, "warmup": 1, "mask": ["causal", "given", "inverted"]}],
    full=[{**PART, **EVEN, "dtype": AMP, "steps": 8, "warmup": 2, "mask": ["causal", "given", "inverted"]}],
)

STUDY = Study(
    name="tsmoe",
    title="Training a time-series mixture of experts",
    about="Tokens/s, MFU and utilization of a training run; AMP, attention masks, expert dispatch and the compiler.",
    measures=(TRAINING, DISPATCH, MASKS, COMPILED),
    questions=(
        Question(title="What does the training run reach?", answer=training),
        Question(title="Which MFU is that?", answer=mfu),
        Question(title="Does AMP pay, and where does it not?", answer=amp),
        Question(title="What does an attention mask cost?", answer=mask),
        Question(title="Which dispatch is the fastest of those that are the same model?", answer=dispatch),
        Question(title="Why is one dispatch so much slower?", answer=half),
        Question(title="What do grouped GEMMs change?", answer=grouped),
        Question(title="What does the compiler do, and how often again?", answer=compiled),
    ),
    files={
        "training.csv": csv(part(training, Table, "training")),
        "training.md": markdown(part(training, Table, "training")),
        "mfu.csv": csv(part(mfu, Table, "mfu")),
        "amp.csv": csv(part(amp, Table, "amp")),
        "amp.png": png(part(amp, Chart, "amp-parts")),
        "attention.csv": csv(part(mask, Table, "attention")),
        "dispatch.json": rows_json("dispatch"),
        "dispatch.csv": csv(part(dispatch, Table, "dispatch")),
        "dispatch.md": markdown(part(dispatch, Table, "dispatch")),
        "dispatch.png": png(part(dispatch, Chart, "dispatch-times")),
        "indexing.csv": csv(part(half, Table, "indexing")),
        "grouped.csv": csv(part(grouped, Table, "grouped")),
        "training_report.md": REPORT,
    },
)
