"""The graph of a result -> the leaves that it was made from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

MAX_NODES = 1_000_000
"""Most nodes of a graph to visit."""


def find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of `loss` that require a gradient."""
    return list_leaves(loss.grad_fn)


def list_leaves(root: Any) -> list[Tensor]:
    """Return the leaves below a node that require a gradient."""
    leaves: list[Tensor] = []
    waiting, seen = [root], {root}
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node is None:
            continue
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        # `seen` holds the nodes, and so their Python objects: a new one could have the id of one that was seen.
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        waiting += new
    return leaves
