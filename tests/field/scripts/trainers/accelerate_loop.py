"""Accelerate around a loop of one's own: accumulation of two, and an evaluation every 16 steps."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_steps = int(sys.argv[1])
set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
data = DataLoader(TensorDataset(torch.randn(256, 32), torch.randint(4, (256,))), batch_size=8)
held_out = DataLoader(TensorDataset(torch.randn(32, 32), torch.randint(4, (32,))), batch_size=16)
model, optimizer, data, held_out, schedule = accelerator.prepare(model, optimizer, data, held_out, schedule)
for epoch in range(num_steps // 16):
    model.train()
    for inputs, labels in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        num_right = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in held_out)
    print(epoch, repr(loss.item()), num_right)
