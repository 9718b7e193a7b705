"""A plain loop with a guard. One row of a batch is zero, and the step divides by its norm: the guard skips the step.

python examples/plain_loop.py
"""

import torch
from torch import nn

from steadygrad import Guard

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def training_step(x, y):
    x = x / x.norm(dim=1, keepdim=True)  # 0 / 0 where a row is empty
    return nn.functional.mse_loss(model(x), y)


with Guard(model, optimizer, run_dir="runs/plain_loop") as guard:
    for step in range(200):
        x = torch.randn(32, 16)
        y = x.sum(1, keepdim=True).sign()
        if step == 120:
            x[5] = 0.0
        guard.step(training_step, x, y)

print(guard.incidents[-1].cause)
print(f"{guard.stats()['num_skipped']} of 200 steps skipped; healthy: {guard.health()['overall_healthy']}")
print("Next: steadygrad report runs/plain_loop")
