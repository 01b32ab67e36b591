"""The points of the tsmoe study."""

from __future__ import annotations

from stepscope.studies.study import Recordings, Sweep

BOTH = FP32, AMP = ["fp32", "autocast_bf16"]
# Short enough for a processor that emulates bfloat16.
TINY = {"preset": "tiny", "seq_len": 16, "batch": 1}
# Experts filled as by a trained router; a fifth of the rows of `capacity` and `indexed` are padding.
EVEN = {"routing": "balanced", "capacity_factor": 1.25}
# A third of the layers of 538m: layers are alike, and compile time grows with them.
PART = {"preset": "538m", "layers": 4, **EVEN, "dtype": AMP, "steps": 8, "warmup": 2}
LEARNED = {"preset": "538m", "layers": 2, "batch": 4, "dtype": AMP, "dispatch": ["loop", "grouped"]}
QUICK = {**TINY, "steps": 3, "warmup": 1}
WAYS = ["loop", "capacity", "one_hot", "tile", "grouped", "indexed"]
MASKS = {"mask": ["causal", "given", "inverted"]}

MEASURES = (
    Recordings(
        "training", "tsmoe", "AMP and fp32, a small and a large model, and the small one on few tokens",
        quick={**TINY, "dtype": BOTH},
        full=[
            {"preset": "23m", "batch": 1, "seq_len": 512, "routing": "balanced", "dtype": BOTH},
            {"preset": "23m", "batch": 4, "routing": "balanced", "dtype": BOTH},
            {"preset": "538m", "routing": "balanced", "dtype": BOTH},
        ],
        options=("--warmup", "2", "--clean", "6", "--trace", "1"),
    ),
    Sweep(
        "dispatch", "tsmoe", "ways to dispatch against the loop", trace=True,
        quick={**QUICK, **EVEN, "layers": 1, "dtype": AMP, "dispatch": WAYS},
        full=[
            {**PART, "dispatch": WAYS},
            {**PART, "compile": "default", "dispatch": ["loop", "capacity", "grouped"]},
            {**PART, "compile": "reduce-overhead", "optimizer": "fused", "dispatch": "capacity"},
        ],
    ),
    Sweep(
        "masks", "tsmoe", "masks against is_causal", trace=True, quick={**QUICK, "dtype": FP32, **MASKS},
        full={**PART, **MASKS},
    ),
    Recordings(
        "compiled", "tsmoe", "compiled, with a router that learns", quick=(),
        full=[{**LEARNED, "compile": mode} for mode in ("default", "reduce-overhead")],
        options=("--warmup", "8", "--clean", "6", "--trace", "1"),
    ),
)  # fmt: skip
