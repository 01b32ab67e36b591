"""MONAI: a small UNet, its SupervisedTrainer (an Ignite engine), and a sliding-window evaluation every 10 steps."""

import sys

import torch
from monai.engines import SupervisedTrainer
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.utils import set_determinism
from torch.utils.data import DataLoader

num_steps = int(sys.argv[1])
set_determinism(0)
model = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2))
volumes = [{"image": torch.randn(1, 32, 32), "label": torch.randint(2, (1, 32, 32)).float()} for _ in range(40)]
trainer = SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=num_steps // 10,
    train_data_loader=DataLoader(volumes, batch_size=4),
    network=model,
    optimizer=torch.optim.Adam(model.parameters()),
    loss_function=DiceLoss(to_onehot_y=True, softmax=True),
)


@trainer.on("EPOCH_COMPLETED")
def evaluate(engine):
    model.eval()
    with torch.no_grad():
        total = SlidingWindowInferer((16, 16), sw_batch_size=4)(torch.randn(1, 1, 32, 32), model).sum().item()
    print(engine.state.epoch, repr(total))


trainer.run()
