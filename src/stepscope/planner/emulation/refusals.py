"""Rejects calls that no plan can follow, with their place in the program."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.planner.emulation.planned_tensor import users_place

ONE_DEVICE = "a plan is for one device: plan the module without it, with the batch of one device"
DENSE = "their sizes depend on data: plan with dense tensors, or measure with stepscope bench"
RAGGED = "plans do not support them: plan with padded tensors, or measure with stepscope bench"
_CALLS: tuple[tuple[Any, str, str, str], ...] = (
    (nn.DataParallel, "__init__", "torch.nn.DataParallel", ONE_DEVICE),
    (nn.parallel.DistributedDataParallel, "__init__", "DistributedDataParallel", ONE_DEVICE),
    (torch.nested, "nested_tensor", "nested tensors", RAGGED),
    (torch.nested, "as_nested_tensor", "nested tensors", RAGGED),
    (torch.nested, "nested_tensor_from_jagged", "nested tensors", RAGGED),
    (torch.nested, "narrow", "nested tensors", RAGGED),
    (torch, "_nested_tensor_from_mask", "nested tensors (enable_nested_tensor)", RAGGED),
    (torch, "sparse_coo_tensor", "sparse tensors", DENSE),
    (torch, "sparse_csr_tensor", "sparse tensors", DENSE),
    (torch.Tensor, "to_sparse", "sparse tensors", DENSE),
)


def patches() -> Iterator[Any]:
    """Yield patches that reject such calls during a plan."""
    for owner, name, what, advice in _CALLS:
        if hasattr(owner, name):
            yield mock.patch.object(owner, name, _refusing(what, advice))
    for name in ("embedding", "embedding_bag"):
        yield mock.patch.object(functional, name, _with_dense_gradient(getattr(functional, name)))


def _refusing(what: str, advice: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"{what} at {users_place()}: {advice}")

    return refuse


def _with_dense_gradient(lookup: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(lookup)

    def look_up(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        if named.get("sparse") and torch.is_grad_enabled() and named["weight"].requires_grad:
            raise UsageError(
                f"the sparse gradient of an embedding at {users_place()}: its size depends on data. Plan with "
                "sparse=False, whose gradient is as large as the weights, or measure with stepscope bench"
            )
        return lookup(*args, **kwargs)

    return look_up
