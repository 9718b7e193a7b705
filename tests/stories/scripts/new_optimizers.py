"""A training that creates its optimizer again every so many steps, in one of several ways."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("way", choices=["adam", "sgd", "with_schedule", "two_at_once", "scaled"])
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--poison", type=int, default=-1)
parser.add_argument("--out", required=True)
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
scaler = torch.amp.GradScaler("cpu", enabled=args.way == "scaled")
kept = []
for step in range(30):
    if step % args.every == 0:
        kind = torch.optim.SGD if args.way == "sgd" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3)
        if args.way == "with_schedule":
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        if args.way == "two_at_once":
            kept.append(optimizer)
    x = torch.randn(8, 4)
    if step == args.poison:
        x[2] = torch.nan
    optimizer.zero_grad()
    scaler.scale((model(x) - x.sum(1, keepdim=True)).square().mean()).backward()
    scaler.step(kept[step % len(kept)] if kept else optimizer)
    scaler.update()
torch.save([model.state_dict()], args.out)
