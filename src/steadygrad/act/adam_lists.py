"""Gather what fused Adam needs before every step (gradients, moments, counters) at C speed.

`Adam._init_group` walks the parameters in Python at 2 µs each: with a thousand tensors that is most of the step's host
time, more than measuring and judging together. For the length of one step, `QuickLists` replaces it with a version that
builds exactly the same lists from the same state at the same moment. Anything but the plain case (a missing or sparse
gradient, state not created yet, AMSGrad, another torch) goes through torch's own method.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

KNOWN = ("self", "group", "params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
"""The signature of `_init_group` that this module was written for."""
_gradient, _is_sparse = operator.attrgetter("grad"), operator.attrgetter("is_sparse")
_is_not, _NOTHING = operator.is_not, itertools.repeat(None)
_first, _second, _step = (operator.itemgetter(name) for name in ("exp_avg", "exp_avg_sq", "step"))


def can_gather_quickly(optimizer: Any) -> bool:
    """Whether this is torch's own Adam or AdamW with the known signature and a step that was not compiled."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or "_init_group" in vars(optimizer):
        return False
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):
        return False
    return tuple(inspect.signature(type(optimizer)._init_group).parameters) == KNOWN


class QuickLists:
    """Gathers the lists for one optimizer.

    Looking up a parameter's state costs a hash in Python, so states are cached once found. The cache is used only while
    the optimizer still holds the same objects, which is checked at C speed.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._held: list[dict[str, Any]] = []
        self._found: dict[int, tuple[list[Tensor], list[dict[str, Any]]]] = {}  # id(group) -> its parameters and states

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Inside, the optimizer gathers its lists quickly."""
        # Only while it steps: a copied or pickled optimizer must not carry this.
        self._optimizer._init_group = self._gather
        try:
            yield
        finally:
            del self._optimizer._init_group

    def _gather(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """Like `Adam._init_group`: fill the lists and return whether any parameter is complex."""
        params = group["params"]
        gradients = list(map(_gradient, params))
        states = self.find_states(group)
        # all(states): an empty state, of a parameter that has not stepped yet, is false.
        plain = group["fused"] and not group["amsgrad"] and not group["differentiable"] and all(states)
        if not plain or not all(map(_is_not, gradients, _NOTHING)) or any(map(_is_sparse, gradients)):
            lists = (params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
            return bool(type(self._optimizer)._init_group(self._optimizer, group, *lists))
        params_with_grad.extend(params)
        grads.extend(gradients)
        exp_avgs.extend(map(_first, states))
        exp_avg_sqs.extend(map(_second, states))
        state_steps.extend(map(_step, states))
        return any(map(torch.is_complex, params))

    def find_states(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of each parameter of `group`, empty where there is none yet."""
        state, params = self._optimizer.state, group["params"]
        # By identity: load_state_dict, pruning and new parameters put other dicts in their place.
        if len(state) != len(self._held) or not all(map(operator.is_, state.values(), self._held)):
            self._held, self._found = list(state.values()), {}
        known = self._found.get(id(group))
        # load_state_dict makes new groups, which may reuse an id: the parameters themselves are compared.
        if known is None or len(known[0]) != len(params) or not all(map(operator.is_, known[0], params)):
            known = self._found[id(group)] = (list(params), [state.get(p, {}) for p in params])
        return known[1]
