"""Plants for causes that show in memory from step to step, or in the shapes of experts.

Each builder takes a device and gives a slow step, the same one without the cause, and a sentence. `small=True` makes
them run on a processor. Communication, stragglers, throttling and other processes need more than one GPU, or
rights on it, and steps that differ from one another need more than the two of a trace: they have no plant here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], object]
Built = tuple[Step, Step, str]


class Experts(nn.Module):
    """A mixture of feed-forwards with as many places for each expert as the busiest one needs."""

    def __init__(self, width: int, inner: int, num_experts: int, is_even: bool) -> None:
        super().__init__()
        self.is_even = is_even
        self.router = nn.Linear(width, num_experts)
        self.first = nn.Parameter(torch.randn(num_experts, width, inner) * width**-0.5)
        self.second = nn.Parameter(torch.randn(num_experts, inner, width) * inner**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        width = tokens.shape[1]
        num_experts = self.first.shape[0]
        choices = self.router(tokens).float().softmax(-1)
        if self.is_even:  # by the token's place: a router trained on one batch falls for a few experts
            places, all_experts = (
                torch.arange(len(tokens), device=tokens.device)[:, None],
                torch.arange(num_experts, device=tokens.device),
            )
            choices = choices + ((all_experts - places) % num_experts < 2)
        else:
            choices = choices + (torch.arange(num_experts, device=tokens.device) == 0)
        weights, experts = choices.topk(2, dim=-1)
        experts = experts.flatten()
        counts = torch.bincount(experts, minlength=num_experts)
        capacity = -(-int(counts.max()) // 64) * 64
        order = experts.argsort()
        begins = counts.cumsum(0) - counts
        place = torch.arange(experts.numel(), device=tokens.device) - begins[experts[order]]
        slots = experts[order] * capacity + place
        given = tokens.new_zeros(num_experts * capacity, width).index_copy(0, slots, tokens[order // 2])
        hidden = F.gelu(torch.bmm(given.view(num_experts, capacity, width), self.first.to(tokens.dtype)))
        made = torch.bmm(hidden, self.second.to(tokens.dtype)).view(-1, width)[slots]
        scaled = made * weights.flatten()[order, None].to(made.dtype)
        return tokens + torch.zeros_like(tokens).index_add(0, order // 2, scaled)


def expert_imbalance(device: torch.device, small: bool = False) -> Built:
    """Padding to the busiest expert: every token's first choice is expert 0, against first choices that are even."""
    width, inner, num_tokens, num_layers = (32, 64, 256, 2) if small else (1024, 4096, 16384, 4)
    dtype = torch.float32 if small else torch.bfloat16

    def build(is_even: bool) -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(*(Experts(width, inner, 8, is_even) for _ in range(num_layers))).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=not small)
        tokens = torch.randn(num_tokens, width, device=device, dtype=dtype)

        def step() -> object:
            loss = model(tokens).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return build(False), build(True), "8 experts, places for the busiest: every token's first choice is expert 0."


def memory_growth(device: torch.device, small: bool = False) -> Built:
    """A list that keeps each step's loss, whose graph no backward frees."""
    width, num_rows = (32, 64) if small else (2048, 8192)

    def build(keeps: bool) -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=not small)
        rows = torch.randn(num_rows, width, device=device)
        validation: list[object] = []

        def step() -> object:
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checked = model(rows[: num_rows // 8]).square().mean()
            validation.append(checked if keeps else checked.detach())
            return checked

        return step

    return build(True), build(False), "A validation loss is kept in a list with its graph, every step."


PLANTS = {"expert_imbalance": expert_imbalance, "memory_growth": memory_growth}
