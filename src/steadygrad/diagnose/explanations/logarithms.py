"""Logarithms at and below 0, and the fused functions that avoid them."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    HALF,
    both,
    comes_from,
    either,
    feeds,
    goes_to,
    has_negatives,
    has_zeros,
    in_dtype,
    made_by,
)
from steadygrad.diagnose.explanations.entry import BACKWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_infs, count_negatives, count_zeros, show_range

LOGS = ("log", "log2", "log10")
PICKS = ("gather", "index", "index_select")
NOISE = ("rand", "rand_like", "uniform")

OF_PROBABILITIES = (
    Entry(
        name="log_of_softmax",
        ops=LOGS,
        conditions=(has_zeros(), made_by("softmax")),
        why="softmax gives exactly 0 for a class far below the best one, and log(0) is -inf",
        evidence=count_zeros(),
        fixes=("F.log_softmax(x, dim=-1)", "steadygrad.losses.safe_log(torch.softmax(x, dim=-1))"),
    ),
    Entry(
        name="log_of_chosen_probability",
        ops=LOGS,
        conditions=(
            has_zeros(),
            comes_from("softmax"),
            # A product after the pick, as with a weight of 0, may be what made the zero.
            either(made_by(*PICKS), both(made_by("softmax"), goes_to(*PICKS))),
        ),
        why="the chosen class or action has a probability of exactly 0, and log(0) is -inf",
        evidence=count_zeros(),
        fixes=(
            "F.log_softmax(x, dim=-1).gather(-1, chosen[:, None])[:, 0]",
            "-F.cross_entropy(x, chosen, reduction='none')",
            "torch.distributions.Categorical(logits=x).log_prob(chosen)",
        ),
    ),
    Entry(
        name="log_of_sigmoid",
        ops=LOGS,
        conditions=(has_zeros(), made_by("sigmoid")),
        why="sigmoid gives exactly 0 for a very negative logit, and log(0) is -inf",
        evidence=count_zeros(),
        fixes=("F.logsigmoid(x)", "torch.log(torch.sigmoid(x) + eps)", "steadygrad.losses.safe_log(torch.sigmoid(x))"),
    ),
    Entry(
        name="binary_cross_entropy_by_hand",
        ops=LOGS,
        conditions=(has_zeros(), comes_from("sigmoid"), made_by("rsub", "sub")),
        why="1 - sigmoid(x) rounds to 0 above x = 17 in float32, and log(0) is -inf",
        evidence=count_zeros(),
        fixes=(
            "F.binary_cross_entropy_with_logits(x, target)",
            "steadygrad.losses.stable_bce_with_logits(x, target)",
            "-(target * F.logsigmoid(x) + (1 - target) * F.logsigmoid(-x)).mean()",
        ),
    ),
    Entry(
        name="log_of_summed_exponentials",
        ops=LOGS,
        conditions=(has_zeros(), made_by("sum"), comes_from("exp")),
        why="every exponential rounded to 0, and so did their sum: log(0) is -inf",
        evidence=count_zeros(),
        fixes=("torch.logsumexp(x, dim=-1)", "x.amax(-1) + torch.log(torch.exp(x - x.amax(-1, keepdim=True)).sum(-1))"),
    ),
    Entry(
        name="log_of_product_of_probabilities",
        ops=LOGS,
        conditions=(has_zeros(), comes_from("prod", "cumprod")),
        why="a product of many small probabilities underflows to 0, and log(0) is -inf",
        evidence=count_zeros(),
        fixes=("torch.log(x).sum(-1)", "steadygrad.losses.safe_log(x).sum(-1)"),
    ),
    Entry(
        name="log_of_one_minus_tanh_squared",
        ops=LOGS,
        conditions=(has_zeros(), comes_from("tanh"), made_by("rsub", "sub")),
        why="tanh rounds to 1 above x = 9 in float32, so 1 - tanh(x)**2 is 0 and its log -inf",
        evidence=count_zeros(),
        fixes=("2 * (math.log(2) - x - F.softplus(-2 * x))", "torch.log(1 - torch.tanh(x).square() + eps)"),
    ),
    Entry(
        name="log_of_one_minus_exponential",
        ops=LOGS,
        conditions=(has_zeros(), comes_from("exp"), made_by("rsub", "sub")),
        why="1 - exp(x) is 0 at x = 0, and rounds to 0 near it: log(0) is -inf",
        evidence=count_zeros(),
        fixes=("torch.log(-torch.expm1(x.clamp_max(-eps)))", "torch.log1p(-torch.exp(x.clamp_max(-eps)))"),
    ),
    Entry(
        name="log_of_normal_tail",
        ops=LOGS,
        conditions=(has_zeros(), comes_from("erfc", "erf", "special_ndtr")),
        why="the tail of a normal distribution underflows to 0 beyond 14 deviations (5.5 when made from erf), and "
        "log(0) is -inf",
        evidence=count_zeros(),
        fixes=("torch.special.log_ndtr(x)", "torch.log(torch.special.ndtr(x) + eps)"),
    ),
    Entry(
        name="log_eps_lost_in_half",
        ops=LOGS,
        conditions=(has_zeros(), in_dtype(*HALF), made_by("add")),
        why="log(0) is -inf: an eps below 3e-8 that is added rounds to 0 in float16",
        evidence=count_zeros(),
        fixes=("torch.log(x + 1e-3)", "torch.log(x.clamp_min(1e-3))", "steadygrad.losses.safe_log(x)"),
    ),
    Entry(
        name="log_of_uniform_noise",
        ops=LOGS,
        conditions=(has_zeros(), comes_from(*NOISE)),
        why="uniform noise holds exact zeros (one in 2**11 in float16, one in 2**24 in float32), and log(0) is -inf",
        evidence=count_zeros(),
        fixes=(
            "-torch.log(torch.empty_like(x, dtype=torch.float32).exponential_())",
            "-torch.log(-torch.log(torch.rand(x.shape).clamp(eps, 1 - eps)))",
        ),
    ),
    Entry(
        name="entropy_at_zero",
        ops=LOGS,
        conditions=(has_zeros(), feeds("mul")),
        why="log(0) is -inf, and times a weight of 0, as in an entropy p * log(p), it is NaN",
        evidence=count_zeros(),
        fixes=(
            "-(p * torch.log(p.clamp_min(eps))).sum()",
            "-(p * steadygrad.losses.safe_log(p)).sum()",
        ),
    ),
)

PLAIN = (
    Entry(
        name="log_of_zero",
        ops=LOGS,
        conditions=(has_zeros(),),
        why="log(0) is -inf, and its derivative 1 / 0 is infinite",
        evidence=count_zeros(),
        fixes=("torch.log(x + eps)", "torch.log(x.clamp_min(eps))", "steadygrad.losses.safe_log(x)"),
    ),
    Entry(
        name="log_of_negative",
        ops=LOGS,
        conditions=(has_negatives(),),
        kinds=("nan",),
        why="the logarithm of a negative number is NaN",
        evidence=count_negatives(),
        fixes=("torch.log(x.clamp_min(eps))", "steadygrad.losses.safe_log(x)"),
    ),
    Entry(
        name="log_slope_overflow",
        ops=LOGS,
        phases=BACKWARD,
        why="the derivative 1 / x of log is too large to hold for a tiny x",
        evidence=show_range(),
        fixes=("torch.log(x.clamp_min(eps))", "torch.log(x + eps)"),
    ),
    Entry(
        name="log1p_below_minus_one",
        ops=("log1p",),
        why="log(1 + x) is -inf at -1 and NaN below it",
        evidence=show_range(),
        fixes=("torch.log1p(x.clamp_min(eps - 1))", "torch.log1p(F.relu(x))", "steadygrad.losses.safe_log(1 + x)"),
    ),
    Entry(
        name="xlogy_at_zero",
        ops=("xlogy", "special_xlogy", "special_xlog1py"),
        why="x * log(y) needs y above 0; even where x is 0 and the value is 0, the derivative by y is x / y = 0 / 0",
        evidence=show_range(1),
        fixes=("torch.xlogy(x, y.clamp_min(eps))", "x * steadygrad.losses.safe_log(y)"),
    ),
    Entry(
        name="divergence_by_its_target",
        ops=("xlogy", "special_xlogy"),
        phases=BACKWARD,
        conditions=(has_zeros(1), comes_from("softmax")),
        why="the target of the divergence has a gradient too, and where it is 0 the derivative of "
        "target * log(target) is infinite",
        evidence=count_zeros(1),
        fixes=(
            "F.kl_div(F.log_softmax(x, -1), torch.softmax(y, -1).detach(), reduction='batchmean')",
            "F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), log_target=True, reduction='batchmean')",
            "steadygrad.losses.stable_kl(F.log_softmax(x, -1), F.log_softmax(y, -1), log_target=True)",
        ),
    ),
    Entry(
        name="entr_at_zero",
        ops=("special_entr",),
        phases=BACKWARD,
        why="the derivative of -x * log(x) is infinite at 0",
        evidence=count_zeros(),
        fixes=("torch.special.entr(x.clamp_min(eps))", "-x * torch.log(x.clamp_min(eps))"),
    ),
    Entry(
        name="logit_at_bounds",
        ops=("logit",),
        why="logit(p) is infinite at p = 0 and p = 1, and NaN outside",
        evidence=show_range(),
        fixes=("torch.logit(x, eps=eps)", "torch.logit(x.clamp(eps, 1 - eps))"),
    ),
    Entry(
        name="logsumexp_over_nothing",
        ops=("logsumexp",),
        why="every element of a row is -inf: the value is -inf, and its derivative softmax(x) is NaN",
        evidence=count_infs(),
        fixes=(
            "torch.logsumexp(x.clamp_min(torch.finfo(x.dtype).min), dim=-1)",
            "torch.where(mask.any(-1), torch.logsumexp(torch.where(mask.any(-1, keepdim=True), x, 0.0), dim=-1), 0.0)",
        ),
    ),
    Entry(
        name="logaddexp_of_nothing",
        ops=("logaddexp", "logaddexp2", "logcumsumexp"),
        why="-inf and -inf are added in log space: the value is -inf, and its derivative exp(-inf + inf) is NaN",
        evidence=count_infs(),
        fixes=(
            "torch.logaddexp(x.clamp_min(-1e30), y.clamp_min(-1e30))",
            "torch.logsumexp(torch.stack([x, y]).clamp_min(torch.finfo(x.dtype).min), dim=0)",
        ),
    ),
)

ENTRIES = OF_PROBABILITIES + PLAIN
