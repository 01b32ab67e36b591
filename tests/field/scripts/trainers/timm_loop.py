"""A timm model with timm's optimizer factory, scheduler, mixup and averaged model; validation every 10 steps."""

import sys

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, random_seed

num_steps = int(sys.argv[1])
random_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_classes=10)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=num_steps)
average, mixup, loss_of = ModelEmaV3(model), Mixup(mixup_alpha=0.8, num_classes=10), SoftTargetCrossEntropy()
for step in range(num_steps):
    images, targets = mixup(torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
    loss = loss_of(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    schedule.step(step + 1)
    if (step + 1) % 10 == 0:
        average.module.eval()
        with torch.inference_mode():
            print(step, average.module(torch.randn(16, 3, 32, 32)).argmax(1).tolist())
print(repr(loss.item()))
