"""Lightning with manual optimization: a GAN's two optimizers in one training_step."""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adversaries(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.critic = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, _index):
        of_generator, of_critic = self.optimizers()
        made = self.generator(torch.randn(16, 8))
        of_critic.zero_grad()
        self.manual_backward((self.critic(made.detach()) - self.critic(batch[0])).mean())
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(-self.critic(made).mean())
        of_generator.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.generator.parameters(), 0.01), torch.optim.SGD(self.critic.parameters(), 0.01)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=2 * int(sys.argv[1]), logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    model = Adversaries()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(160, 64)), batch_size=16))
    print(trainer.global_step, repr(sum(parameter.sum().item() for parameter in model.parameters())))
