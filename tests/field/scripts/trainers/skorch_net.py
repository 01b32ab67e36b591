"""skorch: fit of a NeuralNetClassifier, 16 batches an epoch, then its validation split."""

import sys

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
random = np.random.default_rng(0)
inputs = random.standard_normal((160, 32)).astype(np.float32)
labels = (inputs[:, 0] > 0).astype(np.int64)
module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
net = NeuralNetClassifier(
    module, criterion=nn.CrossEntropyLoss, max_epochs=num_steps // 16, lr=0.1, batch_size=8, verbose=0
)
net.fit(inputs, labels)
print(len(net.history), repr(net.history[-1, "train_loss"]))
