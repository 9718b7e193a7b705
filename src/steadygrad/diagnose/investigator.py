"""Investigator: the guard's side of diagnosis. Notes every microbatch before its forward, and when a step turns out to
be bad, has it replayed once and keeps its batch.

A note copies no tensor and waits for nothing. A replay costs several steps, so it is made for the first incidents of a
run and then seldom: a run whose every step is bad must not become ten times slower on top. It never raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.call_listener import CallListener
from steadygrad.config import DiagnoseConfig
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.effects import Effects
from steadygrad.diagnose.entry import diagnose_captures
from steadygrad.diagnose.frames import read_source
from steadygrad.diagnose.loss_calls import Span, find_calls, read_number
from steadygrad.diagnose.meeting import Meeting
from steadygrad.diagnose.quarantine import Quarantine
from steadygrad.diagnose.step_arguments import name_inputs
from steadygrad.diagnose.unrepeated import Rest
from steadygrad.facts import Cause, Finding, Reading, Severity
from steadygrad.measure.gradient_access import GradientAccess
from steadygrad.state.hidden_hooks import hide_hooks
from steadygrad.state.live_objects import list_live
from steadygrad.state.shards import is_dtensor
from steadygrad.state.tree import map_tensors

logger = logging.getLogger("steadygrad")
SUSPECTS = {"exploding_gradient": "exploding", "vanishing_gradient": "vanishing", "dead_units": "dead"}
"""Findings about finite numbers that a replay can say more about."""
MOST_CAPTURES = 16
"""Microbatches of one step that are held; the first ones of a longer step are let go."""


class Investigator:
    """Finds the cause of bad steps of one model."""

    def __init__(
        self,
        config: DiagnoseConfig,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        run_dir: str | Path | None = None,
        ddp: nn.parallel.DistributedDataParallel | None = None,
        notes: bool = False,
    ) -> None:
        """`ddp`: the wrapper by which this rank trains `model` together with others, if there is one.

        `notes`: note microbatches even if no diagnosis is wanted, for other code that replays steps.
        """
        self._notes = notes or config.enabled
        self._config, self._model, self._optimizers, self._ddp = config, model, optimizers, ddp
        # Only those with a generator of their own: they are asked for at every step.
        self._devices = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
        self._captures: list[Capture] = []
        self._spans: dict[int, Span] = {}
        """Calls of the model since the last loss, by the id of their Capture."""
        self._used: set[int] | None = None
        """Calls that the losses of this step were made from; None: no loss was given."""
        self._inside = False
        self._hears_inside = False
        self._num_made, self._last_step = 0, -config.cooldown
        self._last_good: int | None = None
        keeps = run_dir is not None and config.keep_batches
        self._quarantine = (
            Quarantine(run_dir=Path(run_dir), max_bytes=config.max_bytes, max_batches=config.max_batches)
            if keeps and run_dir is not None
            else None
        )
        self._hooks = self._watch_model() if config.enabled else []

    def use_folder(self, run_dir: Path) -> None:
        """Keep batches there from now on."""
        if self._quarantine is not None:
            self._quarantine.run_dir = run_dir

    # --- before the forward -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around the forward of one microbatch, which `fn` runs: it can be replayed whole."""
        is_noted = self.begin(fn, args, kwargs)
        try:
            yield
        finally:
            if is_noted:
                self.end()

    def begin(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note a microbatch before its forward; return whether `end` must be called after it."""
        # If it is heard inside, the function must not be run again, but what it gives to the model may.
        if not self._notes or self._inside or self._hears_inside:
            return False
        self._note(fn, args, kwargs, is_model_call=False)
        self._inside = True
        return True

    def end(self) -> None:
        """The forward of a noted microbatch is over."""
        self._inside = False

    def _watch_model(self) -> list[Any]:
        """When a loss is given and no function, what went into the model is all that can be replayed."""
        if hasattr(self._model, "_orig_mod"):  # compiled: a hook would become part of the graph
            return []
        hide_hooks(self._model)
        end = CallListener(self.hear_end, num_arguments=4)
        return [
            # prepend: the arguments as the program gave them, before hooks of its own change them.
            nn.Module.register_forward_pre_hook(self._model, CallListener(self.hear), prepend=True, with_kwargs=True),
            nn.Module.register_forward_hook(self._model, end, with_kwargs=True),
        ]

    def hear(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when the model is called."""
        # Not inside a function that is noted whole, and not a validation, which no step follows.
        if not self._inside and torch.is_grad_enabled():
            inputs = name_inputs(args, kwargs)
            # Inside vmap or grad(), where no replay can be: these wrappers are dead once the transform has returned.
            if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for _, tensor in inputs):
                return
            if any(tensor.grad_fn is not None for _, tensor in inputs):
                # Another network's output, whose graph is gone by the time of a replay.
                args, kwargs = map_tensors(args, _cut), {name: map_tensors(one, _cut) for name, one in kwargs.items()}
            self._note(model, args, kwargs, is_model_call=True)
            self._spans[id(self._captures[-1])] = (read_number(), sys.maxsize)

    def hear_end(self, _model: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        """Called when the model has returned."""
        if self._inside:
            return
        newest = self.newest
        first, _ = self._spans.get(id(newest), (0, 0))
        if first:
            self._spans[id(newest)] = (first, read_number())

    def note_loss(self, loss: Tensor) -> None:
        """A loss is given, before its backward: note which calls of the model it was made from."""
        spans, self._spans = self._spans, {}
        used = set(spans) if len(spans) < 2 else find_calls(loss, spans)
        self._used = used | (self._used or set())
        # Calls that this loss does not hold may belong to the next one.
        self._spans = {key: span for key, span in spans.items() if key not in used}

    def _note(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_model_call: bool
    ) -> None:
        capture = Capture.take(fn, args, kwargs, model=self._model, devices=self._devices, is_model_call=is_model_call)
        if len(self._captures) >= MOST_CAPTURES:
            # Each holds its batch: an accumulation over hundreds of microbatches must not hold them all.
            del self._captures[: 1 - MOST_CAPTURES]
        self._captures.append(capture)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, calls of the model are replays, and none of them is noted."""
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside

    @property
    def newest(self) -> Capture | None:
        """The microbatch that was noted last."""
        return self._captures[-1] if self._captures else None

    def take(self) -> list[Capture]:
        """Return the microbatches of the step that is over."""
        captures, used = self._captures, self._used
        # After healthy steps too: this is what releases the batches.
        self._captures, self._spans, self._used = [], {}, None
        if used is None:
            return captures
        return [one for one in captures if id(one) in used or not one.is_model_call]

    # --- after a bad step -------------------------------------------------------------------------------------------

    def claim(self, reading: Reading, findings: Sequence[Finding]) -> bool:
        """Whether what was found is worth a replay, which is then counted; the same on all ranks of a training."""
        is_worth_it = reading.is_nonfinite or self._find_suspect(findings) is not None
        return is_worth_it and self._can_replay(reading) and self._count(reading.step)

    def note_good(self, step: int) -> None:
        """Note a step that was made with finite numbers."""
        self._last_good = step

    def add_since_when(self, cause: Cause, given: Collection[str]) -> Cause:
        """Add when a bad weight went bad: before the first step (`given`), in a checkpoint, or during training."""
        if cause.phase != "parameter" or cause.module is None:  # None: another network's, which is not watched
            return cause
        if cause.name in given:
            note = (
                "It was so before the first step: the checkpoint that it was loaded from, or its initialisation, "
                "held it."
            )
        elif self._last_good is None:
            note = "It was finite before the first step."
        else:  # the weights were still finite in that step's forward
            names = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self._optimizers))
            note = (
                f"The gradients of step {self._last_good} were finite, so it was written after them: by the step of "
                f"{names}, or by the program itself."
            )
        return dataclasses.replace(cause, note=f"{note} {cause.note}".strip())

    def claim_error(self, step: int) -> bool:
        """Whether an error in `step` is worth a replay, which is then counted; not on many ranks, which do not know."""
        return self._config.enabled and not _has_many_ranks() and self._count(step)

    def _count(self, step: int) -> bool:
        """Count a replay; False if there were enough lately."""
        if self._num_made >= self._config.first and step - self._last_step < self._config.cooldown:
            return False
        self._num_made, self._last_step = self._num_made + 1, step
        return True

    @property
    def needs_all_ranks(self) -> bool:
        """Whether no rank can run the model alone: it holds a part of the weights only."""
        return any(is_dtensor(p) for p in self._model.parameters())

    def find_obstacle(self, captures: Sequence[Capture]) -> str:
        """Return why this rank cannot take part in a replay of all ranks; empty if it can."""
        if not captures:
            return "nothing of the step was captured"
        try:
            return Effects(captures[-1].fn, captures[-1].args, captures[-1].kwargs).obstacle or ""
        except Exception as error:  # an object of the program's that cannot be looked at; the other ranks wait
            return f"looking at what the step refers to raised {error!r:.120}"

    def investigate(
        self,
        captures: Sequence[Capture],
        reading: Reading,
        findings: Sequence[Finding],
        *,
        meeting: Meeting | None = None,
        is_suspect: bool = True,
        may_raise: bool = False,
        access: GradientAccess = GradientAccess.POSSIBLE,
    ) -> Cause | None:
        """Return the cause of what was found, if it can be determined; keep the batch. Call `claim` first.

        `meeting`: all ranks make this call at once. `is_suspect`: whether the step was bad on this rank. `may_raise`:
        the step has raised an error, and does so again. `access`: what the program could do to the gradients.
        """
        if not captures:
            return None
        expects = _name_kind(reading) if reading.is_nonfinite and is_suspect else None
        inside, self._inside = self._inside, True  # the replays call the model too
        try:
            # After the step, before the first replay: what the step changed stays, what replays change is undone.
            effects = Effects(captures[-1].fn, captures[-1].args, captures[-1].kwargs)
            if effects.obstacle is not None:
                self._report_obstacle(effects.obstacle)
                return None
            scale = reading.loss_scale or 1.0
            cause, capture = diagnose_captures(
                captures,
                scale=scale,
                suspect=None if expects else self._find_suspect(findings),
                optimizers=self._optimizers,
                expects=expects,
                effects=effects,
                rest=self._find_rest(captures, reading, access),
                **self._choose_replay(reading, meeting),
            )
            return self._keep_batch(cause, capture, reading.step, scale)
        except Exception as error:  # a failed diagnosis must not end the training
            if not may_raise:
                logger.error("the diagnosis of step %d failed, training continues: %r", reading.step, error)
            return None
        finally:
            self._inside = inside

    def _find_rest(self, captures: Sequence[Capture], reading: Reading, access: GradientAccess) -> Rest:
        # The gradients of a bad loss are bad before the program can change them.
        access = GradientAccess.NONE if reading.loss_is_nonfinite else access
        num = reading.num_microbatches - reading.num_dropped_microbatches
        return Rest(access=access, num_microbatches=num, num_replayed=min(num, len(captures)))

    def _choose_replay(self, reading: Reading, meeting: Meeting | None) -> dict[str, Any]:
        """Return the fields of a Step that say who replays it."""
        if not _has_many_ranks():
            return {}
        if meeting is None:
            return {"alone": self._ddp or find_ddp(self._model), "is_alone": True}
        sharded = self.needs_all_ranks
        # A bad loss is made in the forward: the backward of shards, with its own collectives, need not be run.
        forward_only = sharded and reading.loss_is_nonfinite
        return {"together": self._ddp, "meeting": meeting, "sharded": sharded, "forward_only": forward_only}

    def _report_obstacle(self, obstacle: str) -> None:
        """Report once that a replay would use up data. From now on note the model's own call, which can be replayed."""
        if not self._hears_inside:
            self._hears_inside = True
            logger.warning(
                "the step function is not replayed: %s. Draw the batch outside the function and pass it as an "
                "argument to have failures traced to their line.",
                obstacle,
            )

    def _find_suspect(self, findings: Sequence[Finding]) -> str | None:
        worst = [finding for finding in findings if finding.severity is not Severity.INFO]
        return next((SUSPECTS[f.kind] for f in worst if f.kind in SUSPECTS), None)

    def _can_replay(self, reading: Reading) -> bool:
        """On many ranks only a bad step."""
        return self._config.enabled and (reading.is_nonfinite or not _has_many_ranks())

    def _keep_batch(self, cause: Cause | None, capture: Capture | None, step: int, scale: float) -> Cause | None:
        if cause is None or capture is None:
            return None
        cause = _name_call(dataclasses.replace(cause, step=step), capture)
        if self._quarantine is None:
            return cause
        try:
            path = self._quarantine.save(step, capture, scale=scale)
        except Exception as error:  # a full disk, a type that cannot be stored, numpy missing: the cause is known
            logger.error("the batch of step %d could not be kept, training continues: %r", step, error)
            return cause
        return cause if path is None else dataclasses.replace(cause, batch=path)

    def close(self) -> None:
        """Stop listening to the model."""
        for hook in self._hooks:
            hook.remove()
        self.take()


def _cut(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, on the same memory, whose gradient counts all the same."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _name_call(cause: Cause, capture: Capture) -> Cause:
    """A cause in the batch of a model's call: the line that called the model, where the replay has none to show."""
    if cause.file is not None or capture.caller is None or cause.phase not in ("input", "parameter"):
        return cause
    code, line = capture.caller[:2]
    return dataclasses.replace(cause, file=code.co_filename, line=line, source=read_source(code, line))


def _name_kind(reading: Reading) -> str:
    is_nan = reading.num_nan > 0 or (reading.loss is not None and reading.loss != reading.loss)
    return "nan" if is_nan else "inf"


def _has_many_ranks() -> bool:
    """Whether there are several ranks: a replay on one would enter collectives alone."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def find_ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the live wrapper that averages the gradients of this model; walks all live objects, about 0.1 s.

    A script does not hand it over, and a replay through it that stops early would leave its reducer half prepared.
    """
    own, kind = {id(p) for p in model.parameters()}, nn.parallel.DistributedDataParallel
    return next((one for one in list_live(kind) if own & {id(p) for p in one.parameters()}), None)
