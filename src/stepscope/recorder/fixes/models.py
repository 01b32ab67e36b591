"""Fixes of a model's layout and attention, applied once the script's root modules are known."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepscope.recorder.fixes.changes import Change
from stepscope.recorder.model import replace_call
from stepscope.recorder.patches import Around

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


class ChannelsLast(Change):
    """Converts modules with 2-D convolutions, their images and their optimizer states to channels last."""

    nothing_seen = "no module was called from outside compiled code"

    def start(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.handles.append(Around(torch.optim.Optimizer, "__init__", self._made))

    def _made(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._optimizers.add(optimizer)
        return original(optimizer, *args, **kwargs)

    def use_roots(self, roots: list[nn.Module]) -> None:
        for root in roots:
            name = type(root).__name__
            weights = [each.weight for each in root.modules() if isinstance(each, _CONVOLUTIONS)]
            if not weights:
                self.left[f"{name} has no 2-D convolution"] += 1
            elif all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights):
                self.left[f"{name} is channels last already"] += 1
            else:
                self.changed[f"convolutions of {name} channels last"] += len(weights)
                if not self.only_looks:
                    root.to(memory_format=torch.channels_last)
                    replace_call(root, _with_images)
        if self.changed and not self.only_looks:
            for optimizer in self._optimizers:
                _convert_states(optimizer)


def _convert_states(optimizer: torch.optim.Optimizer) -> None:
    """Give states the layout of their parameters: fused optimizers refuse any other."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _with_images(call: Callable[..., Any]) -> Callable[..., Any]:
    def converted(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*map(converted, args), **{name: converted(value) for name, value in kwargs.items()})

    return forward


class FusedAttention(Change):
    """Switches a model's own attention to `scaled_dot_product_attention`: Transformers' switch, or timm's."""

    nothing_seen = "no module was called from outside compiled code"

    def use_roots(self, roots: list[nn.Module]) -> None:
        for root in roots:
            before = self.changed.total() + self.left.total()
            models = [each for each in root.modules() if hasattr(each, "set_attn_implementation")]
            if models:
                self._switch(models[0])
            for module in root.modules():
                if getattr(module, "fused_attn", None) is False:
                    self.changed[f"{type(module).__name__} with fused_attn=True"] += 1
                    if not self.only_looks:
                        module.fused_attn = True
            if self.changed.total() + self.left.total() == before:
                self.left[f"{type(root).__name__} has no switch for its attention"] += 1

    def _switch(self, model: Any) -> None:
        name, now = type(model).__name__, getattr(model.config, "_attn_implementation", None)
        if now != "eager":
            self.left[f"{name} uses {now} attention already"] += 1
            return
        if not self.only_looks:
            try:
                model.set_attn_implementation("sdpa")
            except (ValueError, ImportError) as error:
                self.left[f"{name} refused sdpa: {str(error).splitlines()[0]}"] += 1
                return
        self.changed[f"{name} with sdpa attention instead of {now}"] += 1


ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}  # half a unit in the last place


class Rounding(Change):
    """Moves weights by up to half a unit in the last place before each forward: what rounding does to the losses.

    This is not a fix: `stepscope improve` compares it with changes of precision or of the order of sums.
    """

    nothing_seen = "no module was called from outside compiled code"

    def use_roots(self, roots: list[nn.Module]) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}  # the script's own stays as it is
        for root in roots:
            replace_call(root, lambda call, root=root: self._rounded(call, root))  # type: ignore[misc]  # a default
            self.changed[f"{type(root).__name__} with rounded weights"] += 1

    def _rounded(self, call: Callable[..., Any], root: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if root.training and torch.is_grad_enabled():
                with torch.no_grad():
                    for parameter in root.parameters():
                        self._move(parameter)
            return call(*args, **kwargs)

        return forward

    def _move(self, parameter: torch.Tensor) -> None:
        if parameter.is_floating_point() and parameter.requires_grad:
            device = parameter.device
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(0)
            noise = torch.empty_like(parameter).uniform_(-1, 1, generator=self._generators[device])
            parameter.mul_(noise.mul_(ROUNDING[self.value or "fp32"]).add_(1))
