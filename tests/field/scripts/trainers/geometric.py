"""torch-geometric: graphs of 5 to 10 nodes, 8 to a batch; a graph is a sample, and its nodes are not."""

import sys

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GCNConv(8, 32), GCNConv(32, 32), nn.Linear(32, 2)

    def forward(self, nodes, edges, batch):
        hidden = self.second(self.first(nodes, edges).relu(), edges).relu()
        return self.head(global_mean_pool(hidden, batch))


num_steps = int(sys.argv[1])
torch.manual_seed(0)
graphs = [
    Data(x=torch.randn(n, 8), edge_index=torch.randint(n, (2, 3 * n)), y=torch.randint(2, (1,)))
    for n in torch.randint(5, 11, (8 * num_steps,)).tolist()
]
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for batch in DataLoader(graphs, batch_size=8):
    loss = nn.functional.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
