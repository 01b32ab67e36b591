"""GPyTorch: an exact Gaussian process whose every step sees the same 60 points."""

import sys

import gpytorch
import torch


class Process(gpytorch.models.ExactGP):
    def __init__(self, inputs, targets, likelihood):
        super().__init__(inputs, targets, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, inputs):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))


num_steps = int(sys.argv[1])
torch.manual_seed(0)
inputs = torch.linspace(0, 1, 60)[:, None]
targets = torch.sin(6 * inputs[:, 0]) + 0.1 * torch.randn(60)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(inputs, targets, likelihood).train()
likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for _ in range(num_steps):
    optimizer.zero_grad()
    loss = -objective(model(inputs), targets)
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
