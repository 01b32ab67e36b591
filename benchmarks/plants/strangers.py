"""Training steps of other people's kinds, each with one mistake, each beside the same step without it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], object]
Plant = tuple[Step, Step, str]


def trained(module: nn.Module, loss: Callable[[], torch.Tensor], is_autocast: bool = True) -> Step:
    device_type = next(module.parameters()).device.type
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=device_type == "cuda")

    def step() -> object:
        with torch.autocast(device_type, torch.bfloat16, enabled=is_autocast):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


class PackedAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Hourglass(nn.Module):
    """A U-Net: down by pooling, up by transposed convolutions, with what was there before beside it."""

    def __init__(self, num_in: int, num_out: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(zip((num_in, *widths), widths))
        self.down = nn.ModuleList(self.twice(i, o) for i, o in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, stride=2) for i, o in reversed(pairs[1:]))
        self.join = nn.ModuleList(self.twice(2 * i, i) for i, _ in reversed(pairs[1:]))
        self.last = nn.Conv2d(widths[0], num_out, 1)

    @staticmethod
    def twice(num_in: int, num_out: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for i in (num_in, num_out):
            layers += [nn.Conv2d(i, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out)]
            layers.append(nn.ReLU(inplace=True))
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = []
        for down in self.down:
            x = down(F.max_pool2d(x, 2) if beside else x)
            beside.append(x)
        beside.pop()
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([up(x), beside.pop()], 1))
        return self.last(x)


def picture_segmenter_in_planar_layout(device: torch.device, small: bool = False) -> Plant:
    batch, side, widths = (2, 8, (8, 16)) if small else (8, 512, (64, 128, 256, 512))

    def build(layout: torch.memory_format) -> Step:
        torch.manual_seed(0)
        net = Hourglass(3, 16, widths).to(device, memory_format=layout)
        images = torch.randn(batch, 3, side, side, device=device).to(memory_format=layout)
        classes = torch.randint(16, (batch, side, side), device=device)
        return trained(net, lambda: F.cross_entropy(net(images), classes))

    what = "A U-Net with batch norm under bfloat16 autocast in NCHW; fixed = net and images in channels_last."
    return build(torch.contiguous_format), build(torch.channels_last), what


def distances_by_broadcast_subtraction(device: torch.device, small: bool = False) -> Plant:
    num_points, num_centers, width, num_in = (32, 8, 16, 32) if small else (16384, 1024, 128, 512)

    def subtracted(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
        return (points[:, None] - centers[None]).pow(2).sum(-1)

    def multiplied(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
        squares = points.square().sum(1, keepdim=True) + centers.square().sum(1)
        with torch.autocast(device.type, enabled=False):
            return torch.addmm(squares, points, centers.T, alpha=-2)

    def build(distances: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(num_in, 4 * num_in), nn.GELU(), nn.Linear(4 * num_in, width))
        net.register_parameter("centers", nn.Parameter(torch.randn(num_centers, width) * 0.1))
        net.to(device)
        x = torch.randn(num_points, num_in, device=device)
        classes = torch.randint(num_centers, (num_points,), device=device)
        return trained(net, lambda: F.cross_entropy(-distances(net(x).float(), net.centers), classes))

    what = (
        f"Squared distances of {num_points:,} embeddings to {num_centers:,} prototypes as (x[:, None] - c[None])**2"
        f" summed over {width} features; fixed = |x|^2 + |c|^2 - 2 x c^T by one addmm."
    )
    return build(subtracted), build(multiplied), what


class Head(nn.Module):
    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, head_width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(part(x)[:, None] for part in (self.q, self.k, self.v)))[:, 0]


class ManyHeads(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // num_heads) for _ in range(num_heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))

    def packed(self) -> PackedAttention:
        one = PackedAttention(self.out.in_features, len(self.heads))
        one.out = self.out
        weights = [getattr(head, name).weight for name in "qkv" for head in self.heads]
        one.qkv.weight = nn.Parameter(torch.cat(weights).detach())
        return one


def one_module_per_attention_head(device: torch.device, small: bool = False) -> Plant:
    batch, length, width, num_heads, depth = (2, 8, 32, 4, 1) if small else (32, 1024, 1024, 16, 4)

    def build(is_packed: bool) -> Step:
        torch.manual_seed(0)
        attentions = [ManyHeads(width, num_heads) for _ in range(depth)]
        blocks = [Block(width, many) for many in attentions]
        x = torch.randn(batch, length, width).to(device, torch.bfloat16)
        if is_packed:
            for block, many in zip(blocks, attentions):
                block.attention = many.packed()
        net = nn.Sequential(*blocks).to(device, torch.bfloat16)
        return trained(net, lambda: net(x).float().square().mean(), is_autocast=False)

    what = (
        f"Attention as a ModuleList of {num_heads} heads, each with its own small q, k and v products and attention"
        " call, concatenated; fixed = one qkv product and one attention call for all heads."
    )
    return build(False), build(True), what


def word_scores_for_unlabelled_positions(device: torch.device, small: bool = False) -> Plant:
    batch, length, width, num_heads = (2, 16, 32, 4) if small else (64, 512, 768, 12)
    depth, num_words = (1, 64) if small else (4, 50304)
    num_labelled = round(0.15 * length)

    def build(is_everywhere: bool) -> Step:
        torch.manual_seed(0)
        words = nn.Embedding(num_words, width)
        blocks = nn.Sequential(*(Block(width, PackedAttention(width, num_heads)) for _ in range(depth)))
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_words))
        net = nn.ModuleList([words, blocks, head]).to(device)
        tokens = torch.randint(num_words, (batch, length))
        chosen = torch.rand(batch, length).argsort(1)[:, :num_labelled].sort(1).values
        labels = torch.full((batch, length), -100).scatter(1, chosen, tokens.gather(1, chosen)).flatten().to(device)
        picked = (chosen + torch.arange(batch)[:, None] * length).flatten().to(device)  # the collator knows them
        few_labels, tokens = labels[picked], tokens.to(device)

        def loss() -> torch.Tensor:
            hidden = blocks(words(tokens)).flatten(0, 1)
            if is_everywhere:
                return F.cross_entropy(head(hidden), labels, ignore_index=-100)
            return F.cross_entropy(head(hidden.index_select(0, picked)), few_labels)

        return trained(net, loss)

    what = (
        f"A masked language model scores {num_words:,} words at every position though only 15% carry a label (-100"
        " elsewhere); fixed = the labelled positions are selected before the vocabulary head."
    )
    return build(True), build(False), what


def numpy_doubles_leak_into_the_loss(device: torch.device, small: bool = False) -> Plant:
    batch, num_fields, height, breadth, width = (2, 8, 6, 12, 8) if small else (64, 72, 180, 360, 128)
    generator = np.random.default_rng(0)
    statistics = generator.normal(0, 1, (num_fields, 1, 1)), generator.uniform(1, 3, (num_fields, 1, 1))
    latitudes = np.cos(np.deg2rad(np.linspace(-89.5, 89.5, height)))[:, None]

    def build(dtype: torch.dtype | None) -> Step:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(num_fields, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, num_fields, 3, padding=1)
        ).to(device, memory_format=torch.channels_last)  # fmt: skip
        mean, spread, weights = (torch.from_numpy(a).to(device, dtype) for a in (*statistics, latitudes))
        now, later = (
            torch.randn(batch, num_fields, height, breadth, device=device).to(memory_format=torch.channels_last)
            for _ in range(2)
        )

        def loss() -> torch.Tensor:
            change = net(((now - mean) / spread).float())
            error = change * spread + mean - later
            return (error.square() * weights).mean()

        return trained(net, loss)

    what = (
        "Normalization statistics and latitude weights from numpy stay float64 and promote the fields and the whole"
        " loss to float64; fixed = they are float32."
    )
    return build(None), build(torch.float32), what


class LinearAttention(PackedAttention):
    is_quadratic = False

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = F.elu(q) + 1, (F.elu(k) + 1) / k.shape[-2]
        total = q @ k.sum(-2).unsqueeze(-1)
        mixed = (q @ k.transpose(-2, -1)) @ v if self.is_quadratic else q @ (k.transpose(-2, -1) @ v)
        return mixed / total


class QuadraticLinearAttention(LinearAttention):
    is_quadratic = True


def linear_attention_in_quadratic_order(device: torch.device, small: bool = False) -> Plant:
    batch, length, width, num_heads, depth = (2, 16, 32, 4, 1) if small else (8, 4096, 1024, 16, 4)

    def build(kind: type[LinearAttention]) -> Step:
        torch.manual_seed(0)
        net = nn.Sequential(*(Block(width, kind(width, num_heads)) for _ in range(depth))).to(device)
        x = torch.randn(batch, length, width, device=device)
        return trained(net, lambda: net(x).float().square().mean())

    what = (
        f"Linear attention without a mask multiplied as (q k^T) v, a {length:,} x {length:,} matrix per head;"
        " fixed = q (k^T v)."
    )
    return build(QuadraticLinearAttention), build(LinearAttention), what


def contrastive_product_in_plain_float32(device: torch.device, small: bool = False) -> Plant:
    batch, width = (32, 16) if small else (16384, 1024)

    def build(precision: str) -> Step:
        torch.manual_seed(0)
        towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        ).to(device)
        views = [torch.randn(batch, width, device=device) for _ in range(2)]
        partners = torch.arange(batch, device=device)

        def loss() -> torch.Tensor:
            one, other = (F.normalize(tower(view).float(), dim=-1) for tower, view in zip(towers, views))
            with torch.autocast(device.type, enabled=False):
                logits = one @ other.T * 14.0
            return (F.cross_entropy(logits, partners) + F.cross_entropy(logits.T, partners)) / 2

        inner = trained(towers, loss)

        def step() -> object:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            try:
                return inner()
            finally:
                torch.set_float32_matmul_precision(before)

        return step

    what = (
        f"The {batch:,} x {batch:,} similarities of a contrastive loss, out of autocast, as a float32 product without"
        ' TF32; fixed = torch.set_float32_matmul_precision("high").'
    )
    return build("highest"), build("high"), what


def averaged_weights_kept_on_the_cpu(device: torch.device, small: bool = False) -> Plant:
    batch, length, width, num_heads, depth = (2, 8, 32, 4, 2) if small else (32, 512, 512, 8, 8)

    def build(is_on_cpu: bool) -> Step:
        torch.manual_seed(0)
        net = nn.Sequential(*(Block(width, PackedAttention(width, num_heads)) for _ in range(depth))).to(device)
        x = torch.randn(batch, length, width, device=device)
        parameters = list(net.parameters())
        home = torch.device("cpu") if is_on_cpu else device
        averages = [p.detach().to(home, copy=True) for p in parameters]
        inner = trained(net, lambda: net(x).float().square().mean())

        @torch.no_grad()
        def step() -> object:
            with torch.enable_grad():
                value = inner()
            if is_on_cpu:
                for average, parameter in zip(averages, parameters):
                    average.mul_(0.999).add_(parameter.detach().cpu(), alpha=0.001)
            else:
                torch._foreach_lerp_(averages, parameters, 0.001)
            return value

        return step

    what = (
        "The moving average of the weights lives on the CPU and every parameter is copied there in every step;"
        " fixed = the averages are on the GPU and updated by torch._foreach_lerp_."
    )
    return build(True), build(False), what


def advantages_by_a_loop_over_time(device: torch.device, small: bool = False) -> Plant:
    num_steps, num_worlds, num_seen, width = (8, 4, 8, 16) if small else (1024, 256, 64, 512)
    discount, trust = 0.99, 0.95

    def build(is_looped: bool) -> Step:
        torch.manual_seed(0)
        critic = nn.Sequential(
            nn.Linear(num_seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)
        ).to(device)
        actor = nn.Sequential(nn.Linear(num_seen, width), nn.Tanh(), nn.Linear(width, 8)).to(device)
        net = nn.ModuleList([critic, actor])
        seen = torch.randn(num_steps + 1, num_worlds, num_seen, device=device)
        rewards = torch.randn(num_steps, num_worlds, device=device)
        actions = torch.randint(8, (num_steps * num_worlds,), device=device)
        ahead = torch.arange(num_steps) - torch.arange(num_steps)[:, None]
        weights = torch.where(ahead >= 0, (discount * trust) ** ahead.clamp_min(0).double(), 0.0).to(
            device, torch.float32
        )

        def advantages(values: torch.Tensor) -> torch.Tensor:
            if not is_looped:
                with torch.autocast(device.type, enabled=False):
                    return weights @ (rewards + discount * values[1:] - values[:-1])
            found = torch.zeros_like(rewards)
            last = torch.zeros_like(rewards[0])
            for t in reversed(range(num_steps)):
                surprise = rewards[t] + discount * values[t + 1] - values[t]
                found[t] = last = surprise + discount * trust * last
            return found

        def loss() -> torch.Tensor:
            values = critic(seen).float().mean(-1)
            with torch.no_grad():
                gains = advantages(values)
                returns = gains + values[:-1]
                gains = (gains - gains.mean()) / (gains.std() + 1e-8)
            surprisal = F.cross_entropy(actor(seen[:-1]).flatten(0, 1), actions, reduction="none")
            return (surprisal * gains.flatten()).mean() + 0.5 * F.mse_loss(values[:-1], returns)

        return trained(net, loss)

    what = (
        f"Generalized advantages by a Python loop backwards over {num_steps:,} time steps, some small kernels each;"
        " fixed = one product of the differences with the triangle of discounts."
    )
    return build(True), build(False), what


def noise_drawn_on_the_cpu(device: torch.device, small: bool = False) -> Plant:
    batch, side, widths = (2, 8, (8, 16)) if small else (64, 128, (64, 128, 256))

    def build(where: torch.device) -> Step:
        torch.manual_seed(0)
        net = Hourglass(4, 4, widths).to(device, memory_format=torch.channels_last)
        images = torch.randn(batch, 4, side, side, device=device)

        def loss() -> torch.Tensor:
            share = torch.rand(batch, 1, 1, 1, device=device)
            noise = torch.randn(images.shape, device=where).to(device)
            noisy = images * (1 - share).sqrt() + noise * share.sqrt()
            return F.mse_loss(net(noisy.contiguous(memory_format=torch.channels_last)).float(), noise)

        return trained(net, loss)

    what = (
        "The noise of a diffusion step drawn by torch.randn(shape).to(device), on one CPU core and then copied;"
        " fixed = torch.randn(shape, device=device)."
    )
    return build(torch.device("cpu")), build(device), what


PLANTS: dict[str, Callable] = {
    build.__name__: build
    for build in (
        picture_segmenter_in_planar_layout,
        distances_by_broadcast_subtraction,
        one_module_per_attention_head,
        word_scores_for_unlabelled_positions,
        numpy_doubles_leak_into_the_loss,
        linear_attention_in_quadratic_order,
        contrastive_product_in_plain_float32,
        averaged_weights_kept_on_the_cpu,
        advantages_by_a_loop_over_time,
        noise_drawn_on_the_cpu,
    )
}
