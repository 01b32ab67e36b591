"""Custom ops: one node with its own backward, so that torch.compile has no graph break and a trace shows its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep every input for the backward pass."""
    ctx.save_for_backward(*inputs)


def custom_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    setup: Callable[..., None] = save_inputs,
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
