"""Acts on 12 single states with gradients, then learns from all 12: targets come from random critics, without any.

Nothing is evaluated. No target critic is called in every step, but the line that calls them is.
"""

import random
import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
random.seed(0)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def chances(self, states):
        return torch.softmax(self.policy(torch.relu(self.body(states))), -1)

    def judge(self, states):
        return self.value(torch.relu(self.body(states)))[:, 0]


agent = Agent()
targets = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(6))
targets.requires_grad_(False)
optimizer = torch.optim.Adam(agent.parameters())
state = torch.randn(4)
for _ in range(num_steps):
    seen, actions, before = [], [], []
    for _ in range(12):
        odds = agent.chances(state)
        action = torch.distributions.Categorical(odds).sample()
        seen.append(state)
        actions.append(action)
        before.append(odds[action].item())
        state = torch.randn(4)
    states, chosen = torch.stack(seen), torch.stack(actions)[:, None]
    with torch.no_grad():
        ratios = agent.chances(states).gather(1, chosen)[:, 0] / torch.tensor(before)
        judged = torch.stack([targets[i](states)[:, 0] for i in random.sample(range(6), 2)]).amin(0)
        advantages = ratios.clamp(max=1) * (judged - agent.judge(states))
    log_chances = agent.chances(states).gather(1, chosen)[:, 0].log()
    loss = (agent.judge(states) - judged).square().mean() - (log_chances * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
