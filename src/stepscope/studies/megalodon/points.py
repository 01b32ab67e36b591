"""The points of the megalodon study."""

from __future__ import annotations

from stepscope.studies.study import Recordings, Sweep

FFT, SEQUENTIAL, SCAN = ALL = ["fft", "sequential", "scan"]
MODES = ["forward", "forward+backward"]
TINY = {"preset": "tiny", "steps": 3, "warmup": 1}
STEP = {**TINY, "mode": "step"}
NEXT = {**TINY, "mode": "inference"}
PROFILE = {"preset": "profile", "batch": 4}
FULL_STEP = {**PROFILE, "mode": "step"}
FULL_NEXT = {**PROFILE, "mode": "inference"}
# Alone, the average has the sizes that it has in the model, so that the two can be compared.
ALONE_TINY = {**TINY, "batch": 2, "width": 64, "num_states": 4}
ALONE = {"batch": 4, "width": 384, "num_states": 8}
# The size above is host-bound on a large GPU; this one is not.
ALONE_LARGE = {"batch": 8, "width": 1024, "num_states": 16}

STEPS = Sweep(
    "steps", "megalodon", "a training step by length, dtype and bf16 reduction",
    quick=[
        {**STEP, "seq_len": [16, 32]},
        # Too large for any machine: the points after it must run all the same.
        {**STEP, "seq_len": 32, "batch": 1 << 32},
        {**STEP, "seq_len": 64},
        {**STEP, "seq_len": 16, "dtype": "bf16", "bf16_reduction": ["auto", "on", "off"]},
    ],
    full=[
        {**FULL_STEP, "seq_len": [512, 2048, 8192], "dtype": ["fp32", "tf32"]},
        {**FULL_STEP, "seq_len": 8192, "batch": 512},
        {**FULL_STEP, "seq_len": [512, 2048, 8192], "dtype": "bf16", "bf16_reduction": ["auto", "on", "off"]},
        {**FULL_STEP, "seq_len": [2048, 8192], "dtype": "autocast_bf16"},
        {**FULL_STEP, "seq_len": 32768, "dtype": "bf16"},
    ],
)  # fmt: skip
AVERAGE = Sweep(
    "average", "ema", "the moving average of one layer alone, by path",
    quick=[
        {**ALONE_TINY, "path": ALL, "seq_len": [16, 64], "mode": MODES},
        {**ALONE_TINY, "path": FFT, "seq_len": 64, "mode": "forward", "last_state": False},
    ],
    full=[
        {**ALONE, "path": [FFT, SCAN], "seq_len": [8, 64, 512, 2048, 8192], "mode": MODES},
        {**ALONE, "path": SEQUENTIAL, "seq_len": [8, 64, 512], "mode": MODES, "steps": 5},
        # The model in training does not need the state, which fft computes apart.
        {**ALONE, "path": FFT, "seq_len": [8, 64, 512, 2048, 8192], "mode": MODES, "last_state": False},
        {**ALONE_LARGE, "path": [FFT, SCAN], "seq_len": 8192, "mode": MODES},
    ],
)  # fmt: skip
PATHS = Sweep(
    "paths", "megalodon", "the model by the path of its moving average",
    quick=[{**TINY, "ema": [FFT, SCAN], "seq_len": [16, 64], "mode": MODES},
           {**TINY, "ema": SEQUENTIAL, "seq_len": 16, "mode": MODES}],
    full=[
        {**PROFILE, "ema": [FFT, SCAN], "seq_len": [512, 2048, 8192], "mode": MODES},
        {**PROFILE, "ema": SEQUENTIAL, "seq_len": [512, 2048], "mode": MODES, "steps": 3, "warmup": 1},
    ],
)  # fmt: skip
DECODE = Sweep(
    "decode", "stepscope.workloads.models.megalodon_decode:WORKLOAD", "the next token, from the state or recomputed",
    quick=[
        {**NEXT, "cache": "on", "ema": [FFT, SCAN], "seq_len": [32, 128]},
        {**NEXT, "cache": "off", "ema": FFT, "seq_len": [32, 128]},
    ],
    full=[
        {**FULL_NEXT, "cache": "on", "ema": ALL, "seq_len": [512, 8192]},
        {**FULL_NEXT, "cache": "off", "ema": [FFT, SCAN], "seq_len": [512, 8192]},
    ],
)  # fmt: skip
SHORT = Recordings(
    "short", "megalodon", "a short schedule",
    quick=[{"preset": "tiny", "seq_len": 64}],
    full=[{**PROFILE, "seq_len": [512, 2048], "dtype": "bf16"}],
    options=("--warmup", "2", "--clean", "3", "--trace", "1"),
)  # fmt: skip
LONG = Recordings(
    "long", "megalodon", "a longer schedule, traced twice",
    quick=[{"preset": "tiny", "seq_len": 64}],
    full=[{**PROFILE, "seq_len": 2048, "dtype": "bf16"}],
    options=("--warmup", "5", "--clean", "10", "--trace", "2", "--repeat", "2"),
)  # fmt: skip
MEASURES = (STEPS, AVERAGE, PATHS, DECODE, SHORT, LONG)
