"""A script that already uses a Guard, with clipping and a scheduler; one batch may be NaN."""

import argparse

import torch
from torch import nn

from steadygrad import FixedNorm, Guard, GuardConfig

parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="step whose batch is NaN")
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
with Guard(model, optimizer, config=GuardConfig(clip=FixedNorm(max_norm=0.1)), scheduler=scheduler) as guard:
    for step in range(6):
        x = torch.randn(16, 8)
        if step == args.poison:
            x[3] = float("nan")
        guard.step(lambda batch: model(batch).square().mean(), x)
print("skipped", guard.stats()["num_skipped"], "of", guard.stats()["num_steps"])
torch.save({"model": model.state_dict()}, args.out)
