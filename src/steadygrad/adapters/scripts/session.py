"""Session: connects the places in torch that every training passes to a Watch for each optimizer.

Created when torch has been imported, before the script creates anything. Replaced for this process: what happens when
an optimizer is created and when it steps (once per class), `torch.autograd.backward`, `GradScaler.step` and
`clip_grad_norm_`. Forked processes are left untouched, and so is everything inside a compiled graph. Its own failure
never ends or alters a training: it is reported once, and that optimizer continues unguarded.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from steadygrad.adapters.scripts.closures import step_with_closure
from steadygrad.adapters.scripts.messages import Terminal
from steadygrad.adapters.scripts.options import Options
from steadygrad.adapters.scripts.owners import list_parts
from steadygrad.adapters.scripts.watch import Circumstances, Loss, Watch
from steadygrad.measure import loads
from steadygrad.measure.gradients import is_dtensor

logger = logging.getLogger("steadygrad")
MAX_WATCHED = 16
"""How many optimizers of a script are guarded; one per parameter, stepped inside backward, is a different design."""
NUM_FRAMES = 10
"""Most frames between a Guard and the optimizer's own step: ours, the scheduler's, torch's wrappers."""
KEY, LOSS = "_steadygrad_watch", "_steadygrad_loss"
"""Attributes under which an optimizer keeps its Watch, and a scaled loss the unscaled one."""


