"""Lightning's Trainer: a sanity check first, validation every 20 steps, a checkpoint with it."""

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

    def validation_step(self, batch, _index):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(160, 32), torch.randint(4, (160,)))
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=int(sys.argv[1]), logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=".",
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(data, batch_size=8), DataLoader(data, batch_size=40))
    print(trainer.global_step, repr(float(trainer.callback_metrics["val_loss"])))
