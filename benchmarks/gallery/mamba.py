"""Mamba-2 130M from transformers without its CUDA kernels: the scan in plain PyTorch, bf16 autocast."""

import sys

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {
    "vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64,
    "state_size": 128, "n_groups": 1, "chunk_size": 128,
}  # fmt: skip
batch, length = 2, 512
if tiny:
    sizes |= {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    sizes |= {"state_size": 8, "chunk_size": 8}
    batch, length = 2, 32

torch.manual_seed(0)
with torch.device(device):
    model = Mamba2ForCausalLM(Mamba2Config(**sizes, use_cache=False)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
for _ in range(100_000):
    tokens = torch.randint(sizes["vocab_size"], (batch, length)).to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
