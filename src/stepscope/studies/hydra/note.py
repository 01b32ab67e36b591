"""What the notes on profiling "HYDRA 100M" printed: its figures as they stand there, of a device it does not name."""

from __future__ import annotations

NOTE = "hydra-100m-notes, device not named"
PRESET = "100m"
NUM_PARAMETERS = 62_000_000
"""Of the model that the note calls 100M: its misspelt keywords set nothing."""
RUN = "compiled with max-autotune-no-cudagraphs, every second layer checkpointed"
NUM_LAYERS = 8

SHARES = {"forward": 0.35, "backward": 0.62, "optimizer": 0.03}
STEP = {"a step": 53_000_000}
BYTES = {"weights": 135e6, "activations of a layer": 645e6, "head and loss": 1.2e9, "peak": 5.4e9}
OPS = {"aten::mm": 0.36}
COPIES = {"aten::copy_": 0.19}
COPIES_FROM = "optimizer state updates and necessary backward pass copies"
COPIES_CONCLUSION = "no changes needed"
TOKENS = {"one batch": 76_000.0, "text": 31_000.0}
SHIFT = {"value shift": 20_000.0}
CONTIGUOUS = {"contiguous first": 1.056}
FIRST = {"blocks.0": 40.0}
ROUTING = {"dynamic": 0.79}
