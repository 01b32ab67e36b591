"""Megalodon's step and its moving average: what lengths, precision and the path of the average cost.

Redoes a profiling playbook. There, the switch that was to bring the sequential path did nothing, so that FFT was
compared with FFT; the "micro" traces were of whole models; the loop ran too few steps for its schedule, so that the
second cycle never came; and one point that ran out of memory lost the sweep and its summary.
"""

from __future__ import annotations

from stepscope.studies.megalodon import answers, files, paths, recordings
from stepscope.studies.outputs import appended
from stepscope.studies.study import Question, Recordings, Study, Sweep

FFT, SEQUENTIAL, SCAN = paths.PATHS
MODES = ["forward", "forward+backward"]
TINY = {"preset": "tiny", "steps": 3, "warmup": 2}
PROFILE = {"preset": "profile", "batch": 4}
# The average alone has the sizes that it has in the model, so that the one can be held against the other.
ALONE_TINY = {"preset": "tiny", "batch": 2, "width": 64, "num_states": 4, "steps": 3, "warmup": 2}
ALONE = {"batch": 4, "width": 384, "num_states": 8}
# In that size the host sets the pace on a large GPU; in this one the GPU does.
ALONE_LARGE = {"batch": 8, "width": 1024, "num_states": 16}

STEPS = Sweep(
    id="steps",
    workload="megalodon",
    about="a training step by length, dtype and bf16 reduction",
    quick=[
        {**TINY, "mode": "step", "seq_len": [32, 64]},
        # Too large for any machine: what comes after it must come all the same.
        {**TINY, "mode": "step", "seq_len": 64, "batch": 1 << 32},
        {**TINY, "mode": "step", "seq_len": 128},
        {**TINY, "mode": "step", "seq_len": 32, "dtype": "bf16", "bf16_reduction": ["auto", "on", "off"]},
    ],
    full=[
        {**PROFILE, "mode": "step", "seq_len": [512, 2048, 8192], "dtype": ["fp32", "tf32"]},
        {**PROFILE, "mode": "step", "seq_len": 8192, "batch": 512},
        {**PROFILE, "mode": "step", "seq_len": [512, 2048, 8192], "dtype": "bf16",
         "bf16_reduction": ["auto", "on", "off"]},
        {**PROFILE, "mode": "step", "seq_len": [2048, 8192], "dtype": "autocast_bf16"},
        {**PROFILE, "mode": "step", "seq_len": 32768, "dtype": "bf16"},
    ],
)  # fmt: skip
ALONE_SWEEP = Sweep(
    id="average",
    workload="ema",
    about="the moving average of one layer alone, by path",
    quick=[
        {**ALONE_TINY, "path": [FFT, SEQUENTIAL, SCAN], "seq_len": [4, 32, 128], "mode": MODES},
        {**ALONE_TINY, "path": FFT, "seq_len": 128, "mode": "forward", "last_state": False},
    ],
    full=[
        {**ALONE, "path": [FFT, SCAN], "seq_len": [8, 64, 512, 2048, 8192], "mode": MODES},
        {**ALONE, "path": SEQUENTIAL, "seq_len": [8, 64, 512], "mode": MODES, "steps": 5},
        # The model in training does not ask for the state, which fft computes apart: this is what to hold it against.
        {**ALONE, "path": FFT, "seq_len": [8, 64, 512, 2048, 8192], "mode": MODES, "last_state": False},
        {**ALONE_LARGE, "path": [FFT, SCAN], "seq_len": 8192, "mode": MODES},
    ],
)
PATHS = Sweep(
    id="paths",
    workload="megalodon",
    about="the model by the path of its moving average",
    quick=[{**TINY, "ema": [FFT, SEQUENTIAL, SCAN], "seq_len": [32, 128], "mode": MODES}],
    full=[
        {**PROFILE, "ema": [FFT, SCAN], "seq_len": [512, 2048, 8192], "mode": MODES},
        {**PROFILE, "ema": SEQUENTIAL, "seq_len": [512, 2048], "mode": MODES, "steps": 3, "warmup": 1},
    ],
)
DECODE = Sweep(
    id="decode",
    workload="stepscope.workloads.models.megalodon_decode:WORKLOAD",
    about="the next token, from the state of those before or from all of them anew",
    quick=[
        {**TINY, "mode": "inference", "cache": "on", "ema": [FFT, SEQUENTIAL, SCAN], "seq_len": [32, 128]},
        {**TINY, "mode": "inference", "cache": "off", "ema": FFT, "seq_len": [32, 128]},
    ],
    full=[
        {**PROFILE, "mode": "inference", "cache": "on", "ema": [FFT, SEQUENTIAL, SCAN], "seq_len": [512, 8192]},
        {**PROFILE, "mode": "inference", "cache": "off", "ema": [FFT, SCAN], "seq_len": [512, 8192]},
    ],
)
SHORT = Recordings(
    id="short",
    workload="megalodon",
    about="a short schedule",
    quick=[{"preset": "tiny", "seq_len": 64}],
    full=[{**PROFILE, "seq_len": [512, 2048], "dtype": "bf16"}],
    options=("--warmup", "2", "--clean", "3", "--trace", "1"),
)
LONG = Recordings(
    id="long",
    workload="megalodon",
    about="a longer schedule, traced twice",
    quick=[{"preset": "tiny", "seq_len": 64}],
    full=[{**PROFILE, "seq_len": 2048, "dtype": "bf16"}],
    options=("--warmup", "5", "--clean", "10", "--trace", "2", "--repeat", "2"),
)

STUDY = Study(
    name="megalodon",
    title="Megalodon: lengths, precision, and three paths of a moving average",
    about="Time and memory of a step by length and precision; FFT, sequential and scan, alone and in the model.",
    measures=(STEPS, ALONE_SWEEP, PATHS, DECODE, SHORT, LONG),
    questions=(
        Question(title="Which path is the fastest, and from which length?", answer=paths.fastest),
        Question(title="Are the three paths different, and do they give the same?", answer=paths.different),
        Question(title="What do precision and the reduction of bf16 products change?", answer=answers.precision),
        Question(title="How does memory grow with the length?", answer=answers.memory),
        Question(title="What does inference with a cache take?", answer=answers.cache),
        Question(title="Did every cycle of the schedule come, and does it matter?", answer=recordings.schedule),
        Question(title="What happens to the rest when one point runs out of memory?", answer=answers.out_of_memory),
        Question(title="Which spans of the host are candidates for fusion?", answer=recordings.fusion),
    ),
    files={
        "summary.csv": appended("summary.csv", files.summary),
        "reports/ms_per_step.txt": files.figure_text("ms_per_step"),
        "reports/peak_mem_gb.txt": files.figure_text("peak_mem_gb"),
        "reports": files.key_averages,
        "traces": files.traces,
    },
)
