"""What fused Adam gathers before every step (gradients, moments, counters), gathered at C speed.

`Adam._init_group` walks the parameters in Python, 2 µs each: with a thousand tensors that is most of the step's host
time, more than measuring and judging together. `QuickLists` lends the optimizer a version that gives the very same
lists, read from the same state at the same moment, for the length of one step. Whatever is not the plain case
(a missing or sparse gradient, a state not made yet, AMSGrad, another torch) goes through torch's own.
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
"""The signature that this module was written for."""
_gradient, _is_sparse = operator.attrgetter("grad"), operator.attrgetter("is_sparse")
_is_not, _NOTHING = operator.is_not, itertools.repeat(None)
_first, _second, _step = (operator.itemgetter(name) for name in ("exp_avg", "exp_avg_sq", "step"))


def can_gather_quickly(optimizer: Any) -> bool:
    """Whether this is torch's own Adam or AdamW, in the form that is known here, and nobody has compiled its step."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or "_init_group" in vars(optimizer):
        return False
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):
        return False
    return tuple(inspect.signature(type(optimizer)._init_group).parameters) == KNOWN


class QuickLists:
    """Lends one optimizer its lists.

    Looking a parameter's state up costs a hash in Python, so the states found once are kept, and used only while the
    optimizer holds the very same objects, which is seen at C speed.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._held: list[dict[str, Any]] = []
        self._found: dict[int, tuple[list[Tensor], list[dict[str, Any]]]] = {}  # id(group) -> its parameters and states

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Inside, the optimizer gathers its lists quickly."""
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
        """As `Adam._init_group`: fills the lists, and says whether a parameter is complex."""
        params = group["params"]
        gradients = list(map(_gradient, params))
        states = self._find_states(group)
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

    def _find_states(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """The state of each parameter of `group`, empty where there is none yet."""
        state, params = self._optimizer.state, group["params"]
        if len(state) != len(self._held) or not all(map(operator.is_, state.values(), self._held)):
            self._held, self._found = list(state.values()), {}
        known = self._found.get(id(group))
        if known is None or len(known[0]) != len(params) or not all(map(operator.is_, known[0], params)):
            known = self._found[id(group)] = (list(params), [state.get(p, {}) for p in params])
        return known[1]
