"""Two optimizers, as in torch's DCGAN tutorial; the generator's batch may contain a NaN once."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="step at which the generator's noise is NaN")
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

for step in range(8):
    real = torch.randn(8, 2) + 3
    netD.zero_grad()
    criterion(netD(real), torch.ones(8, 1)).backward()
    fake = netG(torch.randn(8, 4))
    criterion(netD(fake.detach()), torch.zeros(8, 1)).backward()
    optimizerD.step()

    netG.zero_grad()
    noise = torch.randn(8, 4)
    if step == args.poison:
        noise[0] = float("nan")
    criterion(netD(netG(noise)), torch.ones(8, 1)).backward()
    optimizerG.step()
torch.save({"G": netG.state_dict(), "D": netD.state_dict()}, args.out)
