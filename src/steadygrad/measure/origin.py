"""On which rank did a bad step begin? Local flags, kept on the device -> one exchange after the incident.

DDP's all-reduce spreads one rank's NaN to all, so each rank checks a gradient of its own before that: the one of the
model's first small parameter, through which nearly every fault in backward flows. After an incident whose rank that
did not reveal, all parameters are checked for a while. Losses need no check: they are exchanged anyway. Reads only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.facts import Reading
from steadygrad.measure.ranks import FromRanks, Ranks
from steadygrad.state.shards import Fragment

SMALL = 1 << 16
"""Checking a gradient of up to this many elements costs nothing compared with the step."""
NUM_STEPS = 50
"""Number of steps for which all gradients are checked after an incident whose rank remained unknown."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a bad step began, as far as known."""

    ranks: tuple[int, ...] = ()
    text: str = ""


class OwnGradients:
    """Checks gradients before they are summed over the ranks; does nothing in a single process."""

    def __init__(self, ranks: Ranks, named: Sequence[tuple[str, Tensor]]) -> None:
        self._ranks = ranks
        parameters = {id(p): p for p in (p.source if isinstance(p, Fragment) else p for _, p in named)}
        self._parameters: list[Tensor] = [p for p in parameters.values() if p.requires_grad and p.is_leaf]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_finite: Tensor | None = None
        self._steps_left = 0
        if ranks.many:
            self._watch(self._choose())

    def _choose(self) -> list[Tensor]:
        return next(([p] for p in self._parameters if p.numel() <= SMALL), self._parameters[:1])

    def _watch(self, parameters: Sequence[Tensor]) -> None:
        for hook in self._hooks:
            hook.remove()
        here = weakref.ref(self)  # a cycle through a tensor's hooks is never collected: the model would stay for ever

        def look(gradient: Tensor) -> None:
            watch = here()
            if watch is not None:
                watch._look(gradient)

        self._hooks = [parameter.register_hook(look) for parameter in parameters]

    def _look(self, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            # Stays on the device: this runs inside backward.
            finite = gradient.detach().isfinite().all()
            before = self._is_finite
            self._is_finite = finite if before is None else before.to(finite.device) & finite

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Ignore the gradients of backwards inside this context: a step is being replayed."""
        seen = self._is_finite
        try:
            yield
        finally:
            self._is_finite = seen

    def close(self) -> None:
        """Stop checking."""
        self._watch([])

    def take(self) -> Tensor | None:
        """Return whether everything checked in this step was finite, still on the device."""
        finite, self._is_finite = self._is_finite, None
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._watch(self._choose())
        return finite

    def find_origin(
        self, reading: Reading, from_ranks: FromRanks, own_finite: Tensor | None, signs: Sequence[str]
    ) -> Origin:
        """Find the rank that began a bad step; call it at the same point on all. `signs`: what this rank itself saw."""
        if not self._ranks.many or not reading.is_nonfinite or self._ranks.is_joining:
            return Origin(from_ranks.began_on, self._spell(from_ranks.began_on, []))
        # The one host read, after an incident only.
        mine = (own_finite is not None and not bool(own_finite), list(signs))
        # Whatever this rank has seen itself: the gather needs all.
        answers = self._ranks.gather(mine)
        bad = from_ranks.began_on or tuple(rank for rank, (flag, _) in enumerate(answers) if flag)
        # Not under a loss scaler, where overflows are routine.
        if not bad and not self._steps_left and reading.loss_scale is None:
            self._steps_left = NUM_STEPS
            self._watch(self._parameters)
        notes = [f"{self._ranks.name(rank)}: {sign}" for rank, (_, said) in enumerate(answers) for sign in said]
        return Origin(bad, self._spell(bad, notes))

    def _spell(self, ranks: Sequence[int], notes: Sequence[str]) -> str:
        shown = ", ".join(map(self._ranks.name, ranks[:3])) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
        return "; ".join([*([f"it began on {shown}"] if ranks else []), *notes[:3]])
