"""The points of the cs336 study."""

from stepscope.studies.study import Recordings, Sweep

BOTH = FP32, AUTOCAST = ["fp32", "autocast_bf16"]
PASSES = {"warmup": 5, "steps": 5}
ONCE = {"warmup": 1, "steps": 1}  # for memory only
QUICK = {"preset": "tiny", "layers": 1, "batch": 1, "seq_len": 48}
TRAINED = {**PASSES, "mode": ["inference", "step"]}
KEPT = {**ONCE, "preset": "2.7B", "seq_len": 256, "mode": "forward"}
NO_ROOM = 1 << 19  # tokens whose mask takes 256 GiB: out of memory at once
ALONE = {"mode": "forward+backward", "warmup": 2, "steps": 5}
SMALL = {**ALONE, "batch": 1, "warmup": 1, "steps": 2, "head_width": 16}
NARROW = {**ALONE, "head_width": 16}
SUMS = [
    {"experiment": "accumulate", "mode": "forward", "steps": 1, "preset": ["fp32", "fp16", "bf16", "mixed"]},
    {"experiment": "audit", "mode": "forward", "steps": 1, "value_dtype": ["fp16", "bf16"], "preset": "tiny"},
]

MEASURES = (
    Sweep(
        "models", "cs336", "inference and training by size, length and precision", trace=True,
        quick=[
            {**QUICK, **TRAINED, "seq_len": [48, 96]},
            {**QUICK, "mode": "step", "dtype": AUTOCAST, "warmup": 1, "steps": 3},
            {**QUICK, **ONCE, "mode": "inference", "dtype": AUTOCAST},
            {**QUICK, **ONCE, "mode": "forward", "dtype": BOTH},
            {**QUICK, **ONCE, "mode": "forward", "dtype": AUTOCAST, "linear": "linear"},
            {**QUICK, **ONCE, "seq_len": NO_ROOM, "mode": "inference"},
        ],
        full=[
            {**TRAINED, "preset": ["small", "medium", "large", "xl", "2.7B"], "seq_len": [128, 256, 512, 1024]},
            {**TRAINED, "preset": "2.7B", "seq_len": [128, 256, 512], "dtype": AUTOCAST},
            {**KEPT, "dtype": BOTH},
            {**KEPT, "dtype": AUTOCAST, "linear": "linear"},
            {**PASSES, "preset": ["small", "medium", "large", "xl"], "seq_len": 128, "mode": "step",
             "dtype": AUTOCAST},
            {**PASSES, "preset": "10B", "seq_len": 1024, "mode": ["inference", "forward", "step"]},
        ],
    ),
    Recordings(
        "recordings", "cs336", "passes with the memory of each tensor and the time of each module",
        options=("--warmup", "2", "--clean", "3", "--trace", "1", "--memory"),
        quick=[{**QUICK, "mode": ["inference", "step"]}, {**QUICK, "mode": "step", "dtype": AUTOCAST}],
        full=[
            {"preset": "2.7B", "seq_len": 256, "mode": ["inference", "step"]},
            {"preset": "2.7B", "seq_len": 256, "mode": "step", "dtype": AUTOCAST},
            {"preset": "small", "seq_len": 1024, "mode": "step"},
        ],
    ),
    Sweep(
        "attention", "attention", "attention alone by width and length, and by what it keeps",
        quick=[
            {**SMALL, "implementation": "naive", "seq_len": [32, 64, 128]},
            {**SMALL, "implementation": "naive", "head_width": 32, "seq_len": 128},
            {**SMALL, "implementation": ["builtin", "custom", "flash", "compiled"], "seq_len": 128},
            {**SMALL, "implementation": "naive", "seq_len": NO_ROOM},
        ],
        full=[
            {**ALONE, "implementation": "naive", "head_width": [16, 32, 64, 128],
             "seq_len": [256, 1024, 4096, 8192, 16384]},
            {**NARROW, "implementation": "naive", "seq_len": [32768, 65536]},
            {**NARROW, "implementation": ["builtin", "custom", "efficient"], "seq_len": [1024, 4096, 16384]},
            {**NARROW, "implementation": "flash", "dtype": "bf16", "seq_len": [1024, 4096, 16384]},
            {**NARROW, "implementation": "compiled", "seq_len": [4096, 16384]},
        ],
    ),
    Sweep(
        "compiled", "cs336", "models of four layers, eager and compiled",
        quick=(),  # compiled attention is there; a compiled model takes too long on a CPU
        full=[{"preset": ["small", "2.7B"], "layers": 4, "seq_len": 256, "mode": "step",
               "compile": ["off", "default"]}],
    ),
    Sweep("precision", "precision", "sums in narrow dtypes, and dtypes under autocast", quick=SUMS, full=SUMS),
)  # fmt: skip
