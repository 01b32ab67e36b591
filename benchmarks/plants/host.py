"""Host-side causes, planted: for each rule a step that has it, the same step without it, and a sentence.

`PLANTS[name](device)` gives (slow_step, fixed_step, sentence); a name is a rule's, and the variant's.
`CLEAN[name](device)` gives (step, sentence) of a healthy step that must get no finding of these rules.
`small=True` makes sizes that a CPU can do.

    python benchmarks/plants/host.py              # each of them once, small, on the CPU
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], None]
Plant = tuple[Step, Step, str]


@dataclass(frozen=True)
class Size:
    num_layers: int
    width: int
    batch: int
    length: int


TINY = Size(2, 32, 2, 16)
LARGE = Size(12, 1024, 8, 1024)
"""About 20 ms of an H200, which the host is ahead of."""
NARROW = Size(24, 256, 2, 128)
"""Thousands of small kernels: the host decides."""


class Block(nn.Module):
    """Attention and a perceptron; `between` is put before each."""

    def __init__(self, width: int, between: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads = max(1, width // 64)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        if self.between is not None:
            x = self.between(x)
        batch, length, width = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Breaking(nn.Sequential):
    """Blocks in a row, the graph broken before each. A class of its own: what Dynamo makes of a function is shared by
    all who call it, and a Sequential that breaks would break every other."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            torch._dynamo.graph_break()
            x = block(x)
        return x


class Training:
    """A model, its optimizer and a batch; `step` is one step of training."""

    def __init__(
        self,
        device: torch.device,
        size: Size,
        between: Callable[[Tensor], Tensor] | None = None,
        row: type[nn.Sequential] = nn.Sequential,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model: nn.Module = row(*(Block(size.width, between) for _ in range(size.num_layers)))
        self.model.to(device)
        is_fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=is_fused)
        self.batch = torch.randn(size.batch, size.length, size.width, device=device)

    def backward(self, batch: Tensor | None = None) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.batch if batch is None else batch).float().square().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.update()


def gradient_norms(device: torch.device, small: bool = False) -> Plant:
    """The norm of each gradient read by itself."""
    training = Training(device, TINY if small else LARGE)
    gradients = [weight for weight in training.model.parameters() if weight.requires_grad]

    def slow() -> None:
        training.backward()
        sum(weight.grad.norm().item() ** 2 for weight in gradients if weight.grad is not None)
        training.update()

    def fixed() -> None:
        training.backward()
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm([weight.grad for weight in gradients])))
        training.update()

    return slow, fixed, f"The norms of {len(gradients)} gradients are read one by one with .item()."


def boolean_index(device: torch.device, small: bool = False) -> Plant:
    """Positions chosen by a mask, whose number the host has to know."""

    def chosen(x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        y = x.clone()
        y[mask] = x[mask] * 1.01
        return y

    def masked(x: Tensor) -> Tensor:
        return torch.where((x[..., 0] > 0).unsqueeze(-1), x * 1.01, x)

    size = TINY if small else Size(24, 512, 8, 512)
    slow, fixed = Training(device, size, chosen), Training(device, size, masked)
    return slow.step, fixed.step, f"Each of {size.num_layers} layers indexes with a boolean mask, twice."


def round_trip(device: torch.device, small: bool = False) -> Plant:
    """Activations clamped by the host."""

    def there_and_back(x: Tensor) -> Tensor:
        return x.cpu().clamp(-3, 3).to(x.device)

    size = TINY if small else Size(12, 512, 8, 512)
    slow = Training(device, size, there_and_back)
    fixed = Training(device, size, lambda x: x.clamp(-3, 3))
    return slow.step, fixed.step, f"Each of {size.num_layers} layers clamps its input on the CPU."


def pageable_batch(device: torch.device, small: bool = False) -> Plant:
    """A large batch from memory that is not pinned."""
    size = TINY if small else Size(4, 1024, 32, 1024)
    training = Training(device, size)
    pageable = torch.randn(size.batch, size.length, size.width)
    pinned = pageable.pin_memory() if device.type == "cuda" else pageable

    def slow() -> None:
        training.backward(pageable.to(device))
        training.update()

    def fixed() -> None:
        training.backward(pinned.to(device, non_blocking=True))
        training.update()

    return slow, fixed, f"A batch of {pageable.nbytes / 1e6:.0f} MB is copied from pageable memory."


def emptied_cache(device: torch.device, small: bool = False) -> Plant:
    """The allocator's cache given back in each step."""
    training = Training(device, TINY if small else LARGE)

    def slow() -> None:
        training.step()
        torch.cuda.empty_cache()

    return slow, training.step, "torch.cuda.empty_cache() is called after each step."


def logging(device: torch.device, small: bool = False) -> Plant:
    """A log written, and garbage collected, between steps."""
    training = Training(device, TINY if small else LARGE)
    history = {f"metric {i}": [j / 7 for j in range(10)] for i in range(100 if small else 10_000)}

    def slow() -> None:
        training.step()
        json.dumps(history)
        gc.collect()

    return slow, training.step, f"{len(history):,} metrics are made JSON and gc.collect() is called after each step."


def anomaly(device: torch.device, small: bool = False) -> Plant:
    """detect_anomaly left on."""
    training = Training(device, TINY if small else Size(12, 512, 8, 512))

    def slow() -> None:
        with torch.autograd.set_detect_anomaly(True):
            training.backward()
        training.update()

    return slow, training.step, "torch.autograd.set_detect_anomaly(True)."


def own_checks(device: torch.device, small: bool = False) -> Plant:
    """A check of one's own before each layer."""

    def checked(x: Tensor) -> Tensor:
        if torch.isnan(x).any() or torch.isinf(x).any():
            raise ValueError("not finite")
        return x

    size = TINY if small else Size(24, 512, 8, 512)
    slow, fixed = Training(device, size, checked), Training(device, size)
    return slow.step, fixed.step, f"Each of {size.num_layers} layers looks for NaN, and for infinity, in its input."


def graph_breaks(device: torch.device, small: bool = False) -> Plant:
    """A compiled model that breaks before each layer."""
    size = TINY if small else NARROW
    slow, fixed = Training(device, size, row=Breaking), Training(device, size)
    slow.model, fixed.model = torch.compile(slow.model), torch.compile(fixed.model, fullgraph=True)
    return slow.step, fixed.step, f"The graph breaks before each of {size.num_layers} layers."


def loss_read(device: torch.device, small: bool = False) -> tuple[Step, str]:
    """The loss read once, at the end of a step that the GPU bounds."""
    training = Training(device, TINY if small else LARGE)

    def step() -> None:
        loss = training.backward()
        training.update()
        loss.item()

    return step, "loss.item() once a step, after the optimizer."


PLANTS: dict[str, Callable[..., Plant]] = {
    "synchronization": gradient_norms,
    "synchronization_boolean_index": boolean_index,
    "device_round_trip": round_trip,
    "pageable_copies": pageable_batch,
    "allocator_churn": emptied_cache,
    "host_stall": logging,
    "anomaly_detection": anomaly,
    "anomaly_detection_own_checks": own_checks,
    "graph_breaks": graph_breaks,
}
CLEAN: dict[str, Callable[..., tuple[Step, str]]] = {"loss_read": loss_read}


if __name__ == "__main__":
    for name, build in PLANTS.items():
        slow, fixed, sentence = build(torch.device("cpu"), small=True)
        slow(), fixed()
        print(f"{name}: {sentence}")
    for name, build_clean in CLEAN.items():
        step, sentence = build_clean(torch.device("cpu"), small=True)
        step()
        print(f"{name} (clean): {sentence}")
