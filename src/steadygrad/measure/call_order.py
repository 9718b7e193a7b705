"""CallOrderWatch: what the program calls between two steps -> a CallScan, in the first steps of a run.

Hears each backward and each clip (`torch_calls.py`) and notes the norm of the gradients there; compared with the norm
that the optimizer gets, it shows whether they were cleared, unscaled or clipped in between, and whether a clip got
copies of the parameters. Costs one pass over the gradients for each backward of the first `NUM_STEPS` steps, nothing
afterwards, and no host wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.facts import CallScan, Reading
from steadygrad.measure.held import find_held
from steadygrad.measure.rows import PendingRows, send_rows
from steadygrad.measure.torch_calls import BackwardCall, ClipCall, Factor, listen, stop_listening
from steadygrad.measure.transfer import Transfer
from steadygrad.state.live_objects import list_live

NUM_STEPS = 4
"""Steps to watch: a loop that calls things in the wrong order does so from the start."""
MOST_BACKWARDS = 256
"""Backwards without a step after which the watch ends: they are those of another training, or of a very long step."""
NUM_KEPT = 4
"""Gradients, of the smallest parameters, that are kept until the next backward to see whether it adds to them."""
MOST_WALKS = 2
"""Searches of all live objects, to find out whether what is clipped are copies: a rule needs two."""
LEAST_SCALE = 64.0
"""Smallest factor that is taken for a loss scale."""
DIVISION, BY_NUMBER, BY_TENSOR = 0.0, 1.0, 2.0
"""How a constant was applied. A GradScaler multiplies by a tensor; a weight of the loss is nearly always a number."""


class PendingCalls:
    """The calls before one step, with numbers that are still being copied."""

    def __init__(self, rows: PendingRows, *, num_terms: Sequence[int], **known: Any) -> None:
        """`num_terms`: of the sum that the constants of each backward were applied to."""
        self._rows, self._num_terms, self._known = rows, num_terms, known

    def read(self, reading: Reading) -> CallScan:
        """Return the scan, with the norm of the step that `reading` is about."""
        rows = {name: list(row) for name, row in self._rows.read().items()}
        factors = [list(zip(*_halve(row))) for name, row in rows.items() if name.startswith("factors")]
        scales = [value for row in factors for value, kind in row if kind == BY_TENSOR and value >= LEAST_SCALE]
        scale = max((scale for scale in scales if _is_power_of_two(scale)), default=1.0)
        return CallScan(
            step=reading.step,
            divisors=tuple(_list_divisors(row, num) for row, num in zip(factors, self._num_terms)),
            # Not the number of tokens, which is often a power of two as well.
            scale=scale if scale > 1.0 and list_live(torch.amp.GradScaler) else 1.0,
            norm_after_backward=_find_finite(rows.get("after")),
            norm_at_clip=_find_finite(rows.get("clip")),
            norm_of_copy=_find_finite(rows.get("copy")),
            norm_at_step=None if reading.is_nonfinite else reading.finite_grad_norm,
            **self._known,
        )


class CallOrderWatch:
    """Hears the program's calls; `take` ends a step."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        model: nn.Module,
        transfer: Transfer,
        see_loss: Callable[[Tensor], None],
        see_graph: Callable[[Tensor], None],
    ) -> None:
        """`parameters`: those of the optimizers; `see_loss` is called with each loss, while its graph is there.

        `see_graph` is called with it before its backward, which frees what the graph has saved.
        """
        self._parameters, self._own = parameters, {id(p) for p in parameters}
        self._model = model
        self._smallest = sorted(parameters, key=lambda p: p.numel())[:NUM_KEPT]
        self._transfer, self._see_loss, self._see_graph = transfer, see_loss, see_graph
        self._num_averaging, self._steps_left = 0, 0
        self._walks_left = MOST_WALKS
        self._start_step()

    def compile(self, device: torch.device) -> None:
        """Load the kernels of the norm and of the constants now."""
        parameter = nn.Parameter(torch.zeros(2, device=device, dtype=self._parameters[0].dtype))
        parameter.grad = torch.ones_like(parameter)
        factor = Factor(torch.ones((), device=device), is_division=True)
        call = BackwardCall(loss=parameter.detach(), factors=(factor,), end="", where="")
        norm = _find_norm([parameter, parameter])
        assert norm is not None
        send_rows({"factors": _pack_factors(call), "after": norm}, self._transfer)

    def begin(self, *, num_averaging: int) -> None:
        """Listen from now on; `num_averaging` ranks average their gradients."""
        self._num_averaging, self._steps_left = num_averaging, NUM_STEPS
        listen(self)

    def _start_step(self) -> None:
        self._backwards: list[BackwardCall] = []
        self._after: Tensor | None = None
        self._at_clip: Tensor | None = None
        self._at_copy: Tensor | None = None
        self._clip: ClipCall | None = None
        self._copy_clip: ClipCall | None = None
        self._clip_is_early = False
        self._sums: list[Tensor | None] = []
        self._num_cleared = 0

    def close(self) -> None:
        """Stop listening."""
        self._steps_left = 0
        stop_listening(self, to_saves=True)

    def before_backward(self, loss: Tensor) -> None:
        """A backward is about to begin."""
        self._see_graph(loss)

    def after_backward(self, call: BackwardCall) -> None:
        """Note the loss's constants, and the norm of the gradients as backward has left them."""
        if len(self._backwards) == MOST_BACKWARDS:
            self.close()
            self._start_step()
            return
        self._see_loss(call.loss)
        self._clip_is_early |= self._clip is not None and not self._adds_another_loss(call)
        self._backwards.append(replace(call, loss=call.loss.detach()))  # its graph is not kept alive
        self._after, self._at_clip = _find_norm(self._parameters), None
        sums = [p.grad for p in self._smallest]
        self._num_cleared += _are_others(sums, self._sums)
        self._sums = sums

    def _adds_another_loss(self, call: BackwardCall) -> bool:
        """Whether this backward stands elsewhere than those before it: a clip in between is of their loss alone."""
        return bool(self._backwards) and all(call.where != before.where for before in self._backwards)

    def before_clip(self, call: ClipCall) -> None:
        """Note a clip of these parameters, or of none."""
        if call.is_spent or any(id(p) in self._own for p in call.parameters):
            self._clip, self._clip_is_early = call, False
            self._at_clip = _find_norm([p for p in call.parameters if id(p) in self._own])
        elif self._are_alike(call.parameters):
            self._copy_clip = call
            self._at_copy = _find_norm([p for p in call.parameters if p.is_leaf])

    def _are_alike(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are others and look like the parameters of this training: copies, or a network of its form."""
        own = list(self._model.parameters())
        theirs = {id(p) for p in own} & {id(t) for t in tensors}
        shapes = _list_shapes(tensors)
        if theirs or not tensors or shapes not in (_list_shapes(self._parameters), _list_shapes(own)):
            return False
        return not any(tensor.retains_grad for tensor in tensors)  # the program differentiates through these

    def _is_of_copies(self) -> bool:
        """Whether the only clip of this step was of tensors that no optimizer trains.

        Walks all live objects, about 0.1 s, where another network of the same form is clipped and this one is not;
        once or twice in a run.
        """
        if self._clip is not None or self._copy_clip is None:
            return False
        # _copy_clip holds the tensors, so the ids are still theirs.
        tensors = {id(tensor) for tensor in self._copy_clip.parameters}
        if not self._walks_left:
            return False
        self._walks_left -= 1
        return not find_held() & tensors

    def after_save(self, saved: Any, where: str) -> None:
        """Saves are heard elsewhere."""

    def before_average(self, average: Any) -> None:
        """And so are averages."""

    def take(self, *, scale_is_known: bool) -> PendingCalls | None:
        """Return the calls since the last step, and start afresh; None after the first steps."""
        if not self._steps_left:
            return None
        self._steps_left -= 1
        listen(self)  # in the thread that trains, which need not be the one that made the guard
        rows = {f"factors{i}": _pack_factors(call) for i, call in enumerate(self._backwards)}
        norms = {"after": self._after, "clip": self._at_clip, "copy": self._at_copy}
        rows |= {name: norm for name, norm in norms.items() if norm is not None}
        last = self._backwards[-1] if self._backwards else None
        clip = self._clip if self._clip is not None else self._copy_clip
        found = PendingCalls(
            send_rows(rows, self._transfer),
            num_terms=[call.num_terms for call in self._backwards],
            num_backwards=len(self._backwards),
            num_cleared=self._num_cleared,
            end="" if last is None else last.end,
            num_averaging=self._num_averaging,
            scale_is_known=scale_is_known,
            clip_is_spent=self._clip is not None and self._clip.is_spent,
            clip_is_early=self._clip_is_early,
            where_backward="" if last is None else last.where,
            clip_is_of_copy=self._is_of_copies(),
            max_norm=math.inf if clip is None else clip.max_norm,
            where_clip="" if clip is None else clip.where,
            clip="" if clip is None else clip.name,
        )
        self._start_step()
        if not self._steps_left:
            stop_listening(self, to_saves=True)
        return found


def _list_divisors(factors: Sequence[tuple[float, float]], num_terms: int) -> tuple[float, ...]:
    """Return what the loss was divided by, without what makes a sum of `num_terms` losses their mean.

    >>> _list_divisors([(4.0, DIVISION), (0.25, BY_NUMBER)], 4), _list_divisors([(4.0, DIVISION)], 1)
    ((4.0,), (4.0,))
    """
    divisors = tuple(1.0 / value if kind and value else value for value, kind in factors)
    return divisors[:-1] if num_terms > 1 and divisors[-1:] == (float(num_terms),) else divisors


def _are_others(now: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> bool:
    """Return whether gradients were dropped in between: backward adds in place, so the tensors would be the same."""
    pairs = [(one, other) for one, other in zip(now, before) if one is not None and other is not None]
    return bool(pairs) and all(one is not other for one, other in pairs)


@torch.no_grad()
def _find_norm(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the norm of the gradients, float64 [1]; None if there are none or some cannot be read."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients or any(g.layout is not torch.strided or g.device != gradients[0].device for g in gradients):
        return None
    norms: Sequence[Tensor] = torch._foreach_norm(gradients)
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]  # only then: it is one launch for each
    total: Tensor = torch.linalg.vector_norm(torch.stack([*norms]).double())
    return total.reshape(1)


@torch.no_grad()
def _pack_factors(call: BackwardCall) -> Tensor:
    """Return the constants, then how each was applied: float64 [2 * N] on the device of the constants."""
    device = next((f.value.device for f in call.factors if f.value.device.type != "cpu"), torch.device("cpu"))
    values = [factor.value.detach().reshape(1).double().to(device, non_blocking=True) for factor in call.factors]
    kinds = [_name_kind(factor) for factor in call.factors]
    return torch.cat([*values, torch.tensor(kinds, dtype=torch.float64, device="cpu").to(device, non_blocking=True)])


def _name_kind(factor: Factor) -> float:
    if factor.is_division:
        return DIVISION
    return BY_TENSOR if factor.value.dtype is torch.float32 else BY_NUMBER  # torch keeps numbers as float64 or int64


def _list_shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return sorted(tensor.shape for tensor in tensors)


def _find_finite(row: Sequence[float] | None) -> float | None:
    return row[0] if row and math.isfinite(row[0]) else None


def _halve(row: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    return row[: len(row) // 2], row[len(row) // 2 :]


def _is_power_of_two(number: float) -> bool:
    mantissa, _ = math.frexp(number)
    return bool(mantissa == 0.5)
