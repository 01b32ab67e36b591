"""Ops with their own backward. Custom ops are one node: no graph break in torch.compile, and a name in traces."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def custom_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    setup: Callable[..., None] = lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
) -> Any:
    """Return the op `stepscope::name` of a schema such as `name(Tensor x) -> Tensor`.

    `fake` returns empty tensors of the result's shapes, `gradients(ctx, *grads)` is the backward pass.
    """
    name, _, rest = schema.partition("(")
    op = torch.library.custom_op(f"stepscope::{name}", run, mutates_args=(), schema=f"({rest}")
    op.register_fake(fake)
    if gradients is not None:
        op.register_autograd(gradients, setup_context=setup)
    return op


class GatherRows(torch.autograd.Function):
    """x[index // k]. Its gradient is gathered as well; that of index_select would be added up atomically.

    Row r of x has the entries r·k … r·k + k − 1 of `places`: where its k copies are. `exists` tells which are there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor, exists: Tensor | None, k: int) -> Tensor:
        ctx.save_for_backward(places, exists)
        ctx.k = k
        return x.index_select(0, index if k == 1 else index // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places, exists = ctx.saved_tensors
        rows = gradient.index_select(0, places)
        if exists is not None:
            rows = rows.masked_fill(~exists[:, None], 0)
        return rows if ctx.k == 1 else rows.view(-1, ctx.k, rows.shape[1]).sum(1), None, None, None, None
