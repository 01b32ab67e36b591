"""The plain transformer in its sizes: where time and memory go, measured as the CS336 systems report meant to.

There, averages had the first call in them; a column called median was a mean of the host's time, which said nothing
about the GPU; inference kept its graph; products were looked for among ten kernels; peaks were reserved segments; and
what autocast adds in memory was laid to einsum.
"""

from __future__ import annotations

from stepscope.document.model import Chart, Table
from stepscope.studies.cs336.attention import compiled, grid, squares
from stepscope.studies.cs336.kernels import kernels, products, softmax
from stepscope.studies.cs336.memory import alive, autocast, peaks, timeline_of
from stepscope.studies.cs336.precision import exactness, mixed_precision
from stepscope.studies.cs336.time import AUTOCAST, FP32, durations, warm_up
from stepscope.studies.outputs import csv, markdown, part, png
from stepscope.studies.study import REPORT, Question, Recordings, Study, Sweep

PASSES = {"warmup": 5, "steps": 5}
ONCE = {"warmup": 1, "steps": 1}
"""For the memory alone."""
QUICK = {"preset": "tiny", "layers": 1, "batch": 2}
BOTH = [FP32, AUTOCAST]
NO_ROOM = 1 << 19
"""Tokens whose mask has 256 GiB: out of memory at once."""

MODELS = Sweep(
    id="models",
    workload="cs336",
    about="inference and training by size, length and precision",
    trace=True,
    quick=[
        {**QUICK, **PASSES, "seq_len": [48, 96], "mode": ["inference", "step"]},
        {**QUICK, "seq_len": 48, "mode": "step", "dtype": AUTOCAST, "warmup": 1, "steps": 3},
        {**QUICK, **ONCE, "seq_len": 48, "mode": "inference", "dtype": AUTOCAST},
        {**QUICK, **ONCE, "seq_len": 48, "mode": "forward", "dtype": BOTH},
        {**QUICK, **ONCE, "seq_len": 48, "mode": "forward", "dtype": AUTOCAST, "linear": "linear"},
        {**QUICK, **ONCE, "batch": 1, "seq_len": NO_ROOM, "mode": "inference"},
    ],
    full=[
        {
            **PASSES,
            "preset": ["small", "medium", "large", "xl", "2.7B"],
            "seq_len": [128, 256, 512, 1024],
            "mode": ["inference", "step"],
        },
        {**PASSES, "preset": "2.7B", "seq_len": [128, 256, 512], "mode": ["inference", "step"], "dtype": AUTOCAST},
        {**ONCE, "preset": "2.7B", "seq_len": 256, "mode": "forward", "dtype": BOTH},
        {**ONCE, "preset": "2.7B", "seq_len": 256, "mode": "forward", "dtype": AUTOCAST, "linear": "linear"},
        {**PASSES, "preset": ["small", "medium", "large", "xl"], "seq_len": 128, "mode": "step", "dtype": AUTOCAST},
        {**PASSES, "preset": "10B", "seq_len": 1024, "mode": ["inference", "forward", "step"]},
    ],
)
RECORDED = Recordings(
    id="recordings",
    workload="cs336",
    about="passes with the memory of each tensor and the time of each module",
    options=("--warmup", "2", "--clean", "3", "--trace", "1", "--memory"),
    quick=[
        {**QUICK, "seq_len": 48, "mode": ["inference", "step"]},
        {**QUICK, "seq_len": 48, "mode": "step", "dtype": AUTOCAST},
    ],
    full=[
        {"preset": "2.7B", "seq_len": 256, "mode": ["inference", "step"]},
        {"preset": "2.7B", "seq_len": 256, "mode": "step", "dtype": AUTOCAST},
        {"preset": "small", "seq_len": 1024, "mode": "step"},
    ],
)
ALONE = {"mode": "forward+backward", "warmup": 2}
ATTENTION = Sweep(
    id="attention",
    workload="attention",
    about="attention alone by width and length, and by what it keeps",
    quick=[
        {**ALONE, "batch": 2, "steps": 3, "implementation": "naive", "head_width": [16, 32],
         "seq_len": [64, 128, 256]},
        {**ALONE, "batch": 2, "steps": 3, "implementation": ["builtin", "custom", "flash"], "head_width": 16,
         "seq_len": [128, 256]},
        {**ALONE, "batch": 2, "steps": 3, "implementation": "compiled", "head_width": 16, "seq_len": 256},
        {**ALONE, "batch": 1, "steps": 1, "implementation": "naive", "head_width": 16, "seq_len": NO_ROOM},
    ],
    full=[
        {**ALONE, "steps": 5, "implementation": "naive", "head_width": [16, 32, 64, 128],
         "seq_len": [256, 1024, 4096, 8192, 16384]},
        {**ALONE, "steps": 5, "implementation": "naive", "head_width": 16, "seq_len": [32768, 65536]},
        {**ALONE, "steps": 5, "implementation": ["builtin", "custom", "efficient"], "head_width": 16,
         "seq_len": [1024, 4096, 16384]},
        {**ALONE, "steps": 5, "implementation": "flash", "dtype": "bf16", "head_width": 16,
         "seq_len": [1024, 4096, 16384]},
        {**ALONE, "steps": 5, "implementation": "compiled", "head_width": 16, "seq_len": [4096, 16384]},
    ],
)  # fmt: skip
COMPILED = Sweep(
    id="compiled",
    workload="cs336",
    about="models eager and compiled; four layers, which is what compiling them all would repeat",
    quick=(),  # compiled attention is there; one layer of the model is a third of the study's time on a CPU
    full=[
        {"preset": ["small", "2.7B"], "layers": 4, "seq_len": 256, "mode": "step", "compile": ["off", "default"]},
    ],
)  # fmt: skip
SUMS = [
    {"experiment": "accumulate", "mode": "forward", "steps": 1, "preset": ["fp32", "fp16", "bf16", "mixed"]},
    {"experiment": "audit", "mode": "forward", "steps": 1, "value_dtype": ["fp16", "bf16"], "preset": "tiny"},
]
PRECISION = Sweep(
    id="precision",
    workload="precision",
    about="running sums in narrow dtypes, and dtypes under autocast",
    quick=SUMS,
    full=SUMS,
)

