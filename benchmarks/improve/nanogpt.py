"""GPT-2 124M as nanoGPT trains it, eager: bf16 autocast, fused AdamW, flash attention, no torch.compile.

With `--seconds` it ends after that time and prints its own pace; `--evaluate` evaluates once, halfway.
"""

import argparse
import math
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--seconds", type=float, default=math.inf)
parser.add_argument("--evaluate", action="store_true")
asked = parser.parse_args()
tiny = asked.tiny
layers, heads, width, vocab, length, batch = (2, 2, 32, 128, 32, 2) if tiny else (12, 12, 768, 50304, 1024, 12)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (each.view(*x.shape[:2], heads, -1).transpose(1, 2) for each in self.qkv(x).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view_as(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.tokens.weight = self.head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, x, targets):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.reshape(-1))


torch.manual_seed(1337)
torch.set_float32_matmul_precision("high")
data = torch.randint(vocab, (1 << 16,))
model = GPT().to(device)
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device == "cuda")
context = torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()
if asked.compile:
    model.compile()


def batch_of(data):
    starts = torch.randint(len(data) - length, (batch,))
    x = torch.stack([data[i : i + length] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + length] for i in starts])
    if device == "cuda":
        x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


@torch.no_grad()
def evaluate():
    model.eval()
    with context:
        losses = [model(*batch_of(data))[1].item() for _ in range(200)]
    model.train()
    print(f"step {step}: validation loss {sum(losses) / len(losses):.4f}", flush=True)


begun = line_time = time.monotonic()
line_step = 0
for step in range(100_000):
    if (now := time.monotonic()) - begun > asked.seconds:
        break
    if asked.seconds < math.inf and now - line_time > asked.seconds / 20:
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        print(f"step {step}: {(now - line_time) * 1e3 / (step - line_step):.3f} ms per step", flush=True)
        if asked.evaluate and now - begun > asked.seconds / 2:
            asked.evaluate = False
            evaluate()
        line_time, line_step = time.monotonic(), step
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * min(1.0, (step + 1) / 100)
    x, y = batch_of(data)
    with context:
        _, loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
