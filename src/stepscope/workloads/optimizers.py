"""The optimizers of a training step, by their names on the command line."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from stepscope.errors import UsageError


class HandwrittenAdamW(torch.optim.Optimizer):
    """AdamW as a plain Python loop over the parameters, with a dozen small ops per parameter.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2. Defaults and results equal
    torch.optim.AdamW.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and return the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, (beta1, beta2), state = parameter.grad, group["betas"], self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
        state["step"] += 1
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state["mean"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean = state["mean"] / (1 - beta1 ** state["step"])
        square = state["square"] / (1 - beta2 ** state["step"])
        parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "handwritten": HandwrittenAdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}  # adamw: torch's default (foreach on a GPU); fused: one kernel for many parameters; handwritten: a Python loop


def make_optimizer(name: str, parameters: Iterable[Any]) -> Any:
    if name not in OPTIMIZERS:
        raise UsageError(f"Unknown optimizer '{name}'. Choose from {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[name](parameters)
