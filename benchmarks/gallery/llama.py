"""A Llama of 1.1 billion parameters (TinyLlama's sizes): bf16 autocast, gradient checkpointing, fused AdamW."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
batch, length = 4, 2048
if tiny:
    sizes |= {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    batch, length = 2, 32

torch.manual_seed(0)
with torch.device(device):
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).train()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), fused=True)
for _ in range(100_000):
    tokens = torch.randint(sizes["vocab_size"], (batch, length)).to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
