"""The class of every GPU kernel: GEMM, attention, norm, copy, and so on.

An ATen op decides for all kernels it launches: split-K reductions under `aten::mm` are `gemm`, GEMMs inside a
convolution are `convolution`, sorts of an embedding's backward are `embedding_index`. For any other op (custom,
autograd function), the kernel's name comes first. A fused kernel has the class of its slowest op.

Conventions: fills are `memset_memcpy`; pooling and losses that sum are `reduction`; cross-entropy is `softmax`;
`_foreach_` arithmetic is `optimizer`; rotary embeddings are `elementwise`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from stepscope.analysis.kernels.kernel_name_tables import KERNEL_RULES, OP_CLASSES, OP_WORDS, VIEWS, WORDS, Rules

if TYPE_CHECKING:
    import polars as pl

KERNEL_CLASSES: tuple[str, ...] = (
    "gemm", "attention_forward", "attention_backward", "softmax", "norm", "elementwise", "reduction", "copy_cast",
    "embedding_index", "optimizer", "communication", "convolution", "fft", "sort_scan", "memset_memcpy",
    "triton_fused", "other",
)  # fmt: skip
"""`triton_fused` is an Inductor kernel whose name does not list its ops; `other` is unclassified."""

UNCLASSIFIED = "other"

_LIBRARY_WORK = frozenset({"gemm", "attention_forward", "attention_backward", "convolution"})
_MOVES = frozenset({"copy_cast", "memset_memcpy"})
_PLAIN = frozenset({"elementwise", "reduction"})
# Ops that are not ATen's but own all kernels they launch.
_PARTS = {
    "attention_forward": frozenset({"gemm", "softmax"}),
    "attention_backward": frozenset({"gemm", "softmax"}),
    "convolution": frozenset({"gemm"}),
    "embedding_index": frozenset({"sort_scan"}),
}

_INDUCTOR = re.compile(
    r"(?:^|_)triton_(poi|red|per|tem|for|spl|unk|mix)_fused(?:_(.*?))??(?:_\d+)?(?:_\d[0-9dec]*)?$"
)
_INDUCTOR_UNNAMED = re.compile(r"^triton_(?:_?\d[0-9dec]*)?$")
_ATEN = re.compile(r"^(?:aten|prims)(?:::|\.)(\w+)")
_NODE = re.compile(r"^(?:autograd::engine::evaluate_function: )?(\w+?)Backward\d+$")
# Types in template arguments do not identify a kernel.
_TYPES = re.compile(r"cutlass::\w+_t\b|\(anonymous namespace\)::|\bfbgemm(?:_gpu)?::")
_PLAIN_NAME = re.compile(r"^\w+$")
_KNOWN_OPS = frozenset(OP_CLASSES) | VIEWS
_MOST_WORDS = max(op.count("_") + 1 for op in _KNOWN_OPS)


@lru_cache(maxsize=65536)
def classify(kernel_name: str, op_name: str | None, kind: str = "kernel") -> str:
    """Return a kernel's class, one of `KERNEL_CLASSES`; `op_name` is the innermost op that launched it.

    >>> classify("nvjet_sm90_tst_128x128_64x6_1x2_h_bz_splitK_NTT", "aten::mm")
    'gemm'
    >>> classify("volta_sgemm_64x64_nt", "aten::cudnn_convolution")
    'convolution'
    >>> classify("triton_per_fused__to_copy_native_layer_norm_3", None)
    'norm'
    >>> classify("Memset (Device)", "aten::mm", "memset")
    'memset_memcpy'
    """
    if kind != "kernel":
        return "memset_memcpy"
    if (fused := _inductor_class(kernel_name, op_name)) is not None:
        return fused
    by_name = _class_of_name(kernel_name)
    if by_name == "communication":
        return by_name
    by_op, is_aten = _class_of_op(op_name)
    if by_op is None or by_name is None:
        return by_name or by_op or UNCLASSIFIED
    if is_aten:
        # Copies, casts and fills help any op; bias gradients and expanded biases are plain kernels of a library op.
        helps = by_name in _MOVES or (by_name in _PLAIN and by_op in _LIBRARY_WORK)
        return by_name if helps else by_op
    return by_op if by_name in _PARTS.get(by_op, ()) else by_name


@lru_cache(maxsize=65536)
def fused_ops(kernel_name: str) -> tuple[str, ...]:
    """Return the ops an Inductor kernel fuses, in the order of its name; empty for other kernels.

    Underscores join both ops and the words of an op, so the longest known op is matched first.

    >>> fused_ops("triton_poi_fused__to_copy_mul_silu_silu_backward_view_5")
    ('_to_copy', 'mul', 'silu', 'silu_backward', 'view')
    """
    found = _INDUCTOR.search(kernel_name)
    if found is None or not found[2]:
        return ()
    words, ops, start = found[2].split("_"), [], 0
    while start < len(words):
        for length in range(min(_MOST_WORDS, len(words) - start), 0, -1):
            op = "_".join(words[start : start + length])
            if op in _KNOWN_OPS or length == 1:
                break
        if op:
            ops.append(op)
        start += length
    return tuple(ops)


def classify_kernels(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with a column `class`, from `name`, `op` (null when unlinked) and `kind`.

    >>> import polars as pl
    >>> frame = pl.DataFrame({"name": ["attn_fwd"], "op": ["aten::_flash_attention_forward"], "kind": ["kernel"]})
    >>> classify_kernels(frame)["class"].to_list()
    ['attention_forward']
    """
    import polars as pl  # training machines classify by name and have no Polars

    from stepscope.analysis.structure.nesting import with_answers

    def answer(name: str | None, op: str | None, kind: str | None) -> tuple[str]:
        return (classify(name or "", op, kind or "kernel"),)

    return with_answers(kernels, ["name", "op", "kind"], answer, {"class": pl.Enum(KERNEL_CLASSES)})


