"""An episode of 12 states, unbatched, one forward each with gradient; then one update (actor_critic.py)."""

import sys

import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state):
        hidden = self.body(state).relu()
        return self.actor(hidden).softmax(-1), self.critic(hidden)


num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(num_steps):
    losses = []
    for _ in range(12):
        state = torch.randn(4)
        probabilities, value = model(state)
        chosen = torch.distributions.Categorical(probabilities)
        action = chosen.sample()
        reward = float(state[0]) * (2 * action.item() - 1)
        losses += [-chosen.log_prob(action) * (reward - value.item()), (value - reward).square().sum()]
    loss = torch.stack(losses).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
