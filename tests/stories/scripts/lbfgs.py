"""LBFGS with a closure, as in torch's documentation of optimizers; one evaluation may be NaN."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="evaluation whose loss is NaN")
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(32, 4)
y = x @ torch.randn(4, 1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
count = 0


def closure():
    global count
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    if count == args.poison:
        loss = loss * float("nan")
    count += 1
    loss.backward()
    return loss


for _ in range(5):
    optimizer.step(closure)
print("final loss", float(nn.functional.mse_loss(model(x), y)))
torch.save({"model": model.state_dict()}, args.out)
