"""Training steps with a cause planted in their lookups or their loops, each beside the same step without it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], object]
Plant = tuple[Step, Step, str]


def advanced_indexing(
    device: torch.device, small: bool = False, sizes: tuple[int, int, int] = (256, 512, 1 << 19)
) -> Plant:
    """A table of few rows looked up often: the same row again and again."""
    num_rows, width, num_indices = (8, 16, 256) if small else sizes

    def build(look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(num_rows, width, device=device))
        mix = nn.Linear(width, width, device=device)
        optimizer = torch.optim.AdamW([table, *mix.parameters()], fused=device.type == "cuda")
        index = torch.randint(num_rows, (num_indices,), device=device)

        def step() -> object:
            with torch.autocast(device.type, torch.bfloat16):
                value = mix(look_up(table, index)).float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    slow, fixed = build(lambda table, index: table[index]), build(lambda table, index: F.embedding(index, table))
    what = f"table[index], {num_indices:,} indices into {num_rows} rows; fixed = F.embedding(index, table)."
    return slow, fixed, what


def kinds_of_tokens(device: torch.device, small: bool = False) -> Plant:
    return advanced_indexing(device, small, (4, 1024, 1 << 16))


def expert_loop(device: torch.device, small: bool = False) -> Plant:
    """Experts one after the other, each with the tokens that chose it; or one grouped product for all."""
    num_experts, width, inner, num_tokens = (8, 32, 64, 128) if small else (64, 1024, 2048, 8192)
    torch.manual_seed(0)
    counts = torch.bincount(torch.randint(num_experts, (num_tokens,)), minlength=num_experts)
    sizes, offsets = counts.tolist(), counts.cumsum(0).to(device, torch.int32)

    def build(is_grouped: bool) -> Step:
        torch.manual_seed(0)
        up = nn.Parameter(torch.randn(num_experts, width, inner, device=device, dtype=torch.bfloat16) * 0.02)
        down = nn.Parameter(torch.randn(num_experts, inner, width, device=device, dtype=torch.bfloat16) * 0.02)
        optimizer = torch.optim.AdamW([up, down], fused=device.type == "cuda")
        x = torch.randn(num_tokens, width, device=device, dtype=torch.bfloat16)

        def loop() -> torch.Tensor:
            # unbind, as the backward of up[expert] would fill a gradient of all experts for each of them.
            return torch.cat([F.gelu(part @ u) @ d for part, u, d in zip(x.split(sizes), up.unbind(), down.unbind())])

        def grouped() -> torch.Tensor:
            return torch._grouped_mm(F.gelu(torch._grouped_mm(x, up, offs=offsets)), down, offs=offsets)

        def step() -> object:
            value = (grouped() if is_grouped else loop()).float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return build(False), build(True), "64 experts in a Python loop, 8,192 tokens; fixed = torch._grouped_mm."


def experts_by_mask(device: torch.device, small: bool = False) -> Plant:
    """As mixtures are often written: each expert looks for its tokens, and adds what it makes of them."""
    num_experts, width, inner, num_tokens = (8, 32, 64, 128) if small else (32, 1024, 2048, 8192)

    def build(is_grouped: bool) -> Step:
        torch.manual_seed(0)
        router = nn.Linear(width, num_experts, device=device, dtype=torch.bfloat16)
        ups = nn.ParameterList(
            torch.randn(width, inner).to(device, torch.bfloat16) * 0.02 for _ in range(num_experts)
        )
        downs = nn.ParameterList(
            torch.randn(inner, width).to(device, torch.bfloat16) * 0.02 for _ in range(num_experts)
        )
        up, down = (nn.Parameter(torch.stack([*some]).detach()) for some in (ups, downs))
        parameters = [*router.parameters(), *([up, down] if is_grouped else [*ups, *downs])]
        optimizer = torch.optim.AdamW(parameters, fused=device.type == "cuda")
        x = torch.randn(num_tokens, width, device=device, dtype=torch.bfloat16)

        def loop(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            made = torch.zeros_like(x)
            for expert in range(num_experts):
                mine = torch.where(chosen == expert)[0]
                made.index_add_(0, mine, F.gelu(x[mine] @ ups[expert]) @ downs[expert] * weights[mine, None])
            return made

        def grouped(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            order = chosen.argsort()
            offsets = torch.bincount(chosen, minlength=num_experts).cumsum(0).to(torch.int32)
            inside = F.gelu(torch._grouped_mm(x.index_select(0, order), up, offs=offsets))
            made = torch._grouped_mm(inside, down, offs=offsets) * weights.index_select(0, order)[:, None]
            return torch.zeros_like(x).index_add_(0, order, made)

        def step() -> object:
            weights, chosen = router(x).softmax(-1).max(-1)
            value = (grouped if is_grouped else loop)(weights, chosen).float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return build(False), build(True), "32 experts that look for their tokens with where(); fixed = torch._grouped_mm."


def heads_one_by_one(device: torch.device, small: bool = False) -> Plant:
    """One product a head in a list of layers; or one batched product."""
    num_heads, width, size, rows = (4, 64, 16, 32) if small else (64, 2048, 64, 512)

    def build(is_batched: bool) -> Step:
        torch.manual_seed(0)
        weights = nn.Parameter(torch.randn(num_heads, width, size, device=device, dtype=torch.bfloat16) * 0.02)
        single = nn.ParameterList(nn.Parameter(weight.detach().clone()) for weight in weights)
        parameters = [weights] if is_batched else list(single)
        optimizer = torch.optim.AdamW(parameters, fused=device.type == "cuda")
        x = torch.randn(num_heads, rows, width, device=device, dtype=torch.bfloat16)

        def step() -> object:
            made = torch.bmm(x, weights) if is_batched else torch.stack([part @ w for part, w in zip(x, single)])
            value = made.float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return build(False), build(True), "64 products of 512 × 2,048 × 64 in a list; fixed = one torch.bmm."


PLANTS: dict[str, Callable[..., Plant]] = {
    "serialized_scatter": advanced_indexing,
    "serialized_scatter_kinds": kinds_of_tokens,
    "small_gemms": expert_loop,
    "small_gemms_masked": experts_by_mask,
    "small_gemms_batched": heads_one_by_one,
}
