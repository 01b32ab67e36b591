"""An engine as DeepSpeed's: it wraps the model, keeps a flat float32 copy, and writes it back into the parameters."""

import sys

import torch
from torch import nn


class Engine(nn.Module):
    def __init__(self, module, accumulate):
        super().__init__()
        self.module, self.accumulate, self.num_calls = module, accumulate, 0
        self.master = torch.cat([parameter.detach().float().flatten() for parameter in module.parameters()])

    def forward(self, inputs):
        return self.module(inputs)

    def backward(self, loss):
        (loss / self.accumulate).backward()

    def step(self):
        self.num_calls += 1
        if self.num_calls % self.accumulate:
            return
        gradients = [parameter.grad.float().flatten() for parameter in self.module.parameters()]
        self.master -= 0.1 * torch.cat(gradients)
        parts = self.master.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(self.module.parameters(), parts):
            parameter.data.copy_(part.view_as(parameter))
            parameter.grad = None


num_steps = int(sys.argv[1])
torch.manual_seed(0)
engine = Engine(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).bfloat16(), accumulate=2)
for _ in range(2 * num_steps):
    inputs = torch.randn(5, 16, dtype=torch.bfloat16)
    loss = (engine(inputs) - inputs).square().mean()
    engine.backward(loss)
    engine.step()
print(repr(loss.item()))
