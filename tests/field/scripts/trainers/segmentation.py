"""segmentation-models-pytorch: a Unet with a small encoder and its Dice loss; validation every 10 steps."""

import sys

import segmentation_models_pytorch as smp
import torch

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=1)
loss_of = smp.losses.DiceLoss("binary")
optimizer = torch.optim.Adam(model.parameters())
for step in range(num_steps):
    model.train()
    images, masks = torch.randn(2, 3, 32, 32), torch.randint(2, (2, 1, 32, 32)).float()
    loss = loss_of(model(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        model.eval()
        with torch.inference_mode():
            counts = smp.metrics.get_stats(model(images).sigmoid(), masks.long(), mode="binary", threshold=0.5)
        print(step, repr(smp.metrics.iou_score(*counts, reduction="micro").item()))
