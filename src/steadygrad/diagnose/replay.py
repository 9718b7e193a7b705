"""Step: a function with its arguments -> what happens when it is run again, with every op shown to an observer.

Runs forward and backward as the failing step did: same generators, same autocast, compiled code eagerly. What is
left behind is put back (`keep.py`), also when the function raises. The optimizer is not run.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad.act.call_listener import listeners_muted
from steadygrad.act.patches import Patches
from steadygrad.diagnose.argument_names import spell_inputs
from steadygrad.diagnose.calls import have_no_values, have_parts
from steadygrad.diagnose.capture import AutocastState, Capture
from steadygrad.diagnose.effects import Effects
from steadygrad.diagnose.keep import Kept, StorageKeeper, undone
from steadygrad.diagnose.meeting import CollectiveError, Meeting
from steadygrad.diagnose.step_arguments import name_inputs
from steadygrad.errors import UsageError
from steadygrad.measure.graph_leaves import find_leaves
from steadygrad.measure.loss import find_loss
from steadygrad.state.collect import settle_shards
from steadygrad.state.shards import take_local

COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_dtensor")
"""Where torch's dispatcher keeps the ops that wait for other ranks."""

_num_replays = 0


def is_replaying() -> bool:
    """Whether a step is being run again, to find what broke it.

    A replay undoes what it does to tensors, generators and the objects that the step refers to, but not what leaves the
    process: a function that writes a log or sends a message asks this first.
    """
    return _num_replays > 0


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Inside, `is_replaying()` is true, and what the function prints or logs is dropped: it was output before."""
    global _num_replays
    _num_replays += 1
    # All of this is process-wide: what other threads print or log meanwhile is dropped too.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with listeners_muted(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        _num_replays -= 1


class Observer(Protocol):
    """Makes each call of a replay itself."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the call and return its result."""
        ...


