"""Calls of a model and a loss -> the calls that this loss was made from.

Two networks that train against each other call one another: a discriminator's guard also sees the calls that only the
generator's loss is made of. Autograd numbers its nodes as they are made, so those of one call lie between two numbers,
and the graph of the loss shows which of them it holds. Reads only; walked before backward, and only where a guard was
given a loss and saw several calls since the last one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Span = tuple[int, int]
"""Numbers of the nodes of one call: from the first to before the second."""
MAX_NODES = 20_000
"""Nodes of a graph that are visited, about a microsecond each; a longer one leaves it open which calls it holds."""


def read_number() -> int:
    """Return the number that the next node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def find_calls(loss: Tensor, spans: Mapping[int, Span]) -> set[int]:
    """Return the keys of the calls whose nodes are in the graph of `loss`; all of them if it is too large to tell."""
    found: set[int] = set()
    seen = set()
    waiting = [loss.grad_fn]
    while waiting and len(found) < len(spans):
        node = waiting.pop()
        if node is None or node in seen:
            continue
        # Held itself, not by its id: a wrapper that was freed may leave its id to that of another node.
        seen.add(node)
        if len(seen) > MAX_NODES:
            return set(spans)
        number = node._sequence_nr()
        found |= {key for key, (first, end) in spans.items() if first <= number < end}
        waiting += [following for following, _ in node.next_functions]
    return found
