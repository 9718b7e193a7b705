"""A GAN with a guard for each network. The losses go up and down by design; neither guard acts on that.

python examples/gan.py
"""

import torch
from torch import nn
from torch.nn import functional as F

from steadygrad import Guard

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
options = {"lr": 1e-3, "betas": (0.5, 0.9)}
making = Guard(generator, torch.optim.Adam(generator.parameters(), **options), run_dir="runs/gan/generator")
judging = Guard(discriminator, torch.optim.Adam(discriminator.parameters(), **options), run_dir="runs/gan/judge")


def draw(count):
    """Points on a ring."""
    angle = torch.rand(count, 1) * 2 * torch.pi
    return torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


def judge(real, noise):
    fake = generator(noise).detach()
    return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()


def make(noise):
    return F.softplus(-discriminator(generator(noise))).mean()


for step in range(600):
    real = draw(128)
    if step == 300:
        real[:] = float("nan")  # a corrupt file in the data
    judging.step(judge, real, torch.randn(128, 4))
    making.step(make, torch.randn(128, 4))

with torch.no_grad():
    distance = (generator(torch.randn(1000, 4)).norm(dim=1) - 1).abs().mean()
for name, guard in {"generator": making, "discriminator": judging}.items():
    guard.close()
    stats = guard.stats()
    print(f"{name}: {stats['num_skipped']} skipped, {stats['num_rollbacks']} rollbacks")
print(f"mean distance from the ring: {distance:.2f}")
