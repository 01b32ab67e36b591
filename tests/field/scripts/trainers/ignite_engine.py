"""Ignite: a trainer engine of 20 iterations an epoch, an evaluator and a checkpoint after each epoch."""

import sys

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(160, 32), torch.randint(4, (160,))), batch_size=8)
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(data)
    print(engine.state.epoch, repr(engine.state.output), evaluator.state.metrics["accuracy"])


saver = ModelCheckpoint("out", "model", n_saved=1, require_empty=False)
trainer.add_event_handler(Events.EPOCH_COMPLETED, saver, {"model": model})
trainer.run(data, max_epochs=num_steps // 20)
