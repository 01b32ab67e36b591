"""The points of the hydra study."""

from __future__ import annotations

from stepscope.studies.study import Recordings, Sweep

WINDOWS = ("--warmup", "3", "--clean", "10", "--trace", "1")
TINY = {"preset": "tiny", "batch": 1, "seq_len": 32}
QUICK = {**TINY, "steps": 3, "warmup": 1}
NOTED = {"preset": "100m", "batch": 4, "seq_len": 1024, "dtype": "autocast_bf16"}
"""4,096 tokens per step: the note's step time times its tokens/s."""
LONG = {"preset": "100m", "batch": 4, "seq_len": 4096, "dtype": "autocast_bf16"}
MICRO = {"batch": 4, "seq_len": 1024, "dtype": "bf16"}
LOSSES = {"loss": ["full", "chunked", "fused"]}
CONVOLUTIONS = {"implementation": ["sliced", "contiguous", "padded"], "mode": "forward+backward"}
SHIFTS = {"implementation": ["cat", "pad", "roll", "copy", "gather"], "mode": "forward"}

MEASURES = (
    Recordings(
        "step", "hydra", "steps of the presets", options=WINDOWS,
        quick=[TINY, {"preset": "debug", "batch": 1, "seq_len": 32, "vocab": 1024}],
        full=[NOTED, {**LONG, "preset": ["100m", "500m", "1b"]}],
    ),
    Recordings(
        "text", "hydra", "the first two of them on a text, read in the training process", options=WINDOWS,
        quick=[TINY], full=[NOTED, LONG], loop=("--data", "text"),
    ),
    Recordings(
        "workers", "hydra", "the same, read by two workers", options=WINDOWS, quick=(), full=[NOTED, LONG],
        loop=("--data", "text", "--workers", "2"),
    ),
    Sweep(
        "losses", "hydra", "the three losses", quick={**QUICK, "vocab": 4096, "chunk_rows": 16, **LOSSES},
        full={**LONG, **LOSSES},
    ),
    Sweep(
        "routing", "hydra", "static and dynamic depth, one model",
        quick=[QUICK, {**QUICK, "routing": "dynamic", "dispatch": ["gather", "mask"]}],
        full=[
            {**LONG, "preset": ["100m", "500m"], "routing": ["static", "dynamic"]},
            {**LONG, "routing": "dynamic", "dispatch": "mask"},
            {**LONG, "capacity": 0.5},
            {**LONG, "compile": "reduce-overhead"},
        ],
    ),
    Sweep(
        "contiguity", "contiguity", "convolutions on a slice, a contiguous copy, a padded one",
        quick={**QUICK, **CONVOLUTIONS}, full={**MICRO, **CONVOLUTIONS},
    ),
    Sweep(
        "value_shift", "value_shift", "half of the value from the token before, five ways",
        quick={**QUICK, **SHIFTS}, full={**MICRO, **SHIFTS},
    ),
    Sweep(
        "first_call", "hydra", "every layer in the first call of a process and later", layers=True, quick=[QUICK],
        full=[NOTED],
    ),
)  # fmt: skip
