"""`fp32_matmul` and `attention_backend`: changes torch settings, and checks whether the script used them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepscope.recorder.fixes.change import Change
from stepscope.recorder.machine.environment import float32_matmul
from stepscope.recorder.patches import Patch, remove_all
from stepscope.recorder.precision.attention_calls import BACKENDS, SWITCHES

_UNKNOWN = "what torch chose"


class Tf32(Change):
    """Calls `torch.set_float32_matmul_precision("high")`, and blocks the script from setting "highest"."""

    nothing_seen = "no GPU was used: TF32 is a mode of its tensor cores"

    def start(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        self.handles.append(Patch(torch, "set_float32_matmul_precision", self._set))

    def _set(self, original: Callable[..., Any], precision: str) -> None:
        if precision == "highest":
            return
        self.left[f'the script says set_float32_matmul_precision("{precision}") itself'] += 1
        original(precision)

    def remove(self) -> None:
        super().remove()
        torch.set_float32_matmul_precision(self._before)

    def finish(self) -> None:
        if not torch.cuda.is_initialized():
            return
        if float32_matmul(torch.cuda.current_device()) != "tf32":
            self.left["TF32 is off: the script switched it off again, or the GPU has none"] += 1
        elif not self.left:
            self.changed["float32 products allowed to use TF32"] = 1


class AttentionBackend(Change):
    """Allows a single backend of scaled_dot_product_attention, which then runs or rejects its inputs."""

    nothing_seen = "scaled_dot_product_attention was not called outside compiled code in the first two steps"

    def start(self) -> None:
        self._wanted = {name: name == (self.value or "flash") for name in SWITCHES}
        self._before = _switches()
        _set_switches(self._wanted)
        self.handles.append(Patch(F, "scaled_dot_product_attention", self._attend))

    def _attend(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = _switches()
        if any(found[name] != self._wanted[name] for name in found):
            self.left["an attention call runs where the script sets the backend itself"] += 1
            return original(*args, **kwargs)
        _set_switches(self._before)
        try:
            before = BACKENDS.get(int(torch._fused_sdp_choice(*args, **kwargs)), _UNKNOWN)
        except (AttributeError, TypeError, RuntimeError):
            before = _UNKNOWN
        _set_switches(self._wanted)
        result = original(*args, **kwargs)
        wanted = self.value or "flash"
        if before == wanted:
            self.left[f"an attention call runs on {wanted} already"] += 1
        else:
            self.changed[f"attention calls of the first two steps on {wanted} instead of {before}"] += 1
        return result

    def use_roots(self, roots: list[nn.Module]) -> None:
        remove_all(self.handles)  # after counting, so that timed steps do not pay for it

    def remove(self) -> None:
        super().remove()
        _set_switches(self._before)


def _switches() -> dict[str, bool]:
    asked = {name: getattr(torch.backends.cuda, f"{switch}_enabled", None) for name, switch in SWITCHES.items()}
    return {name: bool(is_on()) for name, is_on in asked.items() if is_on is not None}


def _set_switches(states: dict[str, bool]) -> None:
    for name, is_on in states.items():
        enable = getattr(torch.backends.cuda, f"enable_{SWITCHES[name]}", None)
        if enable is not None:
            enable(is_on)
