"""CutWatch: calls of the first forward, one by one, and the graph of its loss -> a CutGraph: where gradients end.

A result of `argmax`, of a comparison or of `sample()` has no gradient with respect to what it was made from. If it goes
into the loss all the same, and some parameters reach the loss in no other way, they are never trained. Results are
followed by weak marks to the first call whose own result has a gradient; that one's node must be in the loss's graph.
What the program cut off itself (`detach`, `no_grad`) is meant, unless it then draws from it; and so are the targets of
a loss: a teacher, or random codes. Parameters with other values than those that layers start with were loaded. Cost:
the first forward only. The graph of what was cut is held until its backward. Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import CutGraph
from steadygrad.measure.graph_leaves import find_leaves, list_leaves
from steadygrad.measure.loss_graph import walk
from steadygrad.measure.marks import Marks
from steadygrad.measure.partial_saves import is_drawn
from steadygrad.measure.rows import is_readable
from steadygrad.measure.suspicious_ops import find_caller

HARD = frozenset(
    (
        *("argmax", "argmin", "argsort", "topk", "sort", "max", "min", "bucketize", "searchsorted", "unique"),
        *("gt", "lt", "ge", "le", "eq", "ne", "__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__"),
        *("greater", "less", "greater_equal", "less_equal", "long", "int", "bool", "to", "type", "nonzero"),
    )
)
"""Ops with a result that has no gradient: indices, truth values, whole numbers."""
DRAWS = frozenset(("normal", "multinomial", "bernoulli", "poisson"))
MOST_CUTS, MOST_USES = 16, 64


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    op: str
    where: str
    source: Any
    """The node of what it was made from."""
    is_meant: bool


class CutWatch:
    """Sees each call after it is made; `report` compares with the graph of the loss."""

    def __init__(self) -> None:
        self._marks = Marks()  # tensor -> the cut that it comes from
        self._uses: list[tuple[_Cut, Any]] = []  # and nodes that have such a tensor as an input
        self._num_cuts = 0

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Mark a result that has lost its gradient, or was made from one that has."""
        given = list(_find_tensors((*args, *kwargs.values())))
        cut = next((self._marks[one] for one in given if one in self._marks), None)
        if cut is None and not any(one.requires_grad and one.grad_fn is not None for one in given):
            return
        name = getattr(func, "__name__", "")
        if cut is not None and cut.is_meant and name in DRAWS:
            cut = _Cut("sample", find_caller(), cut.source, is_meant=False)
        has_graph = torch.is_grad_enabled()
        for one in _find_tensors((result,)):
            if one.requires_grad and has_graph:  # without, a view of a view says so all the same
                if cut is not None and not _is_loss(name) and len(self._uses) < MOST_USES:
                    self._uses.append((cut, one.grad_fn))
            elif cut is not None:
                self._marks[one] = cut
            else:
                self._mark(name, given, one)

    def _mark(self, name: str, given: list[Tensor], result: Tensor) -> None:
        source = next((one.grad_fn for one in given if one.requires_grad and one.grad_fn is not None), None)
        if source is None or self._num_cuts == MOST_CUTS:
            return
        self._num_cuts += 1
        is_drawn_from = name in DRAWS
        is_meant = not is_drawn_from and (name not in HARD or not torch.is_grad_enabled())
        op = "sample" if is_drawn_from else name.strip("_")
        self._marks[result] = _Cut(op, find_caller(), source, is_meant=is_meant)

    def report(self, step: int, loss: Tensor, named: Mapping[int, str]) -> CutGraph | None:
        """Return the first cut that keeps trained parameters from the loss; `named`: their ids and names."""
        uses, self._uses = [(cut, node) for cut, node in self._uses if not cut.is_meant], []
        self._marks = Marks()
        if not uses:
            return None
        nodes, reached = set(walk(loss.grad_fn)), {id(leaf) for leaf in find_leaves(loss)}
        for cut in dict.fromkeys(cut for cut, node in uses if node in nodes):
            lost = [leaf for leaf in list_leaves(cut.source) if id(leaf) not in reached and id(leaf) in named]
            if any(_is_untrained(leaf) for leaf in lost):
                names = tuple(named[id(leaf)] for leaf in lost)
                return CutGraph(step=step, op=cut.op, where=cut.where, parameters=names)
        return None


def _is_loss(name: str) -> bool:
    return "loss" in name or "entropy" in name or name == "kl_div"


def _is_untrained(leaf: Tensor) -> bool:
    return leaf.dim() > 1 and is_readable(leaf) and leaf.is_floating_point() and is_drawn(leaf)


def _find_tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, Tensor))
