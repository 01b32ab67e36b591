"""pytorch-metric-learning: its trainer, whose loss has weights and an optimizer of its own."""

import logging
import sys

import torch
from pytorch_metric_learning import losses, trainers
from torch import nn
from torch.utils.data import TensorDataset

num_steps = int(sys.argv[1])
logging.disable(logging.INFO)
torch.manual_seed(0)
trunk, embedder = nn.Sequential(nn.Linear(32, 64), nn.ReLU()), nn.Linear(64, 16)
loss = losses.ArcFaceLoss(num_classes=4, embedding_size=16)
data = TensorDataset(torch.randn(160, 32), torch.randint(4, (160,)))
trainer = trainers.MetricLossOnly(
    models={"trunk": trunk, "embedder": embedder},
    optimizers={
        "trunk_optimizer": torch.optim.Adam(trunk.parameters()),
        "embedder_optimizer": torch.optim.Adam(embedder.parameters()),
        "metric_loss_optimizer": torch.optim.SGD(loss.parameters(), lr=0.01),
    },
    batch_size=8,
    loss_funcs={"metric_loss": loss},
    dataset=data,
    dataloader_num_workers=0,
    data_device=torch.device("cpu"),
    iterations_per_epoch=20,
    end_of_iteration_hook=lambda trainer: seen.append(float(trainer.losses["total_loss"])),
)
seen: list[float] = []
trainer.train(num_epochs=num_steps // 20)
print(len(seen), repr(seen[-1]))
