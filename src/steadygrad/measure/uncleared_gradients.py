"""UnclearedGradientsWatch: were the gradients cleared before the next backward? Seen from hooks, first steps only.

If the caller runs backward, the guard does not know when it begins. So after a step each parameter gets a hook that
fires when its first new gradient has been added: if that was added to the very tensor that the step used, untouched in
between, the old gradient is still in it. Reads only; the hooks are removed after `NUM_STEPS` steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

NUM_STEPS = 3
"""Number of steps to watch: a loop that forgets to clear its gradients does so from the start."""


class UnclearedGradientsWatch:
    """Watches the parameters from the end of one step to the next one's measurement."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._steps_left = NUM_STEPS
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._stale: dict[str, tuple[Tensor, TensorWeakRef]] = {}

    def after_step(self) -> None:
        """Note the gradients of a finished step, which the caller has to clear."""
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        for name, parameter in self._named:
            gradient = parameter.grad
            if gradient is not None and parameter.is_leaf and parameter.requires_grad:
                self._watch(name, parameter, TensorWeakRef(gradient), gradient._version)

    def _watch(self, name: str, parameter: Tensor, used: TensorWeakRef, version: int) -> None:
        """Hook one parameter. `used` is weak, so that a cleared gradient is freed; an id() could be reused."""
        fired = False

        def look(changed: Tensor) -> None:
            nonlocal fired
            if not fired and changed.grad is not None:
                fired = True  # a second microbatch adds to the first one's gradient, as it should
                # Minus one: the accumulation that has just fired this hook is a write too.
                if used() is changed.grad and changed.grad._version - 1 == version:
                    self._stale[name] = (parameter, used)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(look))

    def take(self) -> tuple[str, ...]:
        """Remove the hooks; return the parameters whose old gradient was added to and is still there.

        Another model's backward may add to gradients that are cleared before this model's own, as in a GAN.
        """
        for hook in self._hooks:
            hook.remove()
        there = {name: (parameter.grad, used()) for name, (parameter, used) in self._stale.items()}
        stale = tuple(name for name, (now, old) in there.items() if now is not None and now is old)
        self._hooks, self._stale = [], {}
        return stale


class UsedMark:
    """Whether the present gradients are those that the last step used, and not the next one's.

    One of them represents all: a backward adds to it, which shows in its version, or replaces it.
    """

    def __init__(self) -> None:
        self._mark: tuple[Tensor, TensorWeakRef, int] | None = None

    def note(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note the gradients of a finished step, which the caller has to clear."""
        found = next((p for _, p in named if p.grad is not None), None)
        self._mark = None
        if found is not None and found.grad is not None:
            self._mark = (found, TensorWeakRef(found.grad), found.grad._version)

    @property
    def is_there(self) -> bool:
        if self._mark is None:
            return False
        parameter, used, version = self._mark
        return parameter.grad is not None and used() is parameter.grad and parameter.grad._version == version
