"""Cures for the fallbacks: functions that no other entry covers, bounded or kept away from the bad input."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cure import Cure, half, t


def multiply_twice(x: Tensor) -> Tensor:
    """Return a value that is finite for a tiny x, although its derivative 1e60 is not."""
    return x * 1e30 * 1e30


NEITHER = t(0, 0).bool()
SECOND = t(0, 1).bool()

CURES = {
    "overflow_in_half": Cure(
        broken="f(x)",
        sick={"x": half(300, 1, 2), "f": lambda x: torch.linalg.cross(x, x.roll(1)), "low": -1.0, "high": 3.0},
        healthy={"x": half(0.5, 1, 2)},
        tolerance=1e-2,
    ),
    "infinity_in_forward": Cure(
        broken="f(x)",
        sick={"x": t(-12, 1), "f": torch.special.erfcx, "low": -1.0, "high": 2.0, "ok": SECOND},
        healthy={"x": t(0.5, 1), "ok": t(1, 1).bool()},
    ),
    "nan_in_forward": Cure(
        broken="f(x)",
        sick={"x": t(-2, 1), "f": lambda x: torch.igamma(torch.ones(2), x), "low": 0.1, "high": 2.0, "ok": SECOND},
        healthy={"x": t(0.5, 1), "ok": t(1, 1).bool()},
    ),
    "nan_from_infinity": Cure(
        broken="f(x)",
        sick={"raw": t(9, 1), "f": torch.sin, "low": -1e4, "high": 1e4},
        healthy={"raw": t(2, 1)},
        learned=("raw",),
        derive=lambda names: {"x": names["raw"].masked_fill(names["raw"] > 5, math.inf)},
    ),
    "number_not_finite": Cure(
        broken="f(x, number)",
        sick={"x": t(0, 1), "f": torch.mul, "number": math.inf, "low": -1e4, "high": 1e4},
        healthy={"number": 3.0},
    ),
    "nonfinite_in_backward": Cure(
        broken="f(x)",
        sick={"x": t(1e-30, 2e-30), "f": multiply_twice, "low": 0.0, "high": 1e-31, "ok": NEITHER},
    ),
    "op_refused": Cure(
        broken="f(x)",
        sick={"x": t(-1, 0.5), "f": torch.bernoulli, "low": 0.0, "high": 1.0, "ok": SECOND},
        learned=(),
    ),
}
