"""What "FoundationTS training notes" printed: its figures as they stand there, with the device each is of."""

from __future__ import annotations

from dataclasses import dataclass

NOTE = "foundationts-training-notes"
PRESET, BATCH, LENGTH = "538m", 16, 4096
LAYERS, WIDTH = 12, 768
NUM_ACTIVE = 198_392_169


@dataclass(frozen=True)
class Line:
    """One line of its log: the last of a run."""

    device: str
    attention: str
    tokens_per_s: float
    step_ms: float
    tflops: float
    mfu_share: float
    """Of `peak_tflops`, which the author typed in."""
    peak_tflops: float
    sm_share: float
    peak_gb: float


MASKED = Line("NVIDIA H100 PCIe", "mask", 53_296, 1210.48, 126.88, 0.0759, 1671.0, 1.00, 73.78)
FLASH = Line("NVIDIA H100 PCIe", "flash", 89_583, 719.97, 213.27, 0.1276, 1671.0, 1.00, 59.66)
SXM = Line("NVIDIA H100 80GB HBM3", "flash", 134_339, 478.67, 319.82, 0.1616, 1979.0, 1.00, 59.75)

NUM_LINES_WITH_BOTH, NUM_LINES_EQUAL = 32, 32
"""Lines of its log that print hbm_util and mem_ctrl_util, and those where the two are one number."""
BLAMED = "a bunch of tiny kernel launches"
"""What its low MFU is from, in its words."""

MASKED_BACK_END, FLASH_BACK_END = "efficient", "flash"
"""What its attention ran on: it names the kernel of the first, fmha_cutlassB."""

SMALL_PRESET, SMALL_BATCH, SMALL_D_FF = "23m", 4, 1536
"""Of the command of its small model."""
SMALL_FP32_TOKENS_PER_S, SMALL_AMP_TOKENS_PER_S, SMALL_NO_CASTS_TOKENS_PER_S = 147_515, 108_780, 76_054
"""Of the small model without AMP, with it, and with it after the author took all casts out."""
SMALL_FP32_MS = 441.74
"""A step of the first: with its tokens/s that is four times the tokens of the command."""
OUT_OF_MEMORY_GIB = 79.19
"""What the device has on which 538m without AMP ran out of memory."""

LOSS_SORTED, LOSS_CAPACITY = 3.4723, 260.1877
"""At step 10 of the two ways to dispatch whose speeds are held against each other."""
SORTED_MS, CAPACITY_MS = 478.67, 441.54

NUM_CUDA_GRAPH_SIZES, RECOMPILE_LIMIT = 51, 8
