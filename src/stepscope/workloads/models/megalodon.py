"""Megalodon: complex moving averages and gated attention within chunks; decoding keeps a small state."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.models import layers
from stepscope.workloads.ops import ema as moving_average
from stepscope.workloads.ops.ema import forward_flops as ema_flops
from stepscope.workloads.workload import Built, Workload, knob

EPS = 1e-5
INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class MegalodonConfig:
    """Embedding → layers × [y = x + attention(x); x + FFN(y)] → timestep norm → the embedding again as head."""

    vocab: int = knob(32_000, "vocabulary size; embedding and head share weights")
    width: int = knob(1024, "width of the residual stream")
    layers: int = knob(12, "blocks")
    heads: int = knob(1, "attention heads; z_width and value_width must be multiples")
    z_width: int = knob(256, "width of queries and keys over all heads")
    value_width: int = knob(2048, "width of values and their gate over all heads")
    ffn_width: int = knob(2560, "hidden width of the feed-forward layer")
    chunk: int = knob(2048, "tokens per attention chunk; attention costs seq_len × chunk")
    num_states: int = knob(16, "complex states per channel in the moving average")
    groups: int = knob(32, "groups of channels for the timestep norm; width must be a multiple")
    ffn: Literal["plain", "swiglu"] = knob("plain", "plain: two matrices with biases; swiglu: three without biases")
    ema: Literal["fft", "sequential", "scan"] = knob(
        "fft", "fft: convolution with the kernel; sequential: a loop over tokens; scan: one Triton kernel on a GPU"
    )
    attention: Literal["builtin", "sdpa"] = knob("sdpa", "builtin: torch.softmax of all scores; sdpa: fused")
    seq_len: int = knob(2048, "tokens per sequence")
    batch: int = knob(4, "sequences per batch")
    checkpoint: int = knob(0, "recompute every k-th block in the backward pass; 0: none")


Turn = tuple[Tensor, Tensor]  # cosines and sines of RoPE at each token's position in its chunk


class NormState(NamedTuple):
    """Mean of a group over all tokens so far, and sum of squared distances from it: each [B, groups]."""

    mean: Tensor
    spread: Tensor

    def copied(self) -> "NormState":
        """Return a copy: the original is a view that keeps the sums of every token alive."""
        return NormState(self.mean.clone(), self.spread.clone())


class BlockState(NamedTuple):
    """A block's decoding state; keys and values [B, heads, tokens, width] are those of the open chunk."""

    norm: NormState
    ema: Tensor
    key: Tensor
    value: Tensor


class State(NamedTuple):
    num_tokens: int
    blocks: tuple[BlockState, ...]
    norm: NormState


