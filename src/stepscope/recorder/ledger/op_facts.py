"""Facts about an op that do not depend on its arguments."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.recorder.ledger.flops import has_formula, op_name

# Copies and lookups: one of these without a formula hides no product.
_MOVES = ("aten._to_copy", "aten.clone", "aten.copy_", "aten.embedding", "aten.detach", "aten.cat", "aten.stack")
# Products whose FLOPs depend only on shapes that repeat in every layer.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")


class Op:
    """An op without its arguments."""

    __slots__ = (
        "decomposes", "has_formula", "is_higher_order", "is_plain_product", "is_view", "may_hide_product", "name",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.name = op_name(func)
        self.has_formula = has_formula(func)
        self.is_plain_product = self.name in _PRODUCTS
        self.is_view = getattr(func, "is_view", False)
        is_elementwise = torch.Tag.pointwise in getattr(func, "tags", ())
        is_factory = self.name.startswith("aten.new_") or self.name.endswith("_like")
        self.may_hide_product = self.name not in _MOVES and not is_elementwise and not is_factory
        self.is_higher_order = isinstance(func, torch._ops.HigherOrderOperator)
        # It may consist of ops that have formulas.
        self.decomposes = not self.has_formula and not self.is_higher_order and _has_decomposition(func)


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
