"""Mixed precision as in torch's AMP recipe: autocast, GradScaler, unscale_, clipping. One batch may be NaN."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="step whose batch is NaN")
parser.add_argument("--overflow", type=int, default=-1, help="step whose gradients overflow at this loss scale")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=args.fused)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

scales = []
for step in range(12):
    x = torch.randn(16, 8)
    if step == args.poison:
        x[3] = float("nan")
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
    if step == args.overflow:
        loss = loss * 1e36
    scaler.scale(loss).backward()
    if not args.fused:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scales": torch.tensor(scales)}, args.out)
