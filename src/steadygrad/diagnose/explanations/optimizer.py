"""Values born in the optimizer's own arithmetic, after finite gradients."""

from __future__ import annotations

from steadygrad.diagnose.explanations.entry import OPTIMIZER, Entry
from steadygrad.diagnose.explanations.evidence import count_zeros, show_largest

ENTRIES = (
    Entry(
        name="optimizer_divides_by_zero",
        ops=("addcdiv", "div", "fused_adam", "fused_adamw", "reciprocal", "rsqrt"),
        phases=OPTIMIZER,
        why="the second moment and eps are both 0, so the optimizer divides by 0: in float16 the square of "
        "a gradient below 1e-4 is 0, and so is Adam's eps of 1e-8",
        evidence=count_zeros(-1),
        fixes=("torch.optim.Adam(params, eps=1e-4)", "torch.optim.Adam([p.data.float() for p in params])"),
    ),
    Entry(
        name="optimizer_squares_overflow",
        ops=("addcmul",),
        phases=OPTIMIZER,
        kinds=("inf",),
        why="the square of a gradient leaves the range of the dtype, so the second moment is Inf and stays Inf",
        evidence=show_largest(),
        fixes=("nn.utils.clip_grad_norm_(params, 1.0)", "nn.utils.clip_grad_value_(params, 1.0)"),
    ),
    Entry(
        name="update_overflow",
        ops=("add", "sub", "mul", "lerp", "fused_sgd"),
        phases=OPTIMIZER,
        why="the update is larger than the dtype can hold: the learning rate or a momentum has run away",
        evidence=show_largest(),
        fixes=("torch.optim.SGD(params, lr=1e-3)", "nn.utils.clip_grad_norm_(params, 1.0)"),
    ),
)
