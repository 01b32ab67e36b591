"""Lightning's ddp strategy on two processes: rank 1 is a second start of this script."""

import os
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, _index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(320, 32), torch.randint(4, (320,)))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=int(sys.argv[1]), logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(data, batch_size=8))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(trainer.global_step, repr(sum(parameter.sum().item() for parameter in model.parameters())))
