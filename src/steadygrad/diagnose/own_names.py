"""Fixes written with x, y and z -> the same with the program's own operands: `var.clamp_min(eps).sqrt()`.

A fix is code that a reader copies, and a placeholder may be the name of something else in that program. Where the
operands have no readable text, a fix stays as it is; prose always does.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

PLACEHOLDERS = ("x", "y", "z")
"""What the explanations call the first, second and third operand."""


class _Replace(ast.NodeTransformer):
    def __init__(self, operands: dict[str, ast.expr]) -> None:
        self._operands = operands

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._operands.get(node.id, node)


def use_own_names(fixes: Sequence[str], operands: Sequence[str]) -> tuple[str, ...]:
    """Return the fixes with the texts of the operands in place of x, y and z; identical ones once."""
    known = {name: tree for name, text in zip(PLACEHOLDERS, operands) if (tree := _parse(text)) is not None}
    return tuple(dict.fromkeys(_rename(fix, known) for fix in fixes))


def _rename(fix: str, known: dict[str, ast.expr]) -> str:
    tree = _parse(fix)
    if tree is None or isinstance(tree, ast.Name | ast.Constant):
        return fix
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(PLACEHOLDERS)
    if not used or not used <= set(known) or _calls_placeholder(tree):
        return fix
    return ast.unparse(ast.fix_missing_locations(_Replace(known).visit(tree)))


def _calls_placeholder(tree: ast.expr) -> bool:
    """Return whether a fix is about a function that it calls f or loss: then its x is what that function is given."""
    return any(isinstance(node, ast.Call) and isinstance(node.func, ast.Name) for node in ast.walk(tree))


def _parse(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
