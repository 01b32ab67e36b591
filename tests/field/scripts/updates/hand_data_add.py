"""No optimizer: `parameter.data.add_`, as word_language_model of pytorch/examples updates."""

import sys

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.rnn = nn.GRU(32, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.embedding(tokens), hidden)
        return self.head(output), hidden


num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = Model()
text = torch.randint(64, (num_steps * 7 + 1, 4))
hidden = torch.zeros(1, 4, 32)
for step in range(num_steps):
    inputs, targets = text[step * 7 : step * 7 + 7], text[step * 7 + 1 : step * 7 + 8]
    model.zero_grad()
    logits, hidden = model(inputs, hidden.detach())
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.5)
print(repr(loss.item()))
