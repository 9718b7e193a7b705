"""The line that calls the model and the line that calls backward -> a function that computes the loss again.

Both lines are of one function, or of the script itself. The statements between them that the loss depends on, found by
the names they bind and use, become the body of a function whose arguments are the names that it needs. Lines and
columns stay those of the script, so that whatever is found in a replay is found in the script. Statements that leave
the function, or define names elsewhere, cannot be run on their own: then there is no such function. Pure: nothing is
run.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

Spot = tuple[int, int]
"""Line and column."""
LEAVING = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.AsyncFor, ast.AsyncWith)
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of a statement that hold statements."""


@dataclass(frozen=True, slots=True)
class LossCode:
    """Code that computes a loss, and the names that it takes from where it stands."""

    code: CodeType
    names: tuple[str, ...]

    def make_function(self, namespace: dict[str, Any]) -> FunctionType:
        """Return the function; `namespace` are the globals of the script."""
        return FunctionType(self.code, namespace)


def find_loss_code(code: CodeType, call: Spot, backward: Spot, known: frozenset[str]) -> LossCode | None:
    """Return the code from the statement at `call` to the expression that the call at `backward` starts from.

    `known` are the names that have a value at `call`. None when it cannot be run on its own.
    """
    body = _find_body(code)
    statements = None if body is None else _find_statements(body, call, backward)
    if statements is None:
        return None
    leap = _Return(backward)
    # A copy: the tree is cached, and the transformer changes nodes in place.
    kept = [leap.visit(statement) for statement in copy.deepcopy(statements)]
    if leap.made is None:
        return None
    kept = _keep_needed(kept)
    leaving = [node for s in kept for node in ast.walk(s) if isinstance(node, LEAVING) and node is not leap.made]
    if leaving or any(_breaks_out(statement) for statement in kept):
        return None
    used = {node.id for s in kept for node in ast.walk(s) if isinstance(node, ast.Name)}
    # The others are globals, or are bound by the statements themselves.
    names = tuple(sorted(used & known))
    return LossCode(_compile(code, kept, names), names)


def read_spot(code: CodeType, instruction: int) -> Spot | None:
    """Return line and column of the instruction that a frame stands at."""
    for number, (line, _, column, _) in enumerate(code.co_positions()):
        # f_lasti counts bytes; each code unit has two, and co_positions one entry.
        if number == instruction // 2:
            return None if line is None or column is None else (line, column)
    return None


# --- finding the statements -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _parse(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _find_body(code: CodeType) -> list[ast.stmt] | None:
    """Return the statements of a function, or of the whole file."""
    tree = _parse(code.co_filename)
    if tree is None or not tree.body:
        return None
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            # The code object begins at the first decorator, the syntax tree at `def`.
            if first == code.co_firstlineno:
                return node.body
    return None


def _find_statements(body: list[ast.stmt], call: Spot, backward: Spot) -> list[ast.stmt] | None:
    """Return the innermost run of statements from the one at `call` to the one at `backward`."""
    found = None
    while True:
        first, last = (_find_index(body, spot) for spot in (call, backward))
        if first is None or last is None or first > last:
            return found
        found = body[first : last + 1]
        inner = [block for block in _list_blocks(body[first]) if _find_index(block, call) is not None]
        if first != last or not inner:
            return found
        if _find_index(inner[0], backward) is None:
            return found
        body = inner[0]


def _find_index(body: Sequence[ast.stmt], spot: Spot) -> int | None:
    return next((i for i, statement in enumerate(body) if _holds(statement, spot)), None)


def _holds(node: Any, spot: Spot) -> bool:
    start = (node.lineno, node.col_offset)
    return start <= spot < (node.end_lineno or node.lineno, node.end_col_offset or 0)


def _list_blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in BLOCKS:
        for one in [getattr(statement, name, [])]:
            if one and isinstance(one[0], ast.stmt):
                yield one
            else:
                for part in one if isinstance(one, list) else []:
                    yield part.body


# --- making the function ----------------------------------------------------------------------------------------------


class _Return(ast.NodeTransformer):
    """Replaces the statement that calls backward by `return <loss>`."""

    def __init__(self, spot: Spot) -> None:
        self._spot = spot
        self.made: ast.Return | None = None

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Replace the statement."""
        loss = _find_loss(node.value) if _holds(node, self._spot) else None
        if loss is None:
            return node
        self.made = ast.copy_location(ast.Return(loss), node)
        return self.made


def _find_loss(call: ast.expr) -> ast.expr | None:
    """Return the loss in `loss.backward()`, `scaler.scale(loss).backward()` or `fabric.backward(loss)`."""
    if not isinstance(call, ast.Call):
        return None
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
    value = call.args[0] if call.args else call.func.value if is_method else None  # type: ignore[attr-defined]
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "scale":
        value = value.args[0]
    return value


def _breaks_out(statement: ast.stmt) -> bool:
    """Whether it holds a break or continue of a loop around it."""
    if isinstance(statement, ast.Break | ast.Continue):
        return True
    if isinstance(statement, ast.For | ast.While | ast.FunctionDef | ast.ClassDef):
        return False
    return any(_breaks_out(child) for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt))


def _keep_needed(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Leave out what the loss does not depend on: logging, zero_grad, the next batch."""
    kept = [statements[-1]]
    needed = _list_used(statements[-1])
    # Backwards: a statement is needed if a later one that is kept uses what it binds.
    for statement in reversed(statements[:-1]):
        if _list_changed(statement) & needed:
            kept.append(statement)
            needed |= _list_used(statement)
    return kept[::-1]


def _list_used(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _list_changed(statement: ast.stmt) -> set[str]:
    """Return the names that it binds, or whose objects it changes by an assignment or a call of a method."""
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found |= _find_base(node)
        # `losses.append(x)`, `buffer.add_(y)`: a call whose result is dropped is made for what it changes.
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found |= _find_base(node.value.func)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _find_base(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _compile(code: CodeType, body: list[ast.stmt], names: Sequence[str]) -> CodeType:
    name = code.co_name if code.co_name.isidentifier() else "script"
    module = ast.parse(f"def {name}({', '.join(names)}): pass")
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    # The flags are the script's __future__ statements, and only those; dont_inherit keeps ours out.
    compiled = compile(module, code.co_filename, "exec", dont_inherit=True, flags=code.co_flags & 0x1FF0000)
    return next(constant for constant in compiled.co_consts if isinstance(constant, CodeType))
