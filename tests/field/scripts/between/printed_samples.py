"""Every ten steps, the model draws text to print, and stays in training mode while it does."""

import sys

import torch
from torch import nn


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.cell, self.head = (
            nn.Embedding(50, 64),
            nn.GRU(64, 64, batch_first=True),
            nn.Linear(64, 50),
        )

    def forward(self, text):
        return self.head(self.cell(self.embedding(text))[0])


@torch.no_grad()
def generate(text, num_words):
    for _ in range(num_words):
        text = torch.cat([text, torch.multinomial(model(text)[:, -1].softmax(-1), 1)], 1)
    return text


def print_samples():
    print(generate(torch.zeros(1, 1, dtype=torch.long), 30).tolist())


torch.manual_seed(0)
model = Language()
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[1])):
    text = torch.randint(50, (8, 17))
    scores = model(text[:, :-1])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print_samples()
print(repr(loss.item()))
