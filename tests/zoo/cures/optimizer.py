"""Cures for the optimizer's arithmetic: after one step, weights and moments are inspected."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .cure import Cure, Names, half, t

QUIET = "the weights stay finite: only the moments are lost"
SAME = "the same failure as update_overflow, for an op that has no entry"


def make_params(names: Names) -> Names:
    param = nn.Parameter(names["start"].clone())
    param.grad = names["gradient"].clone()
    return {"params": [param]}


def step_once(result: object, names: Names) -> list[Tensor]:
    """Return weights and moments after a step of that optimizer, or of a plain one if the fix edits gradients."""
    if isinstance(result, torch.optim.Optimizer):
        optimizer = result
        for group in optimizer.param_groups:
            for param, given in zip(group["params"], names["params"]):
                param.grad = given.grad.to(param.dtype)
    else:
        optimizer = names["plain"](names["params"])
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [param.detach() for param in optimizer.param_groups[0]["params"]] + moments


def run_away(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e3)


CURES = {
    "optimizer_divides_by_zero": Cure(
        broken="torch.optim.Adam(params)",
        also=("torch.optim.AdamW(params)", "torch.optim.Adam(params, foreach=True)", "torch.optim.RMSprop(params)"),
        sick={"start": half(1, 2), "gradient": half(1e-5, 1e-5)},
        learned=(),
        derive=make_params,
        apply=step_once,
    ),
    "optimizer_squares_overflow": Cure(
        broken="torch.optim.Adam(params)",
        sick={"start": t(1, 2), "gradient": t(1e25, 1), "plain": torch.optim.Adam},
        learned=(),
        derive=make_params,
        apply=step_once,
        unseen=QUIET,
    ),
    "update_overflow": Cure(
        broken="torch.optim.SGD(params, lr=1e3)",
        sick={"start": t(1, 2), "gradient": t(1e37, 1), "plain": run_away},
        learned=(),
        derive=make_params,
        apply=step_once,
    ),
    "nonfinite_in_optimizer": Cure(
        broken="torch.optim.SGD(params, lr=1e3)",
        sick={"start": t(1, 2), "gradient": t(1e37, 1), "plain": run_away},
        learned=(),
        derive=make_params,
        apply=step_once,
        unseen=SAME,
    ),
}
