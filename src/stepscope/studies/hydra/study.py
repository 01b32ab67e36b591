"""HYDRA, recursive blocks with routing: where a step goes, and what the note about it got wrong.

Redoes the notes on profiling "HYDRA 100M". There, misspelt keywords made another model (62 M parameters), routing was
compared between two sizes with the routing off, parents and children were counted together, a cold start passed for
a slow layer, and what copies cost was concluded and not measured.
"""

from __future__ import annotations

from stepscope.document.model import Chart, Table
from stepscope.studies.hydra.data import data, first_call
from stepscope.studies.hydra.ops import bottlenecks, copies, micro
from stepscope.studies.hydra.step import memory, model, shares
from stepscope.studies.hydra.variants import losses, routing, sizes
from stepscope.studies.outputs import csv, part, png, rows_json
from stepscope.studies.study import REPORT, Question, Recordings, Study, Sweep

WINDOWS = ("--warmup", "3", "--clean", "10", "--trace", "1")
TINY = {"preset": "tiny"}
NOTED = {"batch": 4, "seq_len": 1024, "dtype": "autocast_bf16"}
"""4,096 tokens a step: what the note's step time and tokens/s give together."""
LONG = {"batch": 4, "seq_len": 4096, "dtype": "autocast_bf16"}

STEP = Recordings(
    id="step",
    workload="hydra",
    about="steps of the presets",
    quick=[TINY, {"preset": "debug", "batch": 2, "seq_len": 64, "vocab": 1024}],
    full=[{"preset": "100m", **NOTED}, {"preset": ["100m", "500m", "1b"], **LONG}],
    options=WINDOWS,
)
TEXT = Recordings(
    id="text",
    workload="hydra",
    about="the first two of them on a text, read in the training process",
    quick=[TINY],
    full=[{"preset": "100m", **NOTED}, {"preset": "100m", **LONG}],
    options=WINDOWS,
    loop=("--data", "text"),
)
WORKERS = Recordings(
    id="workers",
    workload="hydra",
    about="the same, read by two workers",
    quick=(),
    full=[{"preset": "100m", **NOTED}, {"preset": "100m", **LONG}],
    options=WINDOWS,
    loop=("--data", "text", "--workers", "2"),
)
LOSSES = Sweep(
    id="losses",
    workload="hydra",
    about="the three losses",
    quick=[{**TINY, "vocab": 4096, "chunk_rows": 32, "loss": ["full", "chunked", "fused"]}],
    full=[{"preset": "100m", **LONG, "loss": ["full", "chunked", "fused"]}],
)
ROUTING = Sweep(
    id="routing",
    workload="hydra",
    about="static and dynamic depth, one model",
    quick=[TINY, {**TINY, "routing": "dynamic", "dispatch": ["gather", "mask"]}],
    full=[
        {"preset": ["100m", "500m"], **LONG, "routing": ["static", "dynamic"]},
        {"preset": "100m", **LONG, "routing": "dynamic", "dispatch": "mask"},
        {"preset": "100m", **LONG, "capacity": 0.5},
        {"preset": "100m", **LONG, "compile": "reduce-overhead"},
    ],
)
CONTIGUITY = Sweep(
    id="contiguity",
    workload="contiguity",
    about="convolutions on a slice, a contiguous copy, a padded one",
    quick=[{**TINY, "batch": 2, "seq_len": 64, "implementation": ["sliced", "contiguous", "padded"],
            "mode": "forward+backward"}],
    full=[{"batch": 4, "seq_len": 1024, "dtype": "bf16", "implementation": ["sliced", "contiguous", "padded"],
           "mode": "forward+backward"}],
)  # fmt: skip
VALUE_SHIFT = Sweep(
    id="value_shift",
    workload="value_shift",
    about="half of the value from the token before, five ways",
    quick=[{**TINY, "batch": 2, "seq_len": 64, "implementation": ["cat", "pad", "roll", "copy", "gather"],
            "mode": "forward"}],
    full=[{"batch": 4, "seq_len": 1024, "dtype": "bf16", "mode": "forward",
           "implementation": ["cat", "pad", "roll", "copy", "gather"]}],
)  # fmt: skip
FIRST_CALL = Sweep(
    id="first_call",
    workload="hydra",
    about="every layer in the first call of a process and later",
    quick=[TINY],
    full=[{"preset": "100m", **NOTED}],
    layers=True,
)

STUDY = Study(
    name="hydra",
    title="HYDRA: where a step of recursive blocks goes",
    about="Step shares, memory by layer, losses, bottlenecks, copies, routing, sizes, data and first calls.",
    measures=(STEP, TEXT, WORKERS, LOSSES, ROUTING, CONTIGUITY, VALUE_SHIFT, FIRST_CALL),
    questions=(
        Question(title="Where does a step go?", answer=shares),
        Question(title="Which model was measured?", answer=model),
        Question(title="What fills the memory, by stage and by layer?", answer=memory),
        Question(title="What does the loss cost?", answer=losses),
        Question(title="What are the bottlenecks?", answer=bottlenecks),
        Question(title="Where do copies come from, and what would it save to remove them?", answer=copies),
        Question(title="What are contiguous copies and the value shift worth alone?", answer=micro),
        Question(title="What does dynamic routing save?", answer=routing),
        Question(title="Do the patterns hold for larger models?", answer=sizes),
        Question(title="Does a real data pipeline slow it down?", answer=data),
        Question(title="What does the first call cost, by layer?", answer=first_call),
    ),
    files={
        "step_shares.csv": csv(part(shares, Table, "step_shares")),
        "step_shares.png": png(part(shares, Chart, "step_shares")),
        "memory_by_layer.csv": csv(part(memory, Table, "memory_by_layer")),
        "memory_by_stage.csv": csv(part(memory, Table, "memory_stages")),
        "memory_timeline.png": png(part(memory, Chart, "memory_timeline")),
        "losses.csv": csv(part(losses, Table, "losses")),
        "top_bottlenecks.csv": csv(part(bottlenecks, Table, "bottlenecks")),
        "top_bottlenecks.png": png(part(bottlenecks, Chart, "bottlenecks")),
        "copy_sources.csv": csv(part(copies, Table, "copy_sources")),
        "contiguity.json": rows_json("contiguity"),
        "value_shift.json": rows_json("value_shift"),
        "routing.csv": csv(part(routing, Table, "routing")),
        "sizes.csv": csv(part(sizes, Table, "sizes")),
        "data.csv": csv(part(data, Table, "data")),
        "first_call.csv": csv(part(first_call, Table, "first_call")),
        "first_call.png": png(part(first_call, Chart, "first_call")),
        "profiling_report.md": REPORT,
    },
)
