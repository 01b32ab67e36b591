"""Graphs of different sizes, 8 at a time and 4 at the end of an epoch: the model is given their nodes."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


class Readout(nn.Module):
    def __init__(self):
        super().__init__()
        self.node, self.graph = nn.Linear(5, 16), nn.Linear(16, 1)

    def forward(self, nodes, owners, num_graphs):
        made = self.node(nodes).relu()
        return self.graph(made.new_zeros(num_graphs, 16).index_add(0, owners, made))[:, 0]


def joined(graphs):
    owners = torch.cat([torch.full((len(nodes),), i) for i, (nodes, _) in enumerate(graphs)])
    return torch.cat([nodes for nodes, _ in graphs]), owners, torch.stack([label for _, label in graphs])


num_steps = int(sys.argv[1])
torch.manual_seed(0)
graphs = [(torch.randn(9 + i % 7, 5), torch.randn(())) for i in range(36)]
loader = DataLoader(graphs, batch_size=8, shuffle=True, collate_fn=joined)
model = Readout()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(num_steps // 5):
    model.train()
    for nodes, owners, labels in loader:
        optimizer.zero_grad()
        loss = (model(nodes, owners, len(labels)) - labels).square().mean()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for nodes, owners, labels in loader:
            model(nodes, owners, len(labels))
print(repr(loss.item()))
