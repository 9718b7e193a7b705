"""Unusual things that scripts do with models and optimizers. Each is checked in place."""

import argparse
import copy
import gc
import io
import pickle
import weakref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NAN = float("nan")
parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()
torch.manual_seed(0)


def fit(model, optimizer, num_steps=3, call=None):
    for _ in range(num_steps):
        optimizer.zero_grad()
        (call or model)(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return model


# A compiled optimizer step, a copied optimizer, a scripted model, an average of a model.
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled_step = torch.compile(lambda: optimizer.step(), backend="eager")
model(torch.randn(6, 4)).sum().backward()
compiled_step()
fit(model, copy.deepcopy(optimizer))
torch.save(optimizer, io.BytesIO())
pickle.dumps(model)
torch.jit.script(model)
torch.optim.swa_utils.AveragedModel(model).update_parameters(model)

# Backward inside backward.
blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
fit(
    blocks,
    torch.optim.AdamW(blocks.parameters()),
    call=lambda x: blocks[1](checkpoint(blocks[0], x.requires_grad_(), use_reentrant=True)),
)


# A model and an optimizer that are dropped.
def fold():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, optimizer)
    return weakref.ref(model), weakref.ref(optimizer)


gone = fold()
gc.collect()
assert all(one() is None for one in gone)


# An optimizer that wraps another one, which needs its closure midway.
class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)
            p.grad = None
        with torch.enable_grad():
            closure()
        for p in parameters:
            p.copy_(self.state[p]["old"])
        self.base.step()


sharp = nn.Linear(4, 1)
optimizer = SAM(sharp.parameters(), torch.optim.SGD, lr=0.1)
for step in range(4):
    x = torch.randn(6, 4)

    def closure(x=x, step=step):
        loss = sharp(x).square().mean() * (NAN if step == 2 else 1)
        loss.backward()
        return loss

    sharp(x).square().mean().backward()
    optimizer.step(closure)
    optimizer.zero_grad()

# A tensor and two models in one optimizer; parameters added later; sparse gradients.
shift = torch.zeros(4, requires_grad=True)
first, second = nn.Linear(4, 4), nn.Linear(4, 1)
optimizer = torch.optim.RMSprop([{"params": [shift]}, {"params": first.parameters()}], lr=0.1)
optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
for step in range(3):
    optimizer.zero_grad()
    loss = second(first(torch.randn(2, 4) + shift)).square().mean()
    (loss * NAN if step == 1 else loss).backward()
    optimizer.step()
embedding = nn.Embedding(5, 3, sparse=True)
optimizer = torch.optim.SparseAdam(embedding.parameters())
embedding(torch.tensor([1, 2])).sum().backward()
optimizer.step()
torch.save({"shift": shift, "sharp": sharp.state_dict(), "first": first.state_dict()}, args.out)
