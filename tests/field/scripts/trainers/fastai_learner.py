"""fastai: fit_one_cycle over epochs of 20 batches, a validation after each."""

import sys

import torch
from fastai.basics import DataLoaders, Learner, accuracy, set_seed
from fastai.callback import progress, schedule  # noqa: F401  they add methods to Learner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_steps = int(sys.argv[1])
set_seed(0)
training = TensorDataset(torch.randn(160, 32), torch.randint(4, (160,)))
validation = TensorDataset(torch.randn(64, 32), torch.randint(4, (64,)))
data = DataLoaders(DataLoader(training, batch_size=8), DataLoader(validation, batch_size=32))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
learner = Learner(data, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(num_steps // 20, 1e-3)
print(repr(float(learner.recorder.losses[-1])), len(learner.recorder.losses))
