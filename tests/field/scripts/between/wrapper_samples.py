"""A module that returns the loss; every ten steps, text is sampled from the network inside it."""

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


class WithLoss(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, text):
        scores = self.network(text[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())

    @torch.no_grad()
    def continued(self, text, num_words):
        for _ in range(num_words):
            text = torch.cat([text, self.network(text)[:, -1:].argmax(-1)], 1)
        return text


torch.manual_seed(0)
model = WithLoss(Language())
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[1])):
    loss = model(torch.randint(50, (8, 17)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        model.eval()
        print(model.continued(torch.zeros(1, 1, dtype=torch.long), 30).tolist())
        model.train()
print(repr(loss.item()))
