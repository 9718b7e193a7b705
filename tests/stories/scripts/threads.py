"""Three trainings at once, each in its own thread; with --poison, number k gets a NaN at step 10 + k."""

import argparse
import sys
import threading

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--poison", action="store_true")
args = parser.parse_args()
sys.setswitchinterval(1e-5)  # as with many more threads
torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(4, 32), *[nn.Linear(32, 32) for _ in range(6)], nn.Linear(32, 1)) for _ in range(3)]


def train(number):
    model = models[number]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(number)
    for step in range(60):
        x = torch.randn(8, 4, generator=generator)
        if args.poison and step == 10 + number:
            x[0] = torch.nan
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
torch.save([model.state_dict() for model in models], args.out)
