"""Fixes that are settings of torch: made before the script runs, and kept if the script sets them back."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepscope.recorder.fixes import ALLOCATOR_VARIABLES, EXPANDABLE
from stepscope.recorder.fixes.changes import Change
from stepscope.recorder.machine.environment import float32_matmul
from stepscope.recorder.patches import Around, remove_all
from stepscope.recorder.precision.attention_calls import BACKENDS, SWITCHES

_UNKNOWN = "what torch chose"


class Tf32(Change):
    """Calls `torch.set_float32_matmul_precision("high")`, and blocks the script from setting "highest"."""

    nothing_seen = "no GPU was used: TF32 is a mode of its tensor cores"

    def start(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        if self.only_looks:
            return
        torch.set_float32_matmul_precision("high")
        self.handles.append(Around(torch, "set_float32_matmul_precision", self._set))

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
        if self.only_looks:
            is_on = float32_matmul(torch.cuda.current_device()) == "tf32"
            counts = self.left if is_on else self.changed
            counts["float32 products use TF32 already" if is_on else "float32 products could use TF32"] += 1
        elif float32_matmul(torch.cuda.current_device()) != "tf32":
            self.left["TF32 is off: the script switched it off again, or the GPU has none"] += 1
        elif not self.left:
            self.changed["float32 products allowed to use TF32"] = 1


class AttentionBackend(Change):
    """Allows a single backend of scaled_dot_product_attention, which then runs or rejects its inputs."""

    nothing_seen = "scaled_dot_product_attention was not called outside compiled code in the first two steps"

    def start(self) -> None:
        self._wanted = {name: name == (self.value or "flash") for name in SWITCHES}
        self._before = _switches()
        if self.only_looks:
            self._wanted = self._before
        _set_switches(self._wanted)
        self.handles.append(Around(F, "scaled_dot_product_attention", self._attend))

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


class CudnnBenchmark(Change):
    """Sets `torch.backends.cudnn.benchmark`, so that cuDNN tries its algorithms for each shape."""

    nothing_seen = "no convolution ran on a GPU"

    def start(self) -> None:
        self._before = torch.backends.cudnn.benchmark
        if not self.only_looks:
            torch.backends.cudnn.benchmark = True

    def use_roots(self, roots: list[nn.Module]) -> None:
        kinds = (nn.modules.conv._ConvNd, nn.RNNBase)
        for root in roots:
            num = sum(isinstance(each, kinds) and next(each.parameters()).is_cuda for each in root.modules())
            if num and self._before:
                self.left["cuDNN tries its algorithms already"] += 1
            elif num and torch.backends.cudnn.benchmark is self.only_looks:
                self.left["the script sets torch.backends.cudnn.benchmark itself"] += 1
            elif num:
                self.changed[f"convolutions of {type(root).__name__} whose algorithms cuDNN tries"] += num

    def remove(self) -> None:
        super().remove()
        torch.backends.cudnn.benchmark = self._before


class ExpandableSegments(Change):
    """Checks that the allocator's variable, set before torch was imported, is still there."""

    nothing_seen = "no GPU was used"

    def start(self) -> None:
        self._given = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}

    def finish(self) -> None:
        if not torch.cuda.is_initialized():
            return
        if self._given if self.only_looks else EXPANDABLE not in self._given.values():
            self.left[f"the environment sets {' '.join(map('='.join, self._given.items()))}"] += 1
        else:
            self.changed["allocator with expandable segments"] = 1


class Threads(Change):
    """Sets the number of threads of CPU ops, also if the script sets another one."""

    nothing_seen = "no module was called from outside compiled code"

    def start(self) -> None:
        self._before = self._theirs = torch.get_num_threads()
        self._pid = os.getpid()
        is_set = any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._is_asked = self.value is not None  # else more threads are meant
        self._wanted = int(self.value or (cores if is_set else self._before))
        self.handles.append(Around(torch, "set_num_threads", self._set))
        if not self.only_looks:
            torch.set_num_threads(self._wanted)
            self._theirs = self._before

    def _set(self, original: Callable[..., Any], number: int) -> None:
        if os.getpid() == self._pid:  # a DataLoader's worker sets its own
            self._theirs = number
            number = number if self.only_looks else self._wanted
        original(number)

    def use_roots(self, roots: list[nn.Module]) -> None:
        if any(parameter.is_cuda for root in roots for parameter in root.parameters()):
            self.left["the model is on a GPU"] += 1
        elif self._theirs == self._wanted or (self._theirs > self._wanted and not self._is_asked):
            self.left[f"torch uses {self._theirs} threads already"] += 1
        else:
            self.value = str(self._wanted)
            self.changed[f"torch uses {self._wanted} threads instead of {self._theirs}"] = 1

    def remove(self) -> None:
        super().remove()
        torch.set_num_threads(self._before)
