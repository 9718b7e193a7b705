"""A compiled model in one graph; one batch may be NaN. The backend is eager: only the graph matters here."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="step whose batch is NaN")
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
model = torch.compile(model, fullgraph=True, backend="eager")
for step in range(8):
    x = torch.randn(16, 8)
    if step == args.poison:
        x[3] = float("nan")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)
