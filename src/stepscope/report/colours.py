"""Colours that people with any eyes can tell apart (Okabe and Ito's), the same thing in the same one everywhere."""

from __future__ import annotations

from stepscope.report.parts import Series

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f7f7f")
"""In the order in which they are given away."""
GREY = "#9a9a9a"
NAMED = {
    # phases
    "data": "#e69f00", "forward": "#0072b2", "backward": "#009e73", "optimizer": "#cc79a7", "other": GREY,
    "idle": "#d0d0d0", "unattributed": "#b0b0b0",
    # owners of memory
    "parameter": "#0072b2", "gradient": "#009e73", "optimizer_state": "#cc79a7", "activation": "#e69f00",
    "autocast_weight_cast": "#56b4e9", "input": "#b8a800", "temporary": "#d55e00", "buffer": "#8c6bb1",
    "workspace": "#a6761d", "left_alive": "#7a1f1f", "before the window": "#5d3a9b",
    # classes of kernels
    "gemm": "#0072b2", "attention_forward": "#009e73", "attention_backward": "#00664a", "softmax": "#8fd3bd",
    "norm": "#cc79a7", "elementwise": "#e69f00", "reduction": "#d55e00", "copy_cast": "#56b4e9",
    "embedding_index": "#8c6bb1", "communication": "#b8a800", "convolution": "#004c80", "fft": "#5d3a9b",
    "sort_scan": "#a6761d", "memset_memcpy": "#a6cee3", "triton_fused": "#f0c05a",
}  # fmt: skip


def colour_of(name: str | None, number: int) -> str:
    """Of something by its name, else the next of the palette."""
    return NAMED.get(name or "", PALETTE[number % len(PALETTE)])


def colours_of(series: tuple[Series, ...]) -> list[str]:
    """One a series: a name's own, and of the others none that is taken already."""
    taken = {NAMED[one.colour] for one in series if one.colour in NAMED}
    free = iter([colour for colour in PALETTE if colour not in taken] + list(PALETTE) * len(series))
    return [NAMED[one.colour] if one.colour in NAMED else next(free) for one in series]