@dataclass(slots=True)
class Run:
    """One replay, while what it made is still there."""

    result: Any = None
    loss: Tensor | None = None
    error: BaseException | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    keeper: StorageKeeper = field(default_factory=StorageKeeper)

    def forget(self) -> None:
        """Release everything that the replay made."""
        self.result = self.loss = None
        self.grads = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is run again."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    random: Mapping[str, Any] | None = None
    """State of the generators before the step; None: as they stand."""
    scale: float = 1.0
    """The loss scale of the failing step."""
    autocast: AutocastState | None = None
    """Autocast of the failing step; None: the current one."""
    wrappers: tuple[nn.DataParallel[Any], ...] = ()
    """DataParallel wrappers, which are replayed on one device, without threads."""
    optimizers: tuple[Optimizer, ...] = ()
    """Optimizers that `fn` may step itself; their own state is restored."""
    is_model_call: bool = False
    """`fn` is the model: its output is not a loss, unless it contains one."""
    call: tuple[CodeType, int] | None = None
    """For a model's call: code and instruction of the program's line that made it."""
    extra_leaves: tuple[tuple[str, Tensor], ...] = ()
    """Leaves besides the model's parameters whose gradients count."""
    alone: nn.parallel.DistributedDataParallel | None = None
    """The wrapper by which this rank trains with others, while they wait elsewhere: nothing may be exchanged."""
    is_alone: bool = False
    """Replayed on this rank while the others wait elsewhere: a collective is not made."""
    stops_at_bad_loss: bool = False
    """No backward from a loss that is not finite: whether the step fails is known then."""
    forward_only: bool = False
    """No backward at all: only the loss is wanted."""
    sharded: bool = False
    """FSDP2 holds the weights: without a backward no graph is built, since it expects a backward after a forward that
    has one, and the weights that the forward gathered are let go."""
    together: nn.parallel.DistributedDataParallel | None = None
    """Replayed on all ranks at once: collectives of the forward are made, gradients and buffers are not exchanged."""
    meeting: Meeting | None = None
    """Replayed on all ranks at once: they agree before each collective, so that none waits for one that raised."""
    effects: Effects | None = None
    """What the function can reach of the program's own objects, put back after each replay."""

    @classmethod
    def of(cls, capture: Capture, scale: float = 1.0) -> Step:
        """Return the step that was captured."""
        given = {id(tensor) for _, tensor in name_inputs(capture.args, capture.kwargs)}
        named = spell_inputs(capture.fn, capture.args, capture.kwargs)
        inputs = [(name, tensor) for name, tensor in named if id(tensor) in given]
        leaves = tuple((f"input {name}", tensor) for name, tensor in inputs if tensor.requires_grad and tensor.is_leaf)
        return cls(
            fn=capture.fn,
            args=capture.args,
            kwargs=capture.kwargs,
            model=capture.inner_model,
            random=capture.random,
            scale=scale,
            autocast=capture.autocast,
            wrappers=capture.wrappers,
            is_model_call=capture.is_model_call,
            call=capture.call,
            extra_leaves=leaves,
        )

    def spell_inputs(self, *, at_call: bool = False) -> list[tuple[str, Tensor]]:
        """Return the tensors of the batch by the program's own names; `at_call`: by those of the call of the model."""
        return spell_inputs(self.fn, self.args, self.kwargs, self.call if at_call else None)

    @property
    def named_leaves(self) -> list[tuple[str, Tensor]]:
        """Parameters, and leaves that the arguments hold."""
        named = [] if self.model is None else list(self.model.named_parameters())
        return [*named, *self.extra_leaves]

    @contextlib.contextmanager
    def replay(self, observer: Observer | None = None) -> Iterator[Run]:
        """Run it; inside, look at what it left. Afterwards everything is as before."""
        kept = Kept(self.model, [leaf for _, leaf in self.named_leaves], self.random)
        autocast = contextlib.nullcontext() if self.autocast is None else self.autocast.enter()
        with (
            # Left in reverse order: `kept` restores tensors after everything that may still touch them has ended.
            replaying(),
            kept() as keeper,
            autocast,
            on_one_device(self.wrappers),
            on_one_rank(self.alone or self.together),
            undone(self.optimizers),
            torch.set_grad_enabled(not (self.sharded and self.forward_only)),
        ):
            run = Run(keeper=keeper)
            outside: list[tuple[Tensor, Tensor | None]] = []
            try:
                self._run_observed(run, outside, observer)
                self._settle()
                # Still inside: what the caller looks at (weights, buffers, gradients) is put back when it leaves.
                yield run
            finally:
                # Not known to `kept`, which is entered before the graph shows these leaves.
                for leaf, grad in outside:
                    leaf.grad = grad
                self._settle()
                if self.effects is not None:
                    self.effects.undo()
                run.forget()  # an output of the size of a vocabulary must not live through the next replay

    def _run_observed(self, run: Run, outside: list[tuple[Tensor, Tensor | None]], observer: Observer | None) -> None:
        if self.meeting is not None:
            self.meeting.begin()
        try:
            with observe(run.keeper, observer, alone=self.is_alone, meeting=self.meeting):
                self._run(run, outside)
        finally:
            # Also after an error: the other ranks wait for this word.
            if self.meeting is not None:
                self.meeting.finish(failed=run.error is not None)

    def _settle(self) -> None:
        """Put shards back before modules are compared or restored: gathered weights are in their place."""
        if self.sharded and self.model is not None:
            settle_shards(self.model)

    def _run(self, run: Run, outside: list[tuple[Tensor, Tensor | None]]) -> None:
        try:
            run.result = call_user(self.fn, self.args, self.kwargs)
            run.loss = find_loss_if_any(run.result)
            if run.loss is None and self.is_model_call:
                run.loss = sum_outputs(run.result)
            if self.forward_only:
                return
            if self.stops_at_bad_loss and run.loss is not None and not run.loss.isfinite().all():
                return
            if run.loss is not None and run.loss.requires_grad:
                # Before backward, which frees the graph that shows them.
                outside += self._clear_outside(run.loss)
                # Scaled as the step was: a gradient that overflows in fp16 does so only then.
                (run.loss if self.scale == 1.0 else run.loss * self.scale).backward()
        # Not Ctrl-C, which passes; what was changed is put back on its way out.
        except Exception as error:
            run.error = error
        finally:
            # After an error too: gradients that were made before it are part of what went wrong.
            named = [*self.named_leaves, *(("", leaf) for leaf, _ in outside)]
            run.grads = {
                name or f"a tensor of shape {tuple(leaf.shape)} outside the model": take_local(leaf.grad)
                for name, leaf in named
                if leaf.grad is not None
            }

    def _clear_outside(self, loss: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Set aside the gradients of unnamed leaves of the graph, such as another model's weights."""
        known = {id(leaf) for _, leaf in self.named_leaves}
        cleared = []
        for leaf in find_leaves(loss):
            if id(leaf) not in known:
                known.add(id(leaf))
                cleared.append((leaf, leaf.grad))
                leaf.grad = None
        return cleared


def call_user(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the user's function. In a stack, this frame marks where the user's part begins."""
    return fn(*args, **kwargs)


def sum_outputs(result: Any) -> Tensor | None:
    """Return a stand-in for a loss computed elsewhere: every output contributes, except -inf, which masks."""
    # float: the sum of fp16 outputs may overflow where none of them does. A fill, since -inf * 0 is NaN.
    parts = [tensor.float().masked_fill(tensor == -torch.inf, 0.0).sum() for tensor in find_floats(result)]
    return torch.stack(parts).sum() if parts else None


def find_floats(result: Any) -> list[Tensor]:
    """Return the floating tensors of an output."""
    flat = [part for value in _open(result) for part in _open(value)]
    return [value for value in flat if isinstance(value, Tensor) and value.is_floating_point()]


@contextlib.contextmanager
def on_one_device(wrappers: Iterable[nn.DataParallel[Any]]) -> Iterator[None]:
    """DataParallel without devices calls its module directly."""
    before = [(wrapper, wrapper.device_ids) for wrapper in wrappers]
    for wrapper, _ in before:
        wrapper.device_ids = []
    try:
        yield
    finally:
        for wrapper, devices in before:
            wrapper.device_ids = devices


@contextlib.contextmanager
def on_one_rank(ddp: nn.parallel.DistributedDataParallel | None) -> Iterator[None]:
    """Inside, the model sends nothing: as in `ddp.no_sync()`, and its buffers are not broadcast.

    A static graph counts its forwards, and its first ones enqueue an all-reduce that `no_sync` does not hold back:
    there the wrapper's own forward is left out.
    """
    if ddp is None:
        yield
        return
    patches = Patches()
    patches.replace(ddp, "require_backward_grad_sync", False)
    patches.replace(ddp, "require_forward_param_sync", False)
    if ddp.static_graph:
        patches.replace(ddp, "forward", lambda *args, **kwargs: ddp.module(*args, **kwargs))
    try:
        yield
    finally:
        patches.undo()


def find_loss_if_any(result: Any) -> Tensor | None:
    """Return the loss in what a step returned, with or without a graph; None when there is none to be found."""
    try:
        return find_loss(result)
    except UsageError:
        return next((t for t in _find_scalars(result) if t.is_floating_point()), None)


def _find_scalars(result: Any) -> list[Tensor]:
    return [value for value in _open(result) if isinstance(value, Tensor) and value.numel() == 1]


def _open(result: Any) -> Iterable[Any]:
    if isinstance(result, Mapping):
        return result.values()
    return result if isinstance(result, tuple | list) else [result]


def observe(
    keeper: StorageKeeper, observer: Observer | None, *, alone: bool = False, meeting: Meeting | None = None
) -> TorchDispatchMode:
    """Return a mode that shows each call to both; `alone`: one that would wait for other ranks is not made.

    `meeting`: the other ranks make it too, if they all come to it.
    """
    return _ReplayMode(keeper, observer, alone=alone, meeting=meeting)


class _ReplayMode(TorchDispatchMode):
    """Shows each call to the keeper and to the observer."""

    def __init__(
        self, keeper: StorageKeeper, observer: Observer | None, *, alone: bool, meeting: Meeting | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeper, self._observer, self._alone, self._meeting = keeper, observer, alone, meeting

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a replay, so torch need not load its compiler to keep it out of here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch sets this mode aside in here, so what keeper and observer compute is not observed.
        if have_parts(types):
            return NotImplemented
        if have_no_values(types):  # not in every replay: the observers count calls
            return func(*args, **kwargs)
        # Before the call, not after: alone, it would never return.
        if func.namespace in COLLECTIVES:
            if self._alone:
                raise CollectiveError(f"{func} talks to other ranks")
            if self._meeting is not None:
                self._meeting.before_call(str(func))
        self._keeper.before(func, args, kwargs)
        if self._observer is None:
            result = func(*args, **kwargs)
        else:
            result = self._observer.call(func, args, kwargs)
        self._keeper.after(func, result)
        return result
