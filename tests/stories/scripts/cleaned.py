"""A script that cleans its gradients between backward and step; the last two ways leave a bad loss as it is."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

BATCH_OF_NAN = 7
NUM_STEPS = 60


def clean(parameters: list[Tensor]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)


def train(way: str) -> nn.Module:
    """Train on batches of which one in twenty holds a NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
    for step in range(NUM_STEPS):
        x = torch.randn(32, 4)
        is_bad = step % 20 == BATCH_OF_NAN
        optimizer.zero_grad()
        for part in x.chunk(2) if way == "microbatches" else [x]:
            loss = (model(part) - part[:, :2].tanh()).square().mean()
            if is_bad and way.startswith("finite gradients"):
                loss = loss + torch.tensor(float("nan"))  # its gradients are those of the loss without it
            elif is_bad:
                loss = loss * float("nan")
            loss.backward()
            if way == "microbatches":
                clean(parameters)
                is_bad = False
        if way == "after a clip":
            nn.utils.clip_grad_norm_(parameters, 1.0)
        if way in ("in place", "after a clip"):
            clean(parameters)
        elif way == "anew":
            for p in parameters:
                p.grad = torch.nan_to_num(p.grad)  # type: ignore[arg-type]
        elif way == "finite gradients, divided":
            for p in parameters:
                p.grad /= 2  # type: ignore[operator]
        elif way == "finite gradients, clipped":
            nn.utils.clip_grad_norm_(parameters, 0.01)
            nn.utils.clip_grad_value_(parameters, 0.001)
        optimizer.step()
    return model


if __name__ == "__main__":
    print([p.double().sum().item() for p in train(sys.argv[1]).parameters()])