class TimestepNorm(nn.Module):
    """Normalizes each group of channels by mean and variance over all tokens so far, in float32 or wider."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, seen: int = 0, state: NormState | None = None) -> tuple[Tensor, NormState]:
        """Return the normalized x [B, L, D] and the new state; the incoming state covers `seen` tokens."""
        with torch.autocast(device_type=x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            grouped = x.to(dtype).unflatten(-1, (self.groups, -1))
            variance, mean = torch.var_mean(grouped, dim=-1, correction=0)
            if state is None:
                state = NormState(torch.zeros_like(mean[:, 0]), torch.zeros_like(mean[:, 0]))
            # Welford's update as two cumulative sums. No term is negative, so there is no cancellation as in
            # E[x²] − E[x]².
            count = torch.arange(seen + 1, seen + 1 + x.shape[1], device=x.device, dtype=dtype)[:, None]
            means = (mean.cumsum(1) + seen * state.mean[:, None]) / count
            before = torch.cat((state.mean[:, None], means[:, :-1]), dim=1)
            spread = (variance + (mean - before).square() * ((count - 1) / count)).cumsum(1) + state.spread[:, None]
            scale = torch.rsqrt(spread / count + EPS)
            normed = ((grouped - means[..., None]) * scale[..., None]).flatten(-2)
            normed = normed * (self.weight.to(dtype) + 1) + self.bias.to(dtype)
            return normed.to(x.dtype), NormState(means[:, -1], spread[:, -1])


class GatedAttention(nn.Module):
    """Wh1 m + Wh2 (attention · R), with m the normalized moving average of the normalized input."""

    def __init__(self, config: MegalodonConfig) -> None:
        super().__init__()
        width, z_width, value_width = config.width, config.z_width, config.value_width
        self.heads, self.chunk, self.attention = config.heads, config.chunk, config.attention
        self.timestep_norm = TimestepNorm(width, config.groups)
        self.ema = moving_average.CEMA(width, config.num_states, config.ema)
        self.rms_norm = layers.RMSNorm(width)
        self.wz = nn.Linear(width, z_width)
        self.wv = nn.Linear(width, value_width)
        self.wr = nn.Linear(width, value_width)
        self.wh1 = nn.Linear(width, width)
        self.wh2 = nn.Linear(value_width, width, bias=False)
        self.gamma = nn.Parameter(torch.zeros(2, z_width))
        self.beta = nn.Parameter(torch.zeros(2, z_width))

    def forward(
        self, x: Tensor, turn: Turn, seen: int, state: BlockState | None, keep: bool
    ) -> tuple[Tensor, BlockState | None]:
        """Return the layer's output for x after `seen` tokens, and with `keep` the state after x."""
        t, norm = self.timestep_norm(x, seen, None if state is None else state.norm)
        averaged, last = self.ema(t, None if state is None else state.ema, keep)
        m = self.rms_norm(averaged)
        query, key = self._queries_and_keys(m, turn)
        value = functional.silu(self.wv(t)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if state is not None:
            key, value = torch.cat((state.key, key), dim=2), torch.cat((state.value, value), dim=2)
        seen_values = self._attend(query, key, value).transpose(1, 2).flatten(-2)
        out = self.wh1(m) + self.wh2(seen_values * functional.silu(self.wr(m)))
        if not keep:
            return out, None
        assert last is not None
        open_tokens = key.shape[2] % self.chunk
        first = key.shape[2] - open_tokens
        return out, BlockState(norm.copied(), last, key[:, :, first:].clone(), value[:, :, first:].clone())

    def _queries_and_keys(self, m: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Return queries and keys [B, heads, L, z_width ÷ heads] from one projection with two scales and shifts."""
        z = self.wz(m).unflatten(-1, (self.heads, -1))
        head_width = z.shape[-1]
        z = functional.rms_norm(z, (head_width,), eps=EPS).flatten(-2)
        query, key = (
            layers.rope((z * scale + shift).unflatten(-1, (self.heads, -1)).transpose(1, 2), *turn)
            for scale, shift in zip((self.gamma + 1) / head_width**0.5, self.beta)
        )
        return query, key

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention within each chunk; the first keys may belong to an open chunk that continues."""
        length, past = query.shape[2], key.shape[2] - query.shape[2]
        closing = min(length, self.chunk - past) if past else 0
        opening = (length - closing) % self.chunk
        parts, start = [], 0
        for size, chunk in ((closing, closing), (length - closing - opening, self.chunk), (opening, opening)):
            if size:
                keys = slice(start + past if start or not closing else 0, start + size + past)
                parts.append(
                    self._chunks(query[:, :, start : start + size], key[:, :, keys], value[:, :, keys], chunk)
                )
                start += size
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _chunks(self, query: Tensor, key: Tensor, value: Tensor, chunk: int) -> Tensor:
        """Compute causal attention over [B, heads, chunks × chunk, width]; one chunk may have earlier keys."""
        batch, heads, length, _ = query.shape
        num_chunks = length // chunk
        query, key, value = (
            t.unflatten(2, (num_chunks, -1)).transpose(1, 2).flatten(0, 1) for t in (query, key, value)
        )
        past, mask = key.shape[2] - query.shape[2], None
        if past or self.attention == "builtin":
            mask = torch.ones(chunk, past + chunk, dtype=torch.bool, device=query.device).tril(past)
        if self.attention == "sdpa":
            out = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=1.0
            )
        else:
            scores = torch.where(mask, query @ key.transpose(-1, -2), float("-inf"))
            out = torch.softmax(scores, dim=-1) @ value
        return out.view(batch, num_chunks, heads, chunk, -1).transpose(1, 2).flatten(2, 3)


class FeedForward(nn.Module):
    """fc2 silu(fc1 norm x), or SwiGLU: fc2 (silu(fc1 norm x) · fc3 norm x)."""

    def __init__(self, config: MegalodonConfig) -> None:
        super().__init__()
        plain = config.ffn == "plain"
        self.norm = nn.LayerNorm(config.width, EPS)
        self.fc1 = nn.Linear(config.width, config.ffn_width, bias=plain)
        self.fc2 = nn.Linear(config.ffn_width, config.width, bias=plain)
        self.fc3 = None if plain else nn.Linear(config.width, config.ffn_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        hidden = functional.silu(self.fc1(x))
        return self.fc2(hidden if self.fc3 is None else hidden * self.fc3(x))


class Block(nn.Module):
    """y = x + attention(x), then x + FFN(y): the second residual is the block's input, not y."""

    def __init__(self, config: MegalodonConfig) -> None:
        super().__init__()
        self.attention, self.ffn = GatedAttention(config), FeedForward(config)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        return x + self.ffn(x + self.attention(x, turn, 0, None, False)[0])

    def advance(self, x: Tensor, turn: Turn, seen: int, state: BlockState | None) -> tuple[Tensor, BlockState]:
        """Return the block's output for x after `seen` tokens, and the new state."""
        out, after = self.attention(x, turn, seen, state, True)
        return x + self.ffn(x + out), after


class Megalodon(nn.Module):
    """Tokens [batch, seq_len] → logits [batch, seq_len, vocab], or with targets the mean cross entropy."""

    def __init__(self, config: MegalodonConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = TimestepNorm(config.width, config.groups)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = layers.run_blocks(self.blocks, x, self._turn(x, 0), checkpoint_every=self.config.checkpoint)
        logits = self._head(self.norm(x)[0])
        return layers.logits_or_loss(logits, targets)

    def decode(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the logits of tokens that continue the state, and the new state."""
        seen = 0 if state is None else state.num_tokens
        x, after = self.embedding(tokens), []
        turn = self._turn(x, seen)
        for index, block in enumerate(self.blocks):
            x, block_state = block.advance(x, turn, seen, None if state is None else state.blocks[index])
            after.append(block_state)
        x, norm = self.norm(x, seen, None if state is None else state.norm)
        return self._head(x), State(seen + tokens.shape[1], tuple(after), norm.copied())

    def _turn(self, x: Tensor, seen: int) -> Turn:
        config = self.config
        cos, sin = layers.rope_tables(config.chunk, config.z_width // config.heads, x)
        place = torch.arange(seen, seen + x.shape[1], device=x.device) % config.chunk
        return cos[place], sin[place]

    def _head(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.embedding.weight)


def forward_flops(config: MegalodonConfig) -> int:
    """Return the FLOPs: 2 per token and matmul weight, causal attention in each chunk, and the recurrence."""
    num_tokens = config.batch * config.seq_len
    whole, rest = divmod(config.seq_len, config.chunk)
    pairs = config.batch * (whole * config.chunk**2 + rest**2)
    num_matrices = 2 if config.ffn == "plain" else 3
    weights = config.width * (config.z_width + 3 * config.value_width + config.width)
    weights += num_matrices * config.width * config.ffn_width
    layer = 2 * num_tokens * weights + pairs * (config.z_width + config.value_width)
    layer += ema_flops(num_tokens, config.width, config.num_states)
    return config.layers * layer + 2 * num_tokens * config.vocab * config.width


def build(config: MegalodonConfig) -> Built:
    for name, unit, factor in (("z_width", "heads", 2), ("value_width", "heads", 1), ("width", "groups", 1)):
        value, of = getattr(config, name), getattr(config, unit)
        if value % (factor * of):
            times = "2 × " if factor == 2 else ""
            raise UsageError(f"megalodon: {name}={value} must be a multiple of {times}{unit}={of}")
    proofs = moving_average.proofs("ema", config.ema, config.seq_len, config.layers)
    proofs += (layers.attention_proof(config.attention, config.layers),)
    return layers.language_model(Megalodon(config), config, *proofs, forward_flops=forward_flops(config))


_sizes = partial(layers.sizes, "vocab width layers heads z_width value_width ffn_width chunk num_states groups")
TINY = {**_sizes(256, 64, 2, 2, 32, 64, 128, 32, 4, 8), "seq_len": 64, "batch": 2}

WORKLOAD = Workload(
    name="megalodon",
    about="a language model with complex moving averages and gated attention within chunks",
    config=MegalodonConfig,
    presets={
        "profile": _sizes(256, 384, 6, 3, 192, 384, 1024, 512, 8),
        "forward": _sizes(32_000, 512, 4, 8, 1024, 1024, 2048, 256, 16),
        "200m": _sizes(32_000, 1024, 12, 1, 256, 2048, 2560, 2048, 16, 32),
        "1.3b": _sizes(32_000, 2048, 24, 2, 512, 4096, 4864, 2048, 16, 64),
        "tiny": TINY,
    },
    build=build,
    reference={"ema": "sequential", "attention": "builtin"},
    gate={**TINY, "seq_len": 80},
)
