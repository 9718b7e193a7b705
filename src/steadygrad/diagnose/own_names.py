"""Fixes written with x, y, z and p -> the same with the program's own operands: `var.clamp_min(eps).sqrt()`.

A fix is code that a reader copies, and a placeholder may be the name of something else in that program. A fix is
rewritten only if on harmless numbers it computes what the op computes: the x of `safe_norm(x)` is not the operand of
the square root that it replaces. Other fixes stay as they are, and so does prose; but where a bound would help and none
of them could be rewritten, the plain way to add it to the op comes first.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch

from steadygrad.diagnose.explanations.entry import Explanation, plain_name

PLACEHOLDERS = ("x", "y", "z")
"""What the explanations call the first, second and third operand."""

POWER = "p"
"""What the explanations call the exponent of a power."""

WITH_EPS = {
    "div": ("x / (y + eps)", "x / y.clamp_min(eps)"),
    "sqrt": ("torch.sqrt(x + eps)", "torch.sqrt(x.clamp_min(eps))"),
    "rsqrt": ("torch.rsqrt(x + eps)", "torch.rsqrt(x.clamp_min(eps))"),
    "log": ("torch.log(x + eps)", "torch.log(x.clamp_min(eps))"),
}
"""Op -> how to keep its operand away from 0, whatever the program has computed that from."""


class _Replace(ast.NodeTransformer):
    def __init__(self, operands: dict[str, ast.expr]) -> None:
        self._operands = operands

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._operands.get(node.id, node)


def use_own_names(
    fixes: Sequence[str], operands: Sequence[str], op: str, scalars: Mapping[str, object] | None = None
) -> tuple[str, ...]:
    """Return the fixes of `op` with the texts of its operands in place of x, y and z; identical ones once.

    `scalars`: the numbers that the op got, by their names in its schema.
    """
    known = {name: tree for name, text in zip(PLACEHOLDERS, operands) if (tree := _parse(text)) is not None}
    exponent = (scalars or {}).get("exponent")
    if isinstance(exponent, int | float):
        known[POWER] = ast.Constant(exponent)
    renamed = [_rename(fix, known, op) for fix in fixes]
    if renamed == list(fixes) and any("eps" in fix or "clamp_min" in fix for fix in fixes):
        general = WITH_EPS.get(plain_name(op), ())
        renamed = [own for fix in general if (own := _rename(fix, known, op)) != fix] + renamed
    return tuple(dict.fromkeys(renamed))


def name_fixes(why: Explanation, name: str) -> tuple[str, ...]:
    """Return the fixes of a bad tensor, written with its own name; in words if it has none that code could use."""
    tree = _parse(name)
    if tree is None:
        return why.advice
    trees = [ast.parse(fix, mode="eval").body for fix in why.fixes]
    return tuple(ast.unparse(ast.fix_missing_locations(_Replace({"x": tree}).visit(one))) for one in trees)


def _rename(fix: str, known: dict[str, ast.expr], op: str) -> str:
    tree = _parse(fix)
    if tree is None or isinstance(tree, ast.Name | ast.Constant):
        return fix
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {*PLACEHOLDERS, POWER}
    power = known.get(POWER)
    exponent = power.value if isinstance(power, ast.Constant) else None
    num = len(known.keys() - {POWER})
    if not used or not used <= set(known) or not _computes_the_same(fix, op, num, exponent):
        return fix
    return ast.unparse(ast.fix_missing_locations(_Replace(known).visit(tree)))


@functools.cache
def _computes_the_same(fix: str, op: str, num: int, exponent: object = None) -> bool:
    """Return whether a fix, which is a line of our own library, gives what `op` gives where nothing is wrong."""
    import steadygrad.losses as losses
    import steadygrad.nn as nn

    library = SimpleNamespace(losses=losses, nn=nn)
    generator = torch.Generator().manual_seed(0)
    # Between 0.25 and 0.75: inside the domain of log, sqrt, acos and division alike.
    values = [0.25 + 0.5 * torch.rand(4, 4, generator=generator, device="cpu") for _ in range(num)]
    known = {"torch": torch, "F": torch.nn.functional, "math": math, "steadygrad": library, "eps": 1e-6}
    try:
        # A fix may draw numbers, as rsample() does: the program's generator must not move.
        with torch.random.fork_rng(devices=[]):
            more = () if exponent is None else (exponent,)
            expected = getattr(torch.ops.aten, plain_name(op))(*values, *more)
            # Only fixes of our own library are evaluated, never text from the program or from a file.
            got = eval(fix, {**known, POWER: exponent, **dict(zip(PLACEHOLDERS, values))})
            return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-3, atol=1e-3)
    except Exception:  # it needs other operands, or names that are not the op's
        return False


def _parse(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
