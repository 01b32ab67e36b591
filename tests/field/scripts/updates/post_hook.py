"""PyTorch's public hook after every optimizer step, registered by the script."""

import sys

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
for _ in range(num_steps):
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs[:, :4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(len(seen), repr(loss.item()))
