"""Cures for logarithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cure import CONSTANT, Cure, Names, half, t

FAR = torch.tensor([[0.0, 200.0, 1.0], [3.0, 1.0, 2.0]])
NEAR = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0]])


def to_probability(result: Tensor, names: Names) -> Tensor:
    """Map a log-probability of -inf to the probability 0: its value is finite, its gradient is not."""
    return torch.exp(result)


def add_mask(names: Names) -> Names:
    return {"x": names["raw"] + torch.zeros(2, 3).masked_fill(~names["mask"], -math.inf)}


def start_lattice(names: Names) -> Names:
    """Start the forward algorithm: no path has reached the first state yet."""
    x = names["raw"] + torch.zeros(2).masked_fill(names["raw"] < 0, -math.inf)
    return {"x": x, "y": x + 0.5}


CURES = {
    "log_of_softmax": Cure(broken="torch.log(torch.softmax(x, dim=-1))", sick={"x": FAR}, healthy={"x": NEAR}),
    "log_of_chosen_probability": Cure(
        broken="torch.log(torch.softmax(x, dim=-1)).gather(-1, chosen[:, None])[:, 0]",
        also=("torch.log(torch.softmax(x, dim=-1)[torch.arange(2), chosen])",),
        sick={"x": FAR, "chosen": torch.tensor([0, 1])},
        healthy={"x": NEAR},
    ),
    "log_of_sigmoid": Cure(broken="torch.log(torch.sigmoid(x))", sick={"x": t(-200, 1)}, healthy={"x": t(-2, 1)}),
    "binary_cross_entropy_by_hand": Cure(
        broken="-((1 - target) * torch.log(1 - torch.sigmoid(x))).mean() - (target * F.logsigmoid(x)).mean()",
        sick={"x": t(40, 1), "target": t(0, 1)},
        healthy={"x": t(4, 1)},
    ),
    "log_of_summed_exponentials": Cure(
        broken="torch.log(torch.exp(x).sum(-1))", sick={"x": -200 + 0 * NEAR}, healthy={"x": NEAR}
    ),
    "log_of_product_of_probabilities": Cure(
        broken="torch.log(x.prod(-1))", sick={"x": torch.full((2, 8), 1e-8)}, healthy={"x": torch.full((2, 8), 0.5)}
    ),
    "log_of_one_minus_tanh_squared": Cure(
        broken="torch.log(1 - torch.tanh(x) ** 2)", sick={"x": t(30, 1)}, healthy={"x": t(3, 1)}
    ),
    "log_of_one_minus_exponential": Cure(
        broken="torch.log(1 - torch.exp(x))", sick={"x": t(0, -1)}, healthy={"x": t(-2, -1)}
    ),
    "log_of_normal_tail": Cure(
        broken="torch.log(torch.special.ndtr(x))",
        also=("torch.log(torch.distributions.Normal(0.0, 1.0).cdf(x))", "torch.log(torch.erfc(-x) / 2)"),
        sick={"x": t(-40, 1)},
        healthy={"x": t(-1, 1)},
    ),
    "log_eps_lost_in_half": Cure(
        broken="torch.log(x + 1e-8)", sick={"x": half(0, 1)}, healthy={"x": half(2, 1)}, tolerance=1e-2
    ),
    "log_of_uniform_noise": Cure(
        broken="x - torch.log(-torch.log(torch.rand(x.shape, dtype=x.dtype)))",
        sick={"x": torch.zeros(30000, dtype=torch.float16)},
    ),
    "entropy_at_zero": Cure(
        broken="-(p * torch.log(p)).sum()",
        also=("-(p.log() * p).sum()",),
        sick={"p": t(0, 0.5, 0.5)},
        healthy={"p": t(0.2, 0.4, 0.4)},
        learned=("p",),
    ),
    "log_of_zero": Cure(
        broken="torch.log(x)",
        also=(
            "torch.log2(x)",
            "torch.log10(x)",
        ),
        sick={"x": t(0, 1, 4)},
        healthy={"x": t(2, 1, 4)},
    ),
    "log_of_negative": Cure(
        broken="torch.log(x)",
        also=(
            "torch.log2(x)",
            "torch.log10(x)",
        ),
        sick={"x": t(-1, 1, 4)},
        healthy={"x": t(2, 1, 4)},
    ),
    "log_slope_overflow": Cure(broken="torch.log(x)", sick={"x": t(1e-40, 1, 4)}, healthy={"x": t(2, 1, 4)}),
    "log1p_below_minus_one": Cure(broken="torch.log1p(x)", sick={"x": t(-1, 1, -2)}, healthy={"x": t(2, 1, 4)}),
    "xlogy_at_zero": Cure(
        broken="torch.xlogy(x, y)",
        also=(
            "torch.special.xlogy(x, y)",
            "torch.special.xlog1py(x, y - 1)",
        ),
        sick={"x": t(0, 1), "y": t(0, 2)},
        healthy={"y": t(1, 2)},
        learned=("x", "y"),
    ),
    "divergence_by_its_target": Cure(
        broken="F.kl_div(F.log_softmax(x, -1), torch.softmax(y, -1), reduction='batchmean')",
        sick={"x": NEAR, "y": FAR},
        healthy={"y": NEAR.flip(0)},
        learned=("x", "y"),
        differs={"F.kl_div(F.log_softmax(x, -1), torch.softmax(y, -1).detach(), reduction='batchmean')": CONSTANT},
    ),
    "entr_at_zero": Cure(broken="torch.special.entr(x)", sick={"x": t(0, 0.5)}, healthy={"x": t(0.3, 0.5)}),
    "logit_at_bounds": Cure(broken="torch.logit(x)", sick={"x": t(0, 0.5, 1)}, healthy={"x": t(0.2, 0.5, 0.9)}),
    "logsumexp_over_nothing": Cure(
        broken="torch.logsumexp(x, dim=-1)",
        sick={"raw": NEAR, "mask": torch.tensor([[False, False, False], [True, True, False]])},
        healthy={"mask": torch.tensor([[True, False, True], [True, True, False]])},
        learned=("raw",),
        derive=add_mask,
        apply=to_probability,
    ),
    "logaddexp_of_nothing": Cure(
        broken="torch.logaddexp(x, y)",
        also=("torch.logcumsumexp(torch.stack([x, y]), 0)",),
        sick={"raw": t(-9, 1)},
        healthy={"raw": t(2, 1)},
        learned=("raw",),
        derive=start_lattice,
        apply=to_probability,
    ),
}
