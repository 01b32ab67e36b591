"""Keeps our ops out of the sight of the script's modes, and our own mode below all of them.

A mode of the script (`TorchDispatchMode`, `TorchFunctionMode`) sees every op, ours too, unless it is taken off for
the time. Ours lies below the script's: whatever the order in which they end, each takes off its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

T = TypeVar("T")

without_subclasses = torch._C.DisableTorchFunctionSubclass
"""A block in which no `__torch_function__` of the script's subclasses of Tensor sees our calls."""
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

is_traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether torch.compile traces the caller. Dynamo folds it to a constant, so that compiled code is unaffected.

`torch.compiler.is_compiling()` is also true in an export, and takes two calls more.
"""

_taken_off: list[list[Any]] = []  # by each running `unseen`, the topmost mode first


def unseen(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of ours below all modes. If there are none, it may as well be called directly."""
    modes = [_pop_mode() for _ in range(num_dispatch_modes())]
    _taken_off.append(modes)
    try:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)
    finally:
        _taken_off.pop()
        for mode in reversed(modes):
            _push_mode(mode)


def out_of_sight(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of ours so that neither modes nor subclasses of Tensor see its calls."""
    if num_function_modes() or num_dispatch_modes():
        return unseen(function, *args, **kwargs)
    with without_subclasses():
        return function(*args, **kwargs)


def has_dispatch_modes() -> bool:
    """Return whether the script's ops go through a dispatch mode, also one that is taken off just now."""
    return num_dispatch_modes() > 0 or any(_taken_off)


def enter_below(mode: Any) -> None:
    """Let a dispatch mode of ours see every op, after all modes of the script."""
    if _taken_off:
        _taken_off[0].append(mode)
    else:
        above = [_pop_mode() for _ in range(num_dispatch_modes())]
        for one in (mode, *reversed(above)):
            _push_mode(one)


def leave(mode: Any) -> bool:
    """Take a mode of ours off, wherever it lies. Return False while it is handling an op: it is on no stack then."""
    for modes in _taken_off:
        if any(one is mode for one in modes):
            modes[:] = [one for one in modes if one is not mode]
            return True
    found = [_pop_mode() for _ in range(num_dispatch_modes())]
    for one in reversed(found):
        if one is not mode:
            _push_mode(one)
    return any(one is mode for one in found)


def ctc_loss_below_modes(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.ctc_loss` with the lengths as numbers, which is what torch makes of them where no mode is active.

    Under a mode it passes them on as tensors, and a GPU refuses lengths on the host. cuDNN takes tensors in any case.
    """
    given = {**dict(zip(_CTC_ARGUMENTS, args)), **kwargs}
    asked = [given[name] for name in _CTC_ARGUMENTS[:4]]
    if all(isinstance(lengths, torch.Tensor) for lengths in asked[2:]):
        is_cudnn = asked[0].is_cuda and unseen(torch._use_cudnn_ctc_loss, *asked, given.get("blank", 0))
        if not is_cudnn:
            given |= {name: given[name].tolist() for name in _CTC_ARGUMENTS[2:4]}
    return original(**given)


_CTC_ARGUMENTS = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
