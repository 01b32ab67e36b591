"""No training at all: a model that classifies batch after batch."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
with torch.inference_mode():
    for _ in range(int(sys.argv[1])):
        chosen = model(torch.randn(8, 32)).argmax(1)
print(chosen.tolist())
