"""Named colors: the same thing has the same color everywhere, distinct to color-blind eyes too.

The first six are Okabe and Ito's. A test checks how far the others are from them and from one another.
"""

GREY = "#c4c4c4"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#400000", GREY)
"""In the order in which charts use them."""
PHASES = {
    "data": "#e69f00", "forward": "#0072b2", "backward": "#009e73", "optimizer": "#cc79a7", "other": GREY,
    "idle": "#e0e0c0", "unattributed": "#406060",
}  # fmt: skip
OWNERS = {
    "parameter": "#0072b2", "gradient": "#009e73", "optimizer_state": "#cc79a7", "activation": "#e69f00",
    "autocast_weight_cast": "#56b4e9", "temporary": "#d55e00", "input": "#e0e080", "buffer": "#204060",
    "workspace": "#406060", "left_alive": "#400000", "before the window": "#0000c0", "other": GREY,
}  # fmt: skip
CLASSES = {
    "gemm": "#0072b2", "attention_forward": "#009e73", "attention_backward": "#406040", "softmax": "#60c080",
    "norm": "#e0e080", "elementwise": "#e69f00", "reduction": "#d55e00", "copy_cast": "#56b4e9",
    "embedding_index": "#0000c0", "optimizer": "#cc79a7", "communication": "#400000", "convolution": "#204060",
    "fft": "#000040", "sort_scan": "#a02000", "memset_memcpy": "#e0e0c0", "triton_fused": "#406060", "other": GREY,
}  # fmt: skip
NAMED = PHASES | OWNERS | CLASSES
