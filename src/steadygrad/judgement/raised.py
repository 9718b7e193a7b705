"""An error in the middle of a step, behind which a replay has found a number that was not finite -> a Finding.

A NaN often shows as an error of the next function that looks: a cross entropy that wants probabilities, a distribution
that refuses its mean. The traceback names that function; a replay names where the NaN came from.
"""

from __future__ import annotations

import dis
from pathlib import Path

import torch

from steadygrad.facts import Cause, Finding, Reading, Severity

BY_NUMBERS = (RuntimeError, ValueError, ArithmeticError, AssertionError)
TORCH = str(Path(torch.__file__).parent)


def may_be_of_numbers(error: BaseException) -> bool:
    """Whether it is a kind of error that functions raise about numbers."""
    return isinstance(error, BY_NUMBERS) and not isinstance(error, torch.OutOfMemoryError)


def is_raised_by_torch(error: BaseException) -> bool:
    """Whether torch or a function in C has raised it, and no `raise` or `assert` of the program, which may catch it."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False
    code = innermost.tb_frame.f_code
    # co_code holds the opcodes as compiled, also where the interpreter runs specialised ones; `assert` raises by the
    # same opcode.
    return code.co_filename.startswith(TORCH) or dis.opname[code.co_code[innermost.tb_lasti]] != "RAISE_VARARGS"


def is_explained_by(cause: Cause | None) -> bool:
    """Whether a replay found a bad number, and not only the error itself."""
    return cause is not None and cause.phase != "unknown" and cause.kind != "error"


def describe_raised(error: BaseException, step: int) -> Finding:
    """Describe an error whose step had a number that was not finite."""
    message = str(error).strip().partition("\n")[0]
    return Finding(
        kind="exception",
        severity=Severity.ERROR,
        step=step,
        message=f"the step raised {type(error).__name__}: {message}",
        advice="The error is where it was noticed; a number was not finite before, at the line that is named.",
        evidence={"type": type(error).__name__},
    )


def make_unfinished(step: int, learning_rates: tuple[float, ...] = ()) -> Reading:
    """Return the reading of a step that was not made, or never came to its gradients."""
    return Reading(
        step=step,
        loss=None,
        grad_norm=0.0,
        finite_grad_norm=0.0,
        num_nonfinite=0,
        num_nan=0,
        clip_coefficient=1.0,
        skipped=True,
        learning_rates=learning_rates,
    )
