"""x-transformers: a wrapper that returns the loss itself, accumulation of four, text generated every 20 steps."""

import sys

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

num_steps = int(sys.argv[1])
torch.manual_seed(0)
net = TransformerWrapper(
    num_tokens=64, max_seq_len=32, attn_layers=Decoder(dim=32, depth=1, heads=2, attn_dim_head=16)
)
model = AutoregressiveWrapper(net)
optimizer = torch.optim.Adam(model.parameters())
for step in range(num_steps):
    model.train()
    for _ in range(4):
        loss = model(torch.randint(64, (2, 17)))
        (loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 20 == 0:
        model.eval()
        print(model.generate(torch.zeros(1, 1, dtype=torch.long), 8).tolist())
print(repr(loss.item()))
