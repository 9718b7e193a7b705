"""One Cure for each entry of the library, in files of the same names."""

from . import (
    division,
    exponentials,
    fallbacks,
    growth,
    indexing,
    inputs,
    linear_algebra,
    logarithms,
    losses,
    normalization,
    optimizer,
    precision,
    probability,
    reductions,
    roots_and_powers,
    softmax,
    trigonometry,
)
from .cure import Cure, sum_up

FAMILIES = (
    roots_and_powers,
    logarithms,
    exponentials,
    division,
    trigonometry,
    softmax,
    reductions,
    linear_algebra,
    normalization,
    losses,
    probability,
    indexing,
    precision,
    inputs,
    optimizer,
    growth,
    fallbacks,
)

CURES: dict[str, Cure] = {name: cure for family in FAMILIES for name, cure in family.CURES.items()}

__all__ = ["CURES", "FAMILIES", "Cure", "sum_up"]
