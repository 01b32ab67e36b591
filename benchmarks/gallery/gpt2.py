"""GPT-2 124M from transformers, pretrained as most loops do it: bf16 autocast, AdamW, clipping, no compiler."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
config, batch, length = GPT2Config(), 16, 1024
if tiny:
    config, batch, length = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2), 2, 32

torch.manual_seed(0)
with torch.device(device):
    model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
for step in range(100_000):
    tokens = torch.randint(config.vocab_size, (batch, length)).to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
