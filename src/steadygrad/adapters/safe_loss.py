"""safe_compute_loss: a Trainer's `compute_loss` that always returns a finite loss with a graph, and reports each fix.

Where every label is masked, or the loss is None, NaN, Inf or 0, a small loss replaces it: connected to the trained
parameters, with a gradient of zero, so that backward runs and other microbatches of the step still count. Each one is
counted, logged and, if a GuardCallback watches the same trainer, recorded. So is an exception, if losses were computed
before it and none failed just before: a bug that fails every time, a lack of memory, and an exception on one of several
ranks are re-raised. Costs one host read per microbatch, and another one if the labels are on the device.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.adapters.findings import describe_error, describe_replaced_error, describe_replaced_loss
from steadygrad.errors import TrainingHalted
from steadygrad.facts import Finding
from steadygrad.guard import Guard

logger = logging.getLogger("steadygrad")

SMALL_LOSS = 1e-6
"""Replaces a loss of zero or one that cannot be used."""
MAX_ERRORS_IN_A_ROW = 2
"""Consecutive exceptions that are replaced; the next one is re-raised."""
IGNORE_INDEX = -100
"""The label that torch's losses ignore by default and transformers' collators write."""
ADVICE = {
    "every label is masked": "Drop samples without labels: a prompt beyond the maximal length leaves none.",
    "the loss is None": "The model gave no loss. Give it labels, or name them in TrainingArguments(label_names=...).",
    "the loss is not finite": "Look at this batch, and at the learning rate and the precision.",
    "the loss is 0": "Check that the batch has labels that are not masked (-100).",
}


class SafeLoss:
    """Callable like `Trainer.compute_loss`; `counts` has the number of fixes by reason, `num_errors` of exceptions."""

    def __init__(self, trainer: Any, compute_loss: Callable[..., Any]) -> None:
        self._trainer, self._compute_loss = trainer, compute_loss
        self.counts: Counter[str] = Counter()
        self.num_errors = self._num_errors_in_a_row = 0
        self._has_computed = False
        self.guard: Guard | None = None
        """Set by GuardCallback while it watches the same trainer."""

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, **kwargs: Any) -> Any:
        if not model.training:  # evaluation reports the true loss
            return self._compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        masked = _is_all_masked(inputs, getattr(self._trainer, "label_names", None) or ("labels",))
        try:
            result = self._compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        # Broad on purpose: a bad batch raises anything. `_may_replace` lets bugs and lack of memory through.
        except Exception as error:
            self.num_errors += 1
            self._num_errors_in_a_row += 1
            if return_outputs or not self._may_replace(error):
                logger.error("compute_loss raised %r at step %d; it is re-raised.", error, self._step)
                if self.guard is not None:
                    self.guard.note(describe_error(error, self.guard))
                raise
            self._report(describe_replaced_error(error, step=self._step, count=self.num_errors))
            return SMALL_LOSS + _connect(model.parameters())
        self._has_computed, self._num_errors_in_a_row = True, 0
        loss, outputs = result if return_outputs else (result, None)
        safe = self._replace_if_bad(loss, model, masked=masked)
        return (safe, outputs) if return_outputs else safe

    def _replace_if_bad(self, loss: Tensor | None, model: nn.Module, *, masked: bool) -> Tensor:
        # Waits for this forward. The mean, since under DataParallel there is one loss for each device.
        value = math.nan if loss is None else float(loss.detach().float().mean())
        reason = _find_reason(loss, value, masked=masked)
        if reason is None:
            assert loss is not None
            return loss
        self.counts[reason] += 1
        total = self.counts.total()
        self._report(describe_replaced_loss(reason, ADVICE[reason], step=self._step, count=total))
        # Keeps its graph: a loss of exactly 0 may have a gradient all the same.
        if loss is not None and value == 0.0 and loss.requires_grad:
            return loss + SMALL_LOSS
        return SMALL_LOSS + _connect(model.parameters())

    def _report(self, finding: Finding) -> None:
        if self.guard is not None:
            self.guard.note(finding)
        else:
            logger.warning("step %d: %s. %s", finding.step, finding.message, finding.advice)

    def _may_replace(self, error: Exception) -> bool:
        """Whether the exception is of this batch, and a small loss can take its place."""
        if isinstance(error, TrainingHalted | MemoryError | torch.OutOfMemoryError) or not self._has_computed:
            return False
        return self._num_errors_in_a_row <= MAX_ERRORS_IN_A_ROW and not _has_many_ranks()

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)


def safe_compute_loss(trainer: Any) -> SafeLoss:
    """Make `trainer.compute_loss` safe and return the replacement. Calling it twice changes nothing."""
    if isinstance(trainer.compute_loss, SafeLoss):
        return trainer.compute_loss
    safe = SafeLoss(trainer, trainer.compute_loss)
    trainer.compute_loss = safe
    return safe


def _has_many_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_all_masked(inputs: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether every label is masked. Checked before the forward: some trainers remove the labels from the inputs."""
    labels = [inputs[name] for name in names if isinstance(inputs.get(name), Tensor)]
    integers = [t for t in labels if t.numel() and not t.is_floating_point()]
    return bool(integers) and all(bool((t == IGNORE_INDEX).all()) for t in integers)


def _find_reason(loss: Tensor | None, value: float, *, masked: bool) -> str | None:
    if masked:
        return "every label is masked"
    if loss is None:
        return "the loss is None"
    if not math.isfinite(value):
        return "the loss is not finite"
    return "the loss is 0" if value == 0.0 else None


def _connect(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return 0 with a graph to every trained parameter, whatever they hold: nan_to_num, since 0 * NaN is NaN."""
    total: Tensor | float = 0.0
    for parameter in parameters:
        if parameter.requires_grad and parameter.numel():
            # One element gives the whole parameter a gradient of zeros, which DistributedDataParallel waits for.
            total = total + parameter.flatten()[:1].float().nan_to_num().sum() * 0.0
    assert isinstance(total, Tensor), "a trainer has parameters to train"
    return total
