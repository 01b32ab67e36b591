"""vit-pytorch's distillation wrapper: a frozen teacher inside the module that is trained."""

import sys

import torch
from torch import nn
from vit_pytorch.distill import DistillableViT, DistillWrapper

num_steps = int(sys.argv[1])
torch.manual_seed(0)
teacher = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
student = DistillableViT(image_size=16, patch_size=8, num_classes=10, dim=32, depth=1, heads=2, mlp_dim=64)
model = DistillWrapper(student=student, teacher=teacher, temperature=3, alpha=0.5, hard=False)
optimizer = torch.optim.AdamW(student.parameters())
for _ in range(num_steps):
    loss = model(torch.randn(8, 3, 16, 16), torch.randint(10, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
