"""Every scaled dot-product attention call of a window: its arguments, the backend torch chose, and why not another.

Only the running process, with the tensors at hand, can ask torch for its choice and its reasons. While the window is
open, a kernel in front of `aten::scaled_dot_product_attention` (after autocast, before autograd) sees what torch
decides from. It asks once per distinct call and passes every call on unchanged.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from stepscope.recorder.frames import caller
from stepscope.recorder.modes import unseen
from stepscope.recorder.wall import caught_warnings, pass_on

BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
"""The return values of `torch._fused_sdp_choice`."""
FUSED = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
ON_CPU = ("flash",)  # the fused backends that torch has on a CPU
SWITCHES = {"flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp", "math": "math_sdp"}
"""The names in `torch.backends.cuda` that enable each backend."""
MAX_DIFFERENT = 200  # distinct shapes, modules and places that are recorded

_NAMES = {"flash": "flash", "efficient": r"mem\w*[ -]efficient", "cudnn": "cudnn"}  # as torch writes them
_HEADINGS = {name: re.compile(rf"(?i)^{written}.*not used because") for name, written in _NAMES.items()}
_ORIGIN = re.compile(r"\s*\(Triggered internally at .*\)\s*$", re.DOTALL)


class AttentionCalls:
    """Observes calls from `start()` to `stop()`. `module` returns the module that is running."""

    def __init__(self, module: Callable[[], str | None] = lambda: None) -> None:
        self._module = module
        self._library: Any = None
        self._entries: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._asked: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.num_dropped = 0
        self.error: str | None = None  # the first error of the observer, which must not end a training run

    def start(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for key in ("AutogradCPU", "AutogradCUDA"):
            self._library.impl("scaled_dot_product_attention", self._call, key)

    def stop(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def table(self) -> list[dict[str, Any]]:
        """Return the distinct calls, in order of first appearance (docs/recording.md)."""
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
                pass_on(error)
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
        cuda = torch.backends.cuda
        switched_off = [name for name, s in SWITCHES.items() if not getattr(cuda, f"{s}_enabled", lambda: True)()]
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
    """Return the `backend` that torch chooses for a call, and its reasons for each fused backend that it `refused`.

    A backend that can run is not in `refused`. The list is empty if torch refuses without a reason.
    """
    return unseen(_ask, arguments, options)  # these are not the program's ops


def _ask(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    with caught_warnings() as caught:
        backend = _choice(arguments, options)
        refused = {}
        for name in ON_CPU if arguments[0].device.type == "cpu" else FUSED:
            caught.clear()
            if not _can_run(name, arguments, options):
                refused[name] = reasons(name, [str(warning.message) for warning in caught])
    return {"backend": backend, "refused": refused}


def reasons(name: str, messages: list[str]) -> list[str]:
    """Return the reasons that torch's warnings give for one backend.

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
    """Return whether torch would use this backend if no other were allowed. If not, torch warns with the reason."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, FUSED[name], None)
    if backend is None:  # this torch has no such backend
        return False
    with sdpa_kernel([backend]):
        return _choice(arguments, options) == name


def _choice(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    try:
        return BACKENDS.get(int(torch._fused_sdp_choice(*arguments, **options)), "unknown")
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return "none"
