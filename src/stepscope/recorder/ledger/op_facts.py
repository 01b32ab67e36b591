"""Facts about an op that do not depend on its arguments."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.recorder.ledger.flops import has_formula, op_name

# Libraries of torch that only communicate and copy: collectives, and what FSDP2 packs around them. `symm_mem` is not
# among them: it fuses collectives with products.
_TRANSFERS = (
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "prim",
    "profiler",
)  # fmt: skip
# Copies, lookups and fills that no tag of torch marks.
_MOVES = (
    "aten._chunk_cat", "aten._foreach_copy_", "aten._foreach_zero_", "aten._local_scalar_dense", "aten._to_copy",
    "aten._unsafe_view", "aten.cat", "aten.clone", "aten.constant_pad_nd", "aten.copy_", "aten.embedding",
    "aten.fill_", "aten.flip", "aten.gather", "aten.index", "aten.index_select", "aten.repeat", "aten.roll",
    "aten.stack", "aten.zero_",
)  # fmt: skip
# Products whose FLOPs depend only on shapes that repeat in every layer.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")


class Op:
    """An op without its arguments."""

    __slots__ = (
        "decomposes", "has_formula", "is_higher_order", "is_plain_product", "is_view", "may_hide_product",
        "moves_data", "name",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.name = op_name(func)
        self.has_formula = has_formula(func)
        self.is_plain_product = self.name in _PRODUCTS
        self.is_view = getattr(func, "is_view", False)
        tags = {tag.name for tag in getattr(func, "tags", ())}
        is_view = self.is_view or not tags.isdisjoint(("view_copy", "inplace_view"))
        self.moves_data = is_view or self.name in _MOVES or _transfers_or_fills(func)
        self.may_hide_product = not self.moves_data and not tags & {"pointwise", "reduction"}
        self.is_higher_order = isinstance(func, torch._ops.HigherOrderOperator)
        # It may consist of ops that have formulas.
        self.decomposes = not self.has_formula and not self.is_higher_order and _has_decomposition(func)


def _transfers_or_fills(func: Any) -> bool:
    """Return whether an op only communicates, or fills a new tensor without reading another."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    if namespace in _TRANSFERS:
        return True
    reads = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return namespace == "aten" and (not reads or name.startswith("new_") or name.endswith("_like"))


def _has_decomposition(func: Any) -> bool:
    """Return whether an op always runs as other ops.

    Some ops have both a decomposition and kernels (`silu_backward`, `_fused_rms_norm`). Decomposed, they would use
    memory that the program does not.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if func.namespace == "prim" or any(has(func.name(), device) for device in ("CPU", "CUDA")):
        return False
    return key in func.py_kernels or has(func.name(), key)
