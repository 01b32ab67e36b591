"""ViT-B/16 on pictures of 224 × 224: a DataLoader with workers, float32 normalization on the CPU, bf16 autocast."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
config, batch, workers = ViTConfig(num_labels=1000), 128, 8
if tiny:
    config = ViTConfig(
        image_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=10
    )
    batch, workers = 4, 0


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        picture = torch.randint(256, (3, config.image_size, config.image_size), dtype=torch.uint8)
        return (picture / 255.0 - 0.5) / 0.5, index % config.num_labels


torch.manual_seed(0)
with torch.device(device):
    model = ViTForImageClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
loader = DataLoader(Pictures(), batch_size=batch, num_workers=workers, pin_memory=device == "cuda")
for pictures, labels in loader:
    pictures, labels = pictures.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    with torch.autocast(device, torch.bfloat16):
        loss = model(pixel_values=pictures, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
