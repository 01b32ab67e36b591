"""T5-base (220M), 512 tokens to 128, as its fine-tuning is mostly written: float32 with TF32, AdamW."""

import sys

import torch
from transformers import T5Config, T5ForConditionalGeneration

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
config, batch, source, target = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12), 16, 512, 128
if tiny:
    config = T5Config(vocab_size=128, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    batch, source, target = 2, 32, 16
config.decoder_start_token_id = 0

torch.manual_seed(0)
with torch.device(device):
    model = T5ForConditionalGeneration(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(100_000):
    inputs = torch.randint(1, config.vocab_size, (batch, source)).to(device)
    labels = torch.randint(1, config.vocab_size, (batch, target)).to(device)
    loss = model(input_ids=inputs, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
