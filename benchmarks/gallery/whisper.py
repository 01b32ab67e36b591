"""Whisper-small (244M) on spectrograms of 30 s, fine-tuned in float16 with a GradScaler; every loss is printed."""

import sys

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes, batch, frames, length = {"d_model": 768, "vocab_size": 51865}, 16, 3000, 128
layers, heads, width = 12, 12, 3072
if tiny:
    sizes, batch, frames, length = {"d_model": 32, "vocab_size": 128, "max_source_positions": 32}, 2, 64, 16
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    layers, heads, width = 2, 2, 64
config = WhisperConfig(
    **sizes, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
    decoder_attention_heads=heads, encoder_ffn_dim=width, decoder_ffn_dim=width, use_cache=False,
    suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip

torch.manual_seed(0)
with torch.device(device):
    model = WhisperForConditionalGeneration(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
half = torch.float16 if device == "cuda" else torch.bfloat16
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
for step in range(100_000):
    sound = torch.randn(batch, config.num_mel_bins, frames).to(device)
    labels = torch.randint(config.vocab_size, (batch, length)).to(device)
    with torch.autocast(device, half):
        loss = model(input_features=sound, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}", flush=True)
