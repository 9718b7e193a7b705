"""Cures for exponentials."""

from __future__ import annotations

import torch

from .cure import Cure, half, t

BOUNDED = "is linear above 0"
RELATIVE = "is relative to the largest"
IN_LOGS = "is the logarithm"
LARGE = torch.tensor([[100.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
SMALL = torch.tensor([[1.0, 1.0, 2.0], [3.0, 1.0, 2.0]])

CURES = {
    "exp_overflow": Cure(
        broken="torch.exp(x)",
        also=("torch.exp2(x * 2)",),
        sick={"x": t(100, 1)},
        healthy={"x": t(2, 1)},
        differs={"torch.where(x > 0, x + 1, torch.exp(-F.relu(-x)))": BOUNDED, "torch.exp(x - x.amax())": RELATIVE},
    ),
    "log_variance_overflow": Cure(
        broken="torch.exp(x)",
        sick={"x": t(200, 1)},
        healthy={"x": t(2, 1)},
        unseen="an expression has no line from which a name could be read",
    ),
    "exp_overflow_in_half": Cure(
        broken="torch.exp(x)",
        sick={"x": half(12, 1)},
        healthy={"x": half(2, 1)},
        tolerance=1e-2,
        differs={"torch.exp(x.float() - x.float().amax())": RELATIVE},
    ),
    "softmax_by_hand": Cure(
        broken="torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)",
        also=("x.exp() / x.exp().sum(1, keepdim=True)",),
        sick={"x": LARGE},
        healthy={"x": SMALL},
    ),
    "logsumexp_by_hand": Cure(broken="torch.log(torch.exp(x).sum(-1))", sick={"x": LARGE}, healthy={"x": SMALL}),
    "softplus_by_hand": Cure(
        broken="torch.log(1 + torch.exp(x))",
        also=("torch.log1p(torch.exp(x))",),
        sick={"x": LARGE},
        healthy={"x": SMALL},
    ),
    "sigmoid_by_hand": Cure(broken="1 / (1 + torch.exp(-x))", sick={"x": -LARGE}, healthy={"x": SMALL}),
    "inverse_softplus_by_hand": Cure(broken="torch.log(torch.exp(x) - 1)", sick={"x": LARGE}, healthy={"x": SMALL}),
    "tanh_by_hand": Cure(
        broken="(torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x))",
        sick={"x": LARGE},
        healthy={"x": SMALL},
    ),
    "learned_temperature_overflow": Cure(
        broken="x * torch.exp(logit_scale)",
        sick={"x": t(1, 2), "logit_scale": torch.tensor(100.0)},
        healthy={"logit_scale": torch.tensor(2.0)},
        learned=("x", "logit_scale"),
        differs={"x * (100.0 * torch.sigmoid(logit_scale))": "bounds the scale smoothly"},
    ),
    "learned_temperature_overflow_in_half": Cure(
        broken="x * torch.exp(logit_scale)",
        sick={"x": half(1, 2), "logit_scale": torch.tensor(12.0)},
        healthy={"logit_scale": torch.tensor(2.0)},
        learned=("x", "logit_scale"),
        differs={"x * (100.0 * torch.sigmoid(logit_scale))": "bounds the scale smoothly"},
        tolerance=1e-2,
    ),
    "probability_ratio_overflow": Cure(
        broken="torch.exp(new - old) * advantage",
        sick={"new": t(0, -1), "old": t(-100, -1), "advantage": t(1, 2)},
        healthy={"old": t(0, -1)},
        learned=("new",),
    ),
    "poisson_rate_overflow": Cure(
        broken="loss(x, target)",
        sick={"x": t(100, 1), "target": t(1, 2), "loss": torch.nn.PoissonNLLLoss()},
        healthy={"x": t(2, 1)},
        differs={"F.poisson_nll_loss(F.softplus(x), target, log_input=False)": "predicts rates, not their logarithms"},
    ),
    "expm1_overflow": Cure(
        broken="torch.expm1(x)",
        also=("torch.special.expm1(x)",),
        sick={"x": t(100, 1)},
        healthy={"x": t(2, 1)},
        differs={"F.elu(-F.relu(-x)) + F.relu(x)": BOUNDED},
    ),
    "hyperbolic_overflow": Cure(
        broken="torch.cosh(x)",
        also=("torch.sinh(x)",),
        sick={"x": t(100, 1)},
        healthy={"x": t(2, 1)},
        differs={"torch.logaddexp(x, -x) - math.log(2)": IN_LOGS},
    ),
    "log_cosh_by_hand": Cure(broken="torch.log(torch.cosh(x))", sick={"x": t(100, 1)}, healthy={"x": t(2, 1)}),
    "bessel_overflow": Cure(
        broken="torch.log(torch.special.i0(x))", also=("torch.i0(x)",), sick={"x": t(100, 1)}, healthy={"x": t(2, 1)}
    ),
}
