"""Mixed precision and gradient accumulation: four microbatches per step, one of them bad.

On a GPU the loss is scaled for float16; on a CPU autocast uses bfloat16 and needs no scaler.

    python examples/amp_accumulation.py
"""

import torch
from torch import nn

from steadygrad import Guard

ACCUMULATION = 4
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
scaler = torch.amp.GradScaler(device) if device == "cuda" else None

model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).to(device)
model(torch.zeros(2, 1, 12, 12, device=device))  # sets the size of the lazy layer
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)


def training_step(images, labels):
    with torch.autocast(device, dtype=dtype):
        return nn.functional.cross_entropy(model(images), labels) / ACCUMULATION  # the guard never divides


with Guard(model, optimizer, scaler=scaler, scheduler=scheduler, run_dir="runs/amp") as guard:
    for step in range(50):
        for microbatch in range(ACCUMULATION):
            images = torch.randn(16, 1, 12, 12, device=device)
            if (step, microbatch) == (30, 2):
                images[0] = float("inf")
            guard.backward(training_step, images, torch.randint(10, (16,), device=device))
        guard.step()  # clips, steps or skips, and moves the scheduler

finite = all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
print(f"skipped: {[i.step for i in guard.incidents]}; weights and BatchNorm statistics finite: {finite}")
