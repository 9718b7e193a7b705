"""The expression that was running when an op was called -> the text of its operands: 'var' in `torch.sqrt(var)`.

Python remembers which columns of the source each instruction came from. Where the source cannot be read, or the
expression is not a call or an operator, there are no names; nothing is guessed.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from types import CodeType

LONGEST = 120
"""Longer operands are not repeated."""
NAMESPACES = ("torch", "F", "nn", "functional", "linalg", "special", "math", "np", "losses")
"""Names before a dot that are not tensors."""


OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "mm bmm matmul mv dot"
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def name_operands(code: CodeType, instruction: int, op: str, operands: tuple[str, ...]) -> tuple[str, ...]:
    """Return the source of each tensor that the call at `instruction` took; empty when it does not spell `op` itself.

    `operands` are the names in the op's schema of those tensors: one of 'self' alone means that the rest were numbers.
    """
    tree = _parse_expression(code, instruction)
    plain = op.rpartition(".")[2].strip("_").removesuffix("_forward")
    if tree is None or plain not in _spell_ops(tree):
        return ()
    found = _choose_side(tree, operands[0]) if _has_one_side(tree, operands) else _find_operands(tree)
    return tuple(_shorten(ast.unparse(node)) for node in found) if len(found) >= len(operands) else ()


def name_arguments_of_call(code: CodeType, instruction: int) -> tuple[list[str], dict[str, str]] | None:
    """Return the source of what the call at `instruction` was given, by place and by name; None if it does not show."""
    tree = _parse_expression(code, instruction)
    if not isinstance(tree, ast.Call) or any(isinstance(one, ast.Starred) for one in tree.args):
        return None
    if any(keyword.arg is None for keyword in tree.keywords):
        return None
    named = {keyword.arg or "": _shorten(ast.unparse(keyword.value)) for keyword in tree.keywords}
    return [_shorten(ast.unparse(one)) for one in tree.args], named


def read_expression(code: CodeType, instruction: int) -> str | None:
    """Return the source of the call or operator at `instruction` on one line; None if it cannot be read or is long."""
    tree = _parse_expression(code, instruction)
    return None if tree is None else _shorten(ast.unparse(tree)) or None


def _parse_expression(code: CodeType, instruction: int) -> ast.expr | None:
    text = _find_expression(code, instruction)
    try:
        return None if text is None else ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


def _has_one_side(tree: ast.expr, operands: tuple[str, ...]) -> bool:
    return isinstance(tree, ast.BinOp) and len(operands) == 1


def _choose_side(tree: ast.expr, operand: str) -> list[ast.expr]:
    """Return the side of an operator that is a tensor, the other being a number; none if either may be it."""
    assert isinstance(tree, ast.BinOp)
    sides = [side for side in (tree.left, tree.right) if not isinstance(side, ast.Constant)]
    if len(sides) == 2 and isinstance(tree.op, ast.Add | ast.Mult):  # a number times a tensor is called the other way
        return []
    return sides[-1:] if operand == "exponent" else sides[:1]


def _spell_ops(tree: ast.expr) -> tuple[str, ...]:
    """Return the ops that an expression may call directly."""
    if isinstance(tree, ast.BinOp):
        return tuple(OPERATORS.get(type(tree.op), "").split())
    if isinstance(tree, ast.UnaryOp):
        return ("neg",)
    if not isinstance(tree, ast.Call):
        return ()
    name = (
        tree.func.attr
        if isinstance(tree.func, ast.Attribute)
        else tree.func.id
        if isinstance(tree.func, ast.Name)
        else ""
    )
    return (name, f"linalg_{name}", name.strip("_"))


def _find_expression(code: CodeType, instruction: int) -> str | None:
    positions = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    if positions is None or None in positions:
        return None
    first, last, start, end = positions
    assert first is not None
    assert last is not None
    lines = [linecache.getline(code.co_filename, number) for number in range(first, last + 1)]
    if not lines or not lines[0]:
        return None
    # Columns count UTF-8 bytes, not characters. The end is cut first: on one line, cutting the start would move it.
    raw = [line.encode() for line in lines]
    raw[-1] = raw[-1][:end]
    raw[0] = raw[0][start:]
    text = b"".join(raw).decode(errors="replace")
    # Parentheses, since the line breaks may have been inside some that were cut off.
    return f"({text})" if len(lines) > 1 else text


def _find_operands(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BinOp):
        return [tree.left, tree.right]
    if isinstance(tree, ast.UnaryOp):
        return [tree.operand]
    if not isinstance(tree, ast.Call):
        return []
    # A constant is not a tensor; what `*args` stands for cannot be counted.
    given = [argument for argument in tree.args if not isinstance(argument, ast.Constant | ast.Starred)]
    if isinstance(tree.func, ast.Attribute) and not _is_namespace(tree.func.value):
        return [tree.func.value, *given]
    return given


def _is_namespace(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return _is_namespace(node.value) and node.attr in NAMESPACES
    return isinstance(node, ast.Name) and node.id in NAMESPACES


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else ""