class Session:
    """One run of a script in one process."""

    def __init__(self, options: Options, *, rank: int | None = None) -> None:
        """`rank`: that of a process started by the script; otherwise it comes from torchrun's variables."""
        self._options = options
        self._process = os.getpid()
        torchrun = int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
        self._rank = torchrun if rank is None else rank
        self._terminal = Terminal(sys.stderr, rank=self._rank)
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._num_watched = 0
        self._has_started_others = False
        self._losses: list[Loss] = []
        self._losses_are_spent = False
        self._thread = threading.local()

    # --- hooks ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Install all hooks."""
        self._keep_log_to_itself()
        loads.install()
        _replace(Optimizer, "__init__", self._after_making)
        _replace(torch.autograd, "backward", self._around_backward)
        _replace(torch.amp.GradScaler, "scale", self._around_scaling)
        _replace(torch.amp.GradScaler, "step", self._around_scaler)
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            _replace(place, "clip_grad_norm_", self._around_clipping)
        atexit.register(self._tell_nothing)
        for place in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            _replace(place, "start_processes", self._around_starting)

    def close(self) -> None:
        """Close every record now; without it they are closed when the process ends."""
        for watch in list(self._watches):
            watch.finish()

    def _tell_nothing(self) -> None:
        """Report at exit that the script created no optimizer: silence would suggest that all is well."""
        if not self._num_watched and not self._has_started_others and os.getpid() == self._process:
            self._terminal.say("the script made no optimizer, so nothing was guarded and nothing is recorded")

    def _keep_log_to_itself(self) -> None:
        """Log only errors, since the script's logging may go to standard output; incidents are printed here."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.ERROR)
        logger.addHandler(handler)
        logger.propagate = False

    @property
    def _is_here(self) -> bool:
        """Whether this is the script's own process, running the script's code and not ours."""
        return os.getpid() == self._process and not getattr(self._thread, "is_ours", False)

    # --- what is made -----------------------------------------------------------------------------------------------

    def _after_making(self, make: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        if not self._is_here:
            return
        kind = type(optimizer)
        if not getattr(kind.step, "_is_gated", False):
            _replace(kind, "step", self._around_step)
            kind.step._is_gated = True  # type: ignore[attr-defined]
        self._ours(self._watch, optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        self._num_watched += 1
        if self._num_watched > MAX_WATCHED:
            if self._num_watched == MAX_WATCHED + 1:
                self._terminal.say(f"the first {MAX_WATCHED} optimizers are guarded, further ones are not")
            vars(optimizer)[KEY] = None
            return
        watch = Watch(
            optimizer,
            config=self._options.config,
            observe=self._options.observe,
            terminal=self._terminal,
            run_dir=self._find_folder(),
        )
        vars(optimizer)[KEY] = watch  # lives as long as the optimizer; its state_dict and pickles leave it out
        self._watches.add(watch)
        listener = _Listener(weakref.ref(watch), self)
        for part in list_parts(watch.owner):
            hear_calls(part, listener)

    def _around_starting(self, start: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._has_started_others = True
        return start(GuardedEntry(fn, self._options) if self._is_here else fn, *args, **kwargs)

    def _find_folder(self) -> Path | None:
        """Return the run directory of the next optimizer on this rank."""
        folder = self._options.run_dir
        if folder is not None and self._rank:
            folder = folder / f"rank-{self._rank}"
        if folder is not None and self._num_watched > 1:
            folder = folder / f"optimizer-{self._num_watched - 1}"
        return folder

    # --- what happens in a step -------------------------------------------------------------------------------------

    def _around_backward(
        self, run: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        is_loss = grad_tensors is None and isinstance(tensors, Tensor) and tensors.numel() == 1
        is_inside = torch._C._current_graph_task_id() != -1  # inside another backward, as with activation checkpointing
        if is_loss and not is_inside and self._is_here:
            self._note_loss(tensors)
        run(tensors, grad_tensors, *args, **kwargs)

    def _note_loss(self, loss: Tensor) -> None:
        if self._losses_are_spent:
            self._losses, self._losses_are_spent = [], False
        true_loss = vars(loss).get(LOSS)
        value = loss.detach() if true_loss is None else true_loss
        self._losses.append(Loss(value.reshape(()), is_scaled=true_loss is None))
        for watch in self._watches:
            watch.forget_clipping()

    def _around_scaling(self, scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Remember the unscaled loss: a scaled loss can overflow where the loss itself did not."""
        scaled = scale(scaler, outputs)
        if self._is_here and isinstance(scaled, Tensor) and scaled is not outputs and scaled.numel() == 1:
            vars(scaled)[LOSS] = outputs.detach()
        return scaled

    def _around_clipping(
        self, clip: Callable[..., Tensor], parameters: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not self._is_here:
            return clip(parameters, max_norm, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped = {id(p) for p in parameters}
        watches = [watch for watch in self._watches if watch.is_about(clipped)]
        for watch in watches:
            self._ours(watch.note_clipping)
        norm = clip(parameters, max_norm, *args, **kwargs)
        for watch in watches:
            self._ours(watch.note_clipped, norm, max_norm)
        return norm

    def _around_step(self, make: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._is_here or getattr(self._thread, "is_stepping", False) or _is_called_by_guard():
            return make(optimizer, *args, **kwargs)
        if KEY not in vars(optimizer):  # a copy, or loaded from a file: its constructor never ran
            self._ours(self._watch, optimizer)
        watch: Watch | None = vars(optimizer).get(KEY)
        if watch is None:
            return make(optimizer, *args, **kwargs)
        self._thread.is_stepping = self._thread.has_stepped = True
        try:
            return self._step(watch, functools.partial(make, optimizer), optimizer, args, kwargs)
        finally:
            self._thread.is_stepping = False
            self._losses_are_spent = True

    def _step(self, watch: Watch, make: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if callable(kwargs.get("closure", args[0] if args else None)):
            return step_with_closure(
                make,
                optimizer,
                args,
                kwargs,
                is_bad=lambda: bool(self._ours(watch.measure, self._look_around(optimizer))),
                conclude=lambda skipped: self._ours(watch.conclude, skipped=skipped),
            )
        bad = bool(self._ours(watch.measure, self._look_around(optimizer)))
        result = None if bad else make(*args, **kwargs)
        self._ours(watch.conclude, skipped=bad)
        return result

    def _around_scaler(
        self, make: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        watch: Watch | None = vars(optimizer).get(KEY)
        if watch is None or not self._is_here or not scaler.is_enabled():
            return make(scaler, optimizer, *args, **kwargs)
        self._thread.scaler, self._thread.has_stepped = scaler, False
        try:
            result = make(scaler, optimizer, *args, **kwargs)
            if not self._thread.has_stepped:  # the scaler found an overflow and skipped the step
                self._ours(watch.measure, self._look_around(optimizer))
                self._ours(watch.conclude, skipped=True)
                self._losses_are_spent = True
            return result
        finally:
            self._thread.scaler = None

    def _look_around(self, optimizer: Optimizer) -> Circumstances:
        scaler = getattr(self._thread, "scaler", None)
        many = _count_ranks() > 1
        return Circumstances(
            losses=tuple(self._losses),
            # Ranks share gradients but not losses; with several optimizers it is unknown whose loss it is.
            loss_counts=not many and self._num_watched == 1,
            may_skip=not many or not _is_sharded(optimizer),
            carried_scale=getattr(optimizer, "grad_scale", None),
            loss_scale=None if scaler is None else scaler._get_scale_async(),
        )

    # --- our own ----------------------------------------------------------------------------------------------------

    def hear(self, watch: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when a model is called."""
        if self._is_here and module.training and torch.is_grad_enabled():
            self._ours(watch.begin, module, args, kwargs)

    def _ours(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call our own code. Return None if it fails: the training continues as if we were not there."""
        self._thread.is_ours = True
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._give_up(call, error)
            return None
        finally:
            self._thread.is_ours = False

    def _give_up(self, call: Callable[..., Any], error: Exception) -> None:
        owner, name = getattr(call, "__self__", None), getattr(call, "__qualname__", "a part")
        logger.error("steadygrad: %s failed, the script goes on without it: %r", name, error)
        logger.debug("in full:", exc_info=error)
        if isinstance(owner, Watch):
            vars(owner.optimizer)[KEY] = None


class GuardedEntry:
    """Entry of a process that the script starts with `torch.multiprocessing.spawn`: runs its function in a Session.

    Such a process begins as a fresh interpreter. Workers of a DataLoader are started differently.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function, self._options = function, options

    def __call__(self, number: int, *args: Any) -> Any:
        session = Session(self._options, rank=number)
        session.begin()
        try:
            return self._function(number, *args)
        finally:
            session.close()  # such processes exit without running exit handlers


class _Listener:
    """Forwards calls of a model without keeping its Watch alive."""

    def __init__(self, watch: weakref.ref[Watch], session: Session) -> None:
        self._watch, self._session = watch, session

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        watch = self._watch()
        if watch is not None:
            self._session.hear(watch, module, args, kwargs)


def _replace(place: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `place.name(...)` by `around(original, ...)`, except inside a graph that is being compiled."""
    original = getattr(place, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    setattr(place, name, replaced)


def _is_called_by_guard() -> bool:
    """Whether the script has its own Guard, which takes this very step. A few wrappers are between the two."""
    frame = inspect.currentframe()
    for _ in range(NUM_FRAMES):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "steadygrad.act.reflex":
            return True
        frame = frame.f_back
    return False


def _count_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _is_sharded(optimizer: Optimizer) -> bool:
    """Whether each rank holds a different part of the gradients, so that one may see a NaN that the others do not."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return any(is_dtensor(p) or hasattr(p, "_sharded_size") or hasattr(p, "_params") for p in parameters)


# --- calls --------------------------------------------------------------------------------------------------------
# Listen for calls of a module without leaving a trace in what the script saves.
#
# A forward pre-hook lives in the module's own dict, and `torch.save(model)` would pickle it. So the dicts that hold
# ours pickle and copy themselves as the plain ones they would be without it. In a compiled graph the hook does nothing.


OnCall = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]


class _Hooks(OrderedDict[int, Any]):
    """A dict of hooks, one of which is ours."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = -1
        self.listeners: list[OnCall] = []

    def values(self) -> Any:
        """Return the hooks without ours: torch.jit.script compiles these, and ours is Python. Calls use `items()`."""
        return {key: hook for key, hook in self.items() if key != self.ours}.values()

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter([(key, hook) for key, hook in self.items() if key != self.ours])


def hear_calls(module: nn.Module, call: OnCall) -> bool:
    """Have `call(module, args, kwargs)` run before each forward; return False where that is not possible."""
    hooks, flags = (vars(module).get(name) for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"))
    if isinstance(hooks, _Hooks):
        hooks.listeners.append(call)
        return True
    if type(hooks) is not OrderedDict or type(flags) is not OrderedDict or hooks or flags:
        return False  # the script's own handles refer to these dicts, and could no longer remove their hooks
    hooks, flags = _Hooks(), _Hooks()
    module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs = hooks, flags

    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and called is module:
            for listener in hooks.listeners:
                listener(called, args, kwargs)

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    hooks.ours = flags.ours = handle.id
    hooks.listeners.append(call)
    return True