STUDY = Study(
    name="cs336",
    title="Time and memory of a plain transformer",
    about="Passes, warm-up, kernels, products, softmax, mixed precision, memory, attention, the compiler: by size.",
    measures=(MODELS, RECORDED, ATTENTION, COMPILED, PRECISION),
    questions=(
        Question(title="How long does each pass take, and what does not fit?", answer=durations),
        Question(title="What does warm-up change?", answer=warm_up),
        Question(title="Which kernels take the time of each pass?", answer=kernels),
        Question(title="How much of the work is products of matrices?", answer=products),
        Question(title="What does softmax cost beside the products of attention?", answer=softmax),
        Question(title="Is bf16 slower?", answer=mixed_precision),
        Question(title="How exact are sums in narrow dtypes, and where does autocast use them?", answer=exactness),
        Question(title="How high is the peak of memory?", answer=peaks),
        Question(title="What is alive at the peak?", answer=alive),
        Question(title="Why does autocast not halve the memory?", answer=autocast),
        Question(title="How does attention written out grow?", answer=grid),
        Question(title="How many tensors of length × length does attention keep?", answer=squares),
        Question(title="What does the compiler change?", answer=compiled),
    ),
    files={
        "benchmark_results.md": markdown(part(durations, Table, "durations")),
        "benchmark_results.csv": csv(part(durations, Table, "durations")),
        "warm_up.csv": csv(part(warm_up, Table, "warm-up")),
        "kernels_by_pass.csv": csv(part(kernels, Table, "kernels-by-pass")),
        "gemm_share.csv": csv(part(products, Table, "gemm-share")),
        "gemm_share.png": png(part(products, Chart, "gemm-share")),
        "softmax.csv": csv(part(softmax, Table, "softmax")),
        "mixed_precision.csv": csv(part(mixed_precision, Table, "mixed-precision")),
        "memory_inference.png": png(timeline_of("inference", FP32)),
        "memory_step.png": png(timeline_of("step", FP32)),
        "memory_step_autocast.png": png(timeline_of("step", AUTOCAST)),
        "peak_memory.csv": csv(part(peaks, Table, "peaks")),
        "largest_allocations.csv": csv(part(alive, Table, "largest-fp32")),
        "largest_of_the_forward.csv": csv(part(alive, Table, "largest-forward-fp32")),
        "attention_grid.csv": csv(part(grid, Table, "attention-grid")),
        "attention_forward.png": png(part(grid, Chart, "attention-forward")),
        "attention_memory.png": png(part(grid, Chart, "attention-before-backward")),
        "compiled.csv": csv(part(compiled, Table, "compiled")),
        "cs336_report.md": REPORT,
    },
)
