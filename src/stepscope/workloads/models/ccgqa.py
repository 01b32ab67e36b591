"""Compressed convolutional grouped-query attention of hydra, at a quarter of the model's width."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.workloads.models.layers import rope

GroupedQueries = Literal["native", "repeated"]


class CausalConvs(nn.Module):
    """Two causal convolutions over time with three taps: one within each head, one across channels. No bias."""

    TAPS = 3

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.within_heads = nn.Conv1d(channels, channels, self.TAPS, groups=heads, bias=False)
        self.across_heads = nn.Conv1d(channels, channels, self.TAPS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x [batch, channels, length]."""
        # One padding serves both: without biases, zeros stay zeros in the first convolution. It also replaces the
        # copy that a convolution makes of a transposed slice.
        padded = functional.pad(x, (2 * (self.TAPS - 1), 0))
        return self.across_heads(self.within_heads(padded))


def value_shift(v: Tensor) -> Tensor:
    """Return v [batch, length, width] with the second half of its channels shifted by one token, starting with 0."""
    now, before = v.chunk(2, dim=-1)
    return torch.cat((now, functional.pad(before, (0, 0, 1, -1))), dim=-1)


class CCGQA(nn.Module):
    """Attention in a latent of width dim ÷ 4, with causal convolutions on q and k and a shifted value."""

    def __init__(self, dim: int, heads: int, kv_heads: int, gqa: GroupedQueries) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.gqa = heads, kv_heads, gqa
        self.latent = dim // 4
        self.head_width = self.latent // heads
        self.kv_width = kv_heads * self.head_width
        self.qkv = nn.Linear(dim, self.latent + 2 * self.kv_width, bias=False)
        self.q_convs = CausalConvs(self.latent, heads)
        self.k_convs = CausalConvs(self.kv_width, kv_heads)
        # q·k of two independent unit vectors has standard deviation 1 ÷ √head_width.
        self.temperature = nn.Parameter(torch.full((1,), self.head_width**0.5))
        self.out = nn.Linear(self.latent, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over x [batch, length, dim]; cos and sin [length, head_width ÷ 2] are the RoPE tables."""
        q_before, k_before, v = self.qkv(x).split((self.latent, self.kv_width, self.kv_width), dim=-1)
        q = self._convolved(self.q_convs, q_before, self.heads)
        k = self._convolved(self.k_convs, k_before, self.kv_heads)
        q = q + 0.5 * self._mean_of_heads(k_before, self.kv_heads)
        k = k + 0.5 * self._mean_of_heads(q_before, self.heads)
        # Norm, temperature and rotation in float32 or wider; rounded once, before attention.
        q_wide = functional.normalize(q.to(cos.dtype), dim=-1)
        k_wide = functional.normalize(k.to(cos.dtype), dim=-1) * self.temperature.to(cos.dtype)
        q, k = rope(q_wide, cos, sin).to(v.dtype), rope(k_wide, cos, sin).to(v.dtype)
        v = value_shift(v).unflatten(-1, (self.kv_heads, self.head_width)).transpose(1, 2)
        if self.gqa == "repeated":
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1.0, enable_gqa=self.gqa == "native"
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _convolved(self, convs: CausalConvs, x: Tensor, heads: int) -> Tensor:
        """Convolve x [batch, length, channels] over time and return [batch, heads, length, head_width]."""
        return convs(x.transpose(1, 2)).unflatten(1, (heads, self.head_width)).transpose(2, 3)

    def _mean_of_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return the mean over heads of x [batch, length, channels], as [batch, 1, length, head_width]."""
        return x.unflatten(-1, (heads, self.head_width)).mean(dim=2).unsqueeze(1)
