"""diffusers: a UNet2DModel in Accelerate's loop with an EMAModel, and images sampled every 20 steps."""

import sys

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
average = EMAModel(model.parameters())
noise_schedule = DDPMScheduler(num_train_timesteps=50)
optimizer = torch.optim.AdamW(model.parameters())
schedule = get_cosine_schedule_with_warmup(optimizer, 5, num_steps)
accelerator = Accelerator(cpu=True)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
for step in range(num_steps):
    images, noise, times = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8), torch.randint(50, (4,))
    predicted = model(noise_schedule.add_noise(images, noise, times), times).sample
    loss = torch.nn.functional.mse_loss(predicted, noise)
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    average.step(model.parameters())
    if (step + 1) % 20 == 0:
        sample = torch.randn(2, 3, 8, 8)
        with torch.no_grad():
            for time in (40, 20, 1):
                sample = noise_schedule.step(model(sample, time).sample, time, sample).prev_sample
print(repr(loss.item()))