def _first(rules: Rules, text: str) -> str | None:
    text = text.lower()
    return next((name for name, pattern in rules if re.search(pattern, text)), None)


def _class_of_name(kernel_name: str) -> str | None:
    name = _TYPES.sub("", kernel_name)
    found = _first(KERNEL_RULES, name)
    if found is None and _PLAIN_NAME.match(name):
        words = [word for word in name.lower().split("_") if word]
        return next((found for found, rule in WORDS if any(re.fullmatch(rule, word) for word in words)), None)
    return found


def _class_of_op(op_name: str | None) -> tuple[str | None, bool]:
    """Return an op's class, and whether it is ATen's, whose names are reliable."""
    if not op_name:
        return None, False
    aten = _ATEN.match(op_name)
    if aten:
        base = aten[1].rstrip("_") if not aten[1].startswith("__") else aten[1]
        return OP_CLASSES.get(base) or _first(OP_WORDS, base), True
    node = _NODE.match(op_name)
    if node:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node[1]).lower()
        known = (OP_CLASSES.get(name) for name in (f"{snake}_backward", f"_{snake}_backward", snake, f"_{snake}"))
        return next(filter(None, known), None), False
    return _first(OP_WORDS, op_name), False


def _inductor_class(kernel_name: str, op_name: str | None) -> str | None:
    """Return the class of an Inductor kernel, None for others.

    Before torch 2.6, every kernel was called `triton_` and only the launching op had the descriptive name.
    """
    for name in (kernel_name, op_name or ""):
        found = _INDUCTOR.search(name)
        if found:
            return _class_of_fused(found[1], fused_ops(name))
        if name == kernel_name and not _INDUCTOR_UNNAMED.match(name):
            return None
    return "triton_fused"


def _class_of_fused(category: str, ops: Iterable[str]) -> str:
    names = set(ops)
    if not names and category in ("poi", "for", "unk"):
        return "triton_fused"
    classes = {OP_CLASSES.get(op, "elementwise") for op in names - VIEWS}
    if category == "tem":
        order: tuple[str, ...] = ("attention_backward", "attention_forward", "convolution", "gemm")
        return next((name for name in order if name in classes), "triton_fused")
    # Decomposed, a norm is a mean (or variance) and rsqrt; RMS norm's gradient has neither.
    is_norm = "rsqrt" in names and bool(names & {"mean", "var", "var_mean"})
    if is_norm or ({"pow", "mul", "sum", "div", "expand"} <= names and not names & {"sub", "exp"}):
        classes.add("norm")
    if {"exp", "sub", "sum"} <= names and names & {"amax", "max"}:
        classes.add("softmax")
    if len(names & {"lerp", "addcmul", "addcdiv"}) >= 2:
        classes.add("optimizer")
    if category in ("poi", "for"):
        # In pointwise kernels, reductions are unrolled, and copies or fills count only without arithmetic.
        if classes & {"reduction", "fft"}:
            classes.add("elementwise")
        if classes & (_LIBRARY_WORK | {"sort_scan"}) or not classes:
            # The kernel lays out the op's input or adds its bias; with only views, it copies.
            classes.add("elementwise" if names & {"addmm", "baddbmm"} else "copy_cast")
        order = ("norm", "softmax", "optimizer", "embedding_index", "elementwise", "copy_cast", "memset_memcpy")
        return next((name for name in order if name in classes), "elementwise")
    order = ("norm", "softmax", "sort_scan", "attention_backward", "attention_forward", "gemm", "reduction")
    return next((name for name in (*order, "embedding_index") if name in classes), "reduction")
