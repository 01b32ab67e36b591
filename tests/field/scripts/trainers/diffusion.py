"""denoising-diffusion-pytorch: its Trainer, with two micro-batches, an averaged model, and samples every 20 steps."""

import sys
from pathlib import Path

import numpy as np
import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
from PIL import Image

num_steps = int(sys.argv[1])
torch.manual_seed(0)
Path("images").mkdir()
for i in range(104):
    Image.fromarray(np.full((16, 16, 3), 2 * i, dtype=np.uint8)).save(f"images/{i}.png")
model = Unet(dim=8, dim_mults=(1, 2), attn_heads=1, attn_dim_head=8)
diffusion = GaussianDiffusion(model, image_size=16, timesteps=20, sampling_timesteps=4)
trainer = Trainer(
    diffusion,
    "images",
    train_batch_size=8,
    gradient_accumulate_every=2,
    train_num_steps=num_steps,
    save_and_sample_every=20,
    num_samples=4,
    results_folder="out",
    calculate_fid=False,
    num_fid_samples=1,
)
trainer.train()
print(trainer.step)
