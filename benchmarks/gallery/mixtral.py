"""A mixture of experts as in Mixtral, 8 experts of which 2 per token, 0.8 billion parameters: all in bfloat16."""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
batch, length = 8, 1024
if tiny:
    sizes |= {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    batch, length = 2, 32

torch.manual_seed(0)
with torch.device(device):
    model = MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True, use_cache=False)).bfloat16().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _ in range(100_000):
    tokens = torch.randint(sizes["vocab_size"], (batch, length)).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
