"""Every call of scaled dot-product attention in a window: what it was given, which back end torch chose, and why not
another.

What torch chooses, and its reasons, can be asked only in the process, with the tensors at hand. A kernel of ours
stands before `aten::scaled_dot_product_attention` while the window is open: after autocast, before autograd, so it
sees what torch decides from. It asks once for each different call and hands every call on unchanged.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from stepscope.recorder.frames import caller

BACK_ENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
"""What `torch._fused_sdp_choice` answers."""
FUSED = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
ON_CPU = ("flash",)
"""Fused back ends that torch has on a CPU."""
MAX_DIFFERENT = 200
"""Calls of different shapes, modules and places that are kept."""

_HEADINGS = {
    "flash": re.compile(r"(?i)^flash.*not used because"),
    "efficient": re.compile(r"(?i)^mem\w*[ -]efficient.*not used because"),
    "cudnn": re.compile(r"(?i)^cudnn.*not used because"),
}
_ORIGIN = re.compile(r"\s*\(Triggered internally at .*\)\s*$", re.DOTALL)


class AttentionCalls:
    """Sees calls from `start()` to `stop()`; `module` tells where the program is."""

    def __init__(self, module: Callable[[], str | None] = lambda: None) -> None:
        self._module = module
        self._library: Any = None
        self._entries: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._asked: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.num_dropped = 0
        self.error: str | None = None
        """The first thing that went wrong while we looked: never the end of a training run."""

    def start(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for key in ("AutogradCPU", "AutogradCUDA"):
            self._library.impl("scaled_dot_product_attention", self._call, key)

    def stop(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def table(self) -> list[dict[str, Any]]:
        """The different calls, in the order in which they came first (docs/recording.md)."""
        return list(self._entries.values())

    def _call(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        if type(query) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
            try:
                self._look(query, key, value, attn_mask, dropout_p, is_causal, options)
            except Exception as error:
                self.error = self.error or f"{type(error).__name__}: {error}"
        attend = torch.ops.aten.scaled_dot_product_attention.default
        return attend.decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)

    def _look(
        self, query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, options: dict[str, Any]
    ) -> None:
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        given = {
            "device": query.device.type,
            "dtype": str(query.dtype).removeprefix("torch."),
            "query": list(query.shape),
            "key": list(key.shape),
            "value": list(value.shape),
            "mask": None if mask is None else list(mask.shape),
            "mask_dtype": None if mask is None else str(mask.dtype).removeprefix("torch."),
            "dropout": dropout,
            "is_causal": is_causal,
            "enable_gqa": bool(options.get("enable_gqa", False)),
            "needs_gradient": needs_gradient,
        }
        strides = tuple(tuple(t.stride()) for t in (query, key, value))
        switched_off = [name for name in ("flash", "efficient", "cudnn", "math") if not _is_enabled(name)]
        signature = (repr(given), strides, tuple(switched_off))
        where = (signature, self._module(), caller())
        entry = self._entries.get(where)
        if entry is None:
            if len(self._entries) >= MAX_DIFFERENT:
                self.num_dropped += 1
                return
            if signature not in self._asked:
                arguments = (query, key, value, mask, dropout, is_causal)
                self._asked[signature] = ask(arguments, options)
            entry = self._entries[where] = {
                **given,
                "module": where[1],
                "caller": where[2],
                "num_calls": 0,
                "switched_off": switched_off,
                **self._asked[signature],
            }
        entry["num_calls"] += 1


def ask(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What torch chooses for a call (`backend`), and of each fused back end that it `refused` what it says.

    `refused` has no entry for a back end that can run; an empty list where torch refuses and does not say why.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as quiet:
        quiet.enter_context(_disable_current_modes())  # these are no ops of the program's
        caught = quiet.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        try:
            backend = BACK_ENDS.get(int(torch._fused_sdp_choice(*arguments, **options)), "unknown")
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            backend = "none"
        refused = {}
        for name in ON_CPU if arguments[0].device.type == "cpu" else FUSED:
            caught.clear()
            if not _can_run(name, arguments, options):
                refused[name] = reasons(name, [str(warning.message) for warning in caught])
    return {"backend": backend, "refused": refused}


def reasons(name: str, messages: list[str]) -> list[str]:
    """Of what torch warns of when no back end can run, what it says of one.

    >>> reasons("flash", ["CuDNN attention kernel not used because:", "Not here. (Triggered internally at x)",
    ...                   "Flash attention kernel not used because:", "Flash Attention does not support a mask."])
    ['Flash Attention does not support a mask.']
    """
    found: list[str] = []
    about = None
    for message in messages:
        text = " ".join(_ORIGIN.sub("", message).split())
        heading = next((other for other, pattern in _HEADINGS.items() if pattern.match(text)), None)
        if heading is not None:
            about = heading
        elif about == name and text not in found:
            found.append(text)
    return found


def _can_run(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether torch would take this back end if it were the only one allowed; it warns of why not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, FUSED[name], None)
    if backend is None:  # a torch that has no such back end
        return False
    with sdpa_kernel([backend]):
        try:
            return BACK_ENDS.get(int(torch._fused_sdp_choice(*arguments, **options))) == name
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            return False


def _is_enabled(name: str) -> bool:
    switch = {"efficient": "mem_efficient_sdp_enabled"}.get(name, f"{name}_sdp_enabled")
    return bool(getattr(torch.backends.cuda, switch, lambda: True)())
