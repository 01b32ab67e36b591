"""A variant and its reference with the same weights on the same batch: outputs, loss and gradients of both."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.workloads.workload import Built, Workload


def built_of(workload: Workload[Any], preset: str = "tiny", **values: Any) -> Built:
    """The workload built from a preset on the CPU, always with the same weights."""
    torch.manual_seed(0)
    return workload.build(workload.configure(preset, **values))


def results_of(built: Built, state: Any, batch: Any, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Outputs, loss where there are targets, and gradients, by name: one pass in a dtype, weights and batch given."""
    module = built.module.to(dtype)
    module.load_state_dict(state)
    inputs = {}
    for name, tensor in batch.items():
        real = tensor.is_floating_point()
        inputs[name] = tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if real else tensor
    module.zero_grad()
    if "targets" in inputs:
        outputs = module(**{name: tensor for name, tensor in inputs.items() if name != "targets"})
        loss = module(**inputs)
        loss.backward()
        results = {"outputs": outputs.detach(), "loss": loss.detach()}
    else:
        outputs = module(**inputs)
        gradient = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        outputs.backward(gradient.to(dtype))
        results = {"outputs": outputs.detach()}
    leaves = {**dict(module.named_parameters()), **inputs}
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {**results, **gradients}


def losses_of(built: Built, optimizer: Any, num_steps: int) -> list[float]:
    """The loss before each of some steps on one batch."""
    batch, losses = built.batch(), []
    for _ in range(num_steps):
        loss = built.module(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every result within `tolerance` of the wanted one's largest number."""
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        distance = (found[name].double() - right).abs().max() / right.abs().max().clamp(min=1e-30)
        assert distance <= tolerance, f"{name} is off by {distance:.2e}"
