"""ResNet-50 as a first script is written: float32, channels first, plain SGD, eager."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--batch", type=int, default=128)
asked = parser.parse_args()
depths, width, size, batch = ((1, 1, 1, 1), 8, 32, 4) if asked.tiny else ((3, 4, 6, 3), 64, 224, asked.batch)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Bottleneck(nn.Module):
    def __init__(self, num_in, num, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(num_in, num, 1, bias=False), nn.BatchNorm2d(num)
        self.conv2, self.norm2 = nn.Conv2d(num, num, 3, stride, 1, bias=False), nn.BatchNorm2d(num)
        self.conv3, self.norm3 = nn.Conv2d(num, 4 * num, 1, bias=False), nn.BatchNorm2d(4 * num)
        self.skip = nn.Identity()
        if stride > 1 or num_in != 4 * num:
            self.skip = nn.Sequential(nn.Conv2d(num_in, 4 * num, 1, stride, bias=False), nn.BatchNorm2d(4 * num))

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, num_in = [], width
        for stage, depth in enumerate(depths):
            for place in range(depth):
                blocks.append(Bottleneck(num_in, width << stage, 2 if stage and not place else 1))
                num_in = 4 * (width << stage)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(num_in, 1000)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
model = ResNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
images, labels = torch.randn(4, batch, 3, size, size, device=device), torch.randint(1000, (4, batch), device=device)
for step in range(100_000):
    loss = F.cross_entropy(model(images[step % 4]), labels[step % 4])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
