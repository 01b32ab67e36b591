"""Pyro: stochastic variational inference; its optimizer makes one torch optimizer for each parameter."""

import sys

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](4, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))

    def forward(self, inputs, targets):
        mean = self.linear(inputs)[:, 0]
        with pyro.plate("data", len(inputs)):
            pyro.sample("targets", dist.Normal(mean, 0.1), obs=targets)


num_steps = int(sys.argv[1])
pyro.set_rng_seed(0)
model = Regression()
inference = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
for _ in range(num_steps):
    inputs = torch.randn(20, 4)
    loss = inference.step(inputs, inputs.sum(1))
print(repr(loss))
