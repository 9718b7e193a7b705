"""Half precision: casts, scaled losses and gradients that float16 cannot hold."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import HALF, in_dtype, takes_dtype
from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import show_gradient, show_largest

ENTRIES = (
    Entry(
        name="cast_overflow",
        ops=("to_copy", "to", "copy", "half", "type"),
        phases=FORWARD,
        kinds=("inf",),
        why="the value is larger than the dtype that it was cast to can hold",
        evidence=show_largest(),
        fixes=(
            "x.to(torch.bfloat16)",
            "x.clamp(-65504.0, 65504.0).to(torch.float16)",
            "F.layer_norm(x, x.shape[-1:]).to(torch.float16)",
        ),
    ),
    Entry(
        name="elementwise_overflow_in_half",
        ops=("mul", "add", "sub", "div", "square", "addcmul", "neg", "baddbmm"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF),),
        why="the result exceeds 65504, the largest float16",
        evidence=show_largest(0, 1),
        fixes=("x.float() * y.float()", "x.to(torch.bfloat16) * y.to(torch.bfloat16)", "(x / 256) * (y / 256)"),
    ),
    Entry(
        name="elementwise_overflow",
        ops=("mul", "add", "sub", "square", "addcmul", "sum", "mean", "cumsum", "std", "var", "std_mean", "var_mean"),
        phases=FORWARD,
        kinds=("inf",),
        why="values have grown until they left the range of the dtype: a loop or a stack of layers without a norm",
        evidence=show_largest(0, 1),
        fixes=("torch.tanh(x) * torch.tanh(y)", "x.clamp(-1e6, 1e6) * y.clamp(-1e6, 1e6)"),
    ),
    Entry(
        name="gradient_overflow_in_half",
        phases=BACKWARD,
        conditions=(takes_dtype(*HALF),),
        why="the gradient exceeds 65504, the largest float16; a loss scale that is too high does that, "
        "and is then lowered",
        evidence=show_gradient,
        fixes=(
            "torch.amp.GradScaler(x.device.type, init_scale=2.0**10).scale(loss(x))",
            "loss(x) * (scale / 256)",
            "loss(x.to(torch.bfloat16))",
        ),
    ),
)
