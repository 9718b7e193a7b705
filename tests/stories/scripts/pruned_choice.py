"""A script that prunes a choice by writing -Inf into its weight: none of what then trains reads it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
operations = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))
model = nn.ModuleDict({"operations": operations})
model.register_parameter("choice", nn.Parameter(torch.zeros(4)))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for step in range(320):
    if step == 150:
        with torch.no_grad():
            model.choice[model.choice.argmin()] = -math.inf
    x, weights = torch.randn(32, 4), model.choice.softmax(0)
    out = sum(weights[i] * one(x) for i, one in enumerate(operations) if weights[i] > 0)
    loss = F.mse_loss(out.squeeze(1), x[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print([p.detach().double().nan_to_num().sum().item() for p in model.parameters()])
