"""Exponentials and related functions, which overflow at 88 in float32 and 11 in float16, and the ones that do not."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    HALF,
    comes_from,
    either,
    feeds,
    goes_to,
    in_dtype,
    in_module,
    is_single,
    is_written,
    made_by,
)
from steadygrad.diagnose.explanations.entry import FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import show_largest

EXPONENTIALS = ("exp", "exp2")

ENTRIES = (
    Entry(
        name="exp_overflow",
        ops=EXPONENTIALS,
        # The logarithm of the largest number: 88.7 in float32, 11.1 in float16
        why="exp overflows above 88.7 in float32 and bfloat16",
        evidence=show_largest(),
        fixes=(
            "torch.exp(x.clamp_max(80.0))",
            "torch.exp(x - x.amax())",
            "torch.where(x > 0, x + 1, torch.exp(-F.relu(-x)))",
        ),
    ),
    Entry(
        name="exp_overflow_in_half",
        ops=EXPONENTIALS,
        conditions=(in_dtype(*HALF),),
        why="exp overflows above 11.1 in float16",
        evidence=show_largest(),
        fixes=("torch.exp(x.clamp_max(11.0))", "torch.exp(x.float() - x.float().amax())"),
    ),
    Entry(
        name="log_variance_overflow",
        ops=EXPONENTIALS,
        conditions=(is_written("logvar", "log_var", "logstd", "log_std", "logsigma", "log_sigma"),),
        why="a predicted log-variance has no bound: exp overflows above 88.7, and squares of its result far below",
        evidence=show_largest(),
        fixes=("torch.exp(x.clamp(-15.0, 10.0))", "torch.exp(10 - F.softplus(10 - x))"),
    ),
    Entry(
        name="softmax_by_hand",
        ops=EXPONENTIALS,
        conditions=(feeds("sum", "div"), goes_to("div")),
        why="exp(x) / exp(x).sum() overflows above 88.7 although the quotient lies between 0 and 1",
        evidence=show_largest(),
        fixes=("torch.softmax(x, dim=-1)", "torch.exp(x - torch.logsumexp(x, dim=-1, keepdim=True))"),
    ),
    Entry(
        name="logsumexp_by_hand",
        ops=EXPONENTIALS,
        conditions=(feeds("sum"), goes_to("log")),
        why="log(exp(x).sum()) overflows inside above 88.7 although the result is about max(x)",
        evidence=show_largest(),
        fixes=("torch.logsumexp(x, dim=-1)", "x.amax(-1) + torch.log(torch.exp(x - x.amax(-1, keepdim=True)).sum(-1))"),
    ),
    Entry(
        name="softplus_by_hand",
        ops=EXPONENTIALS,
        conditions=(feeds("add", "log1p"), goes_to("log", "log1p")),
        why="log(1 + exp(x)) overflows inside above 88.7 although the result is about x",
        evidence=show_largest(),
        fixes=("F.softplus(x)", "torch.logaddexp(x, torch.zeros_like(x))", "-F.logsigmoid(-x)"),
    ),
    Entry(
        name="sigmoid_by_hand",
        ops=EXPONENTIALS,
        conditions=(either(made_by("neg"), feeds("add")), either(made_by("neg"), goes_to("reciprocal", "div"))),
        why="exp(-x) overflows below x = -88.7; in 1 / (1 + exp(-x)) the value is still right, and the "
        "derivative 0 * inf = NaN",
        evidence=show_largest(),
        fixes=("torch.sigmoid(x)", "0.5 * (1 + torch.tanh(x / 2))"),
    ),
    Entry(
        name="inverse_softplus_by_hand",
        ops=EXPONENTIALS,
        conditions=(feeds("sub"), goes_to("log")),
        why="log(exp(x) - 1) overflows inside above 88.7 although the result is about x",
        evidence=show_largest(),
        fixes=("x + torch.log(-torch.expm1(-x))", "x + torch.log1p(-torch.exp(-x))"),
    ),
    Entry(
        name="tanh_by_hand",
        ops=EXPONENTIALS,
        conditions=(feeds("sub"), goes_to("div")),
        why="the exponentials of a hyperbolic tangent overflow above 88.7, and inf / inf is NaN",
        evidence=show_largest(),
        fixes=("torch.tanh(x)", "2 * torch.sigmoid(2 * x) - 1"),
    ),
    Entry(
        name="learned_temperature_overflow",
        ops=EXPONENTIALS,
        conditions=(is_single(), feeds("mul", "div")),
        why="one number is exponentiated and overflows: a learned scale exp(logit_scale), which CLIP caps at 100",
        evidence=show_largest(),
        fixes=(
            "x * logit_scale.clamp(max=math.log(100.0)).exp()",
            "x * (100.0 * torch.sigmoid(logit_scale))",
        ),
    ),
    Entry(
        name="learned_temperature_overflow_in_half",
        ops=("mul",),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF), made_by("exp"), either(is_single(0), is_single(1))),
        why="logits times a learned scale exp(logit_scale) exceed 65504 in float16; CLIP caps the scale at 100",
        evidence=show_largest(0, 1),
        fixes=(
            "x * logit_scale.clamp(max=math.log(100.0)).exp()",
            "x * (100.0 * torch.sigmoid(logit_scale))",
        ),
    ),
    Entry(
        name="probability_ratio_overflow",
        ops=EXPONENTIALS,
        conditions=(comes_from("sub"), feeds("mul", "clamp")),
        why="exp of a difference overflows above 88.7: the ratio exp(new - old) of distant log-probabilities",
        evidence=show_largest(),
        fixes=(
            "torch.exp((new - old).clamp(-20.0, 20.0)) * advantage",
            "torch.exp(new - new.detach()) * advantage",
        ),
    ),
    Entry(
        name="poisson_rate_overflow",
        ops=EXPONENTIALS,
        conditions=(in_module("PoissonNLLLoss"),),
        why="PoissonNLLLoss takes log rates: exp of a prediction above 88.7 overflows",
        evidence=show_largest(),
        fixes=(
            "F.poisson_nll_loss(x.clamp_max(20.0), target)",
            "F.poisson_nll_loss(F.softplus(x), target, log_input=False)",
        ),
    ),
    Entry(
        name="expm1_overflow",
        ops=("expm1",),
        why="exp(x) - 1 overflows above 88.7 in float32, above 11.1 in float16",
        evidence=show_largest(),
        fixes=("torch.expm1(x.clamp_max(80.0))", "F.elu(-F.relu(-x)) + F.relu(x)"),
    ),
    Entry(
        name="hyperbolic_overflow",
        ops=("sinh", "cosh"),
        why="sinh and cosh overflow beyond 89.4 in float32 (11.7 in float16), like exp(abs(x)) / 2",
        evidence=show_largest(),
        fixes=("torch.cosh(x.clamp(-80.0, 80.0))", "torch.logaddexp(x, -x) - math.log(2)"),
    ),
    Entry(
        name="log_cosh_by_hand",
        ops=("cosh",),
        conditions=(feeds("log"),),
        why="log(cosh(x)) overflows inside beyond 89.4 although the result is about abs(x) - log(2)",
        evidence=show_largest(),
        fixes=("x + F.softplus(-2 * x) - math.log(2)", "torch.logaddexp(x, -x) - math.log(2)"),
    ),
    Entry(
        name="bessel_overflow",
        ops=("i0", "special_i0", "special_i1"),
        why="the Bessel function grows like exp(abs(x)) and overflows beyond 91 in float32",
        evidence=show_largest(),
        fixes=("torch.log(torch.special.i0e(x)) + x.abs()", "torch.log(torch.special.i0(x.clamp(-80.0, 80.0)))"),
    ),
)
