"""What can be said about an op without an entry, by kind, phase and dtype. True for every such failure, never empty."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import HALF, either, has_infs, has_nonfinite_number, in_dtype
from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, OPTIMIZER, Entry
from steadygrad.diagnose.explanations.evidence import (
    count_infs,
    count_nonfinite,
    join,
    show_gradient,
    show_largest,
    show_nonfinite_numbers,
)

ENTRIES = (
    Entry(
        name="overflow_in_half",
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF),),
        why="the op left the range of float16, which ends at 65504, or reached a pole",
        evidence=show_largest(0, 1),
        fixes=("f(x.float())", "f(x.to(torch.bfloat16))", "f(x.clamp(low, high))"),
    ),
    Entry(
        name="infinity_in_forward",
        phases=FORWARD,
        kinds=("inf",),
        why="the op gave inf: its result is too large for the dtype, or it was asked at a pole such as 1 / 0 or log(0)",
        evidence=show_largest(0, 1),
        fixes=("f(x.clamp(low, high))", "f(torch.where(ok, x, 0.0))"),
    ),
    Entry(
        name="nan_in_forward",
        phases=FORWARD,
        kinds=("nan",),
        why="the op gave NaN: its input is outside its domain, or it met 0 / 0, 0 * inf or inf - inf",
        evidence=join(show_largest(0, 1), count_infs(0), count_infs(1)),
        fixes=("f(x.clamp(low, high))", "f(torch.where(ok, x, 0.0))"),
    ),
    Entry(
        name="nan_from_infinity",
        phases=FORWARD,
        kinds=("nan",),
        # The second, since a condition on an operand holds where none was measured: here it must be known.
        conditions=(either(has_infs(0), has_infs(1)), lambda situation: bool(situation.operands)),
        why="an infinity went in and NaN came out: inf - inf, 0 * inf or inf / inf",
        evidence=join(count_infs(0), count_infs(1)),
        fixes=("f(x.clamp(low, high))", "f(torch.where(torch.isfinite(x), x, 0.0))"),
    ),
    Entry(
        name="number_not_finite",
        phases=FORWARD,
        kinds=("nan",),
        conditions=(has_nonfinite_number, lambda situation: bool(situation.operands)),
        why="a number that the op was given is Inf or NaN, from plain Python: 0 * inf and inf - inf are NaN",
        evidence=show_nonfinite_numbers,
        fixes=("f(x, number if math.isfinite(number) else 0.0)", "f(x, min(max(number, low), high))"),
    ),
    Entry(
        name="nonfinite_in_backward",
        phases=BACKWARD,
        why="the op's value is finite and its derivative is not, or overflows when multiplied with the gradient "
        "that came in",
        evidence=join(show_largest(0, 1), show_gradient),
        fixes=("f(x.clamp(low, high))", "f(torch.where(ok, x, 0.0))", "f(x.detach())"),
    ),
    Entry(
        name="nonfinite_in_optimizer",
        phases=OPTIMIZER,
        why="loss and gradients were finite and the optimizer's own arithmetic was not",
        evidence=show_largest(0, 1),
        fixes=("torch.optim.SGD(params, lr=1e-3)", "nn.utils.clip_grad_norm_(params, 1.0)"),
    ),
    Entry(
        name="op_refused",
        phases=(*FORWARD, *BACKWARD, *OPTIMIZER),
        kinds=("error",),
        why="torch refused to compute the op for these arguments",
        evidence=join(show_largest(0, 1), count_nonfinite(0)),
        fixes=("f(x.clamp(low, high))", "f(torch.where(ok, x, 0.0))"),
    ),
)

LAST = Entry(
    name="unknown",
    why="a value that training depends on went bad here, in a way that is not in the library",
    fixes=("torch.nan_to_num(x)", "x.clamp(-1e4, 1e4)"),
)
"""For an unknown phase or kind."""
