"""Session: connects the places in torch that every training passes to a Watch for each optimizer.

Created when torch has been imported, before the script creates anything. Replaced for this process: what happens when
an optimizer is created and when it steps (once per class), `torch.autograd.backward`, `GradScaler.step` and
`clip_grad_norm_`. A forked process is guarded on its own once it makes or steps an optimizer; everything inside a
compiled graph is left untouched. Its own failure never ends or alters a training: it is reported once, and that
optimizer continues unguarded. Light to import: a worker of a DataLoader that inherits it must not load the rest.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from steadygrad.adapters.scripts.agreement import count_ranks
from steadygrad.adapters.scripts.circumstances import Circumstances
from steadygrad.adapters.scripts.hard_exit import before_hard_exit
from steadygrad.adapters.scripts.heirs import Heirs, share
from steadygrad.adapters.scripts.losses import LOSS, Losses
from steadygrad.adapters.scripts.messages import Terminal, Voice
from steadygrad.adapters.scripts.options import Options
from steadygrad.adapters.scripts.own_path import own_path
from steadygrad.adapters.scripts.places import MOST_TRIALS, Places, spell_folder
from steadygrad.adapters.scripts.replacing import is_called_by_guard, replace
from steadygrad.adapters.scripts.trained import list_parameters
from steadygrad.judgement.raised import may_be_of_numbers
from steadygrad.state.calls import hear_calls

if TYPE_CHECKING:
    from steadygrad.adapters.scripts.watch import Watch

logger = logging.getLogger("steadygrad")
MAX_WATCHED = 16
"""How many living optimizers are guarded; one per parameter, stepped inside backward, is a different design."""
_current: list[Session] = []
"""The Session of this process, or of the one that it was forked from."""


class Session:
    """One run of a script in one process."""

    def __init__(self, options: Options, *, is_child: bool = False) -> None:
        """`is_child`: the script has started this process."""
        self._options, self.is_child = options, is_child
        self._process = os.getpid()
        self.terminal = Terminal(sys.stderr, is_child=is_child)
        self._places = Places(options.run_dir, is_child=is_child)
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        # Beside the optimizers, not on them: a Watch holds all but the optimizer itself, so that it is freed with its
        # model as soon as the script lets go of it, without waiting for the garbage collector.
        self._known: weakref.WeakKeyDictionary[Optimizer, Watch | None] = weakref.WeakKeyDictionary()
        """Every optimizer seen, with its Watch; None where it is not guarded."""
        self._heirs = Heirs()
        self._lock = threading.RLock()
        """Held while another thread must not add to them, nor choose a name or folder."""
        self.num_made = self.num_guarded = 0
        """Optimizers that were made, and those that took a step under guard."""
        self.has_own_guard = False
        """Whether the script has its own Guard, which takes care of its optimizer."""
        self._losses = Losses()
        """Of the thread that called backward last; each thread has its own."""
        self._thread = threading.local()

    # --- hooks ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Install all hooks."""
        _current[:] = [self]
        self._keep_log_to_itself()
        self._note_loads()
        replace(Optimizer, "__init__", self._after_making)
        # Tensor.backward looks this name up at each call, so replacing it here is enough.
        replace(torch.autograd, "backward", self._around_backward)
        replace(torch.amp.GradScaler, "scale", self._around_scaling)
        replace(torch.amp.GradScaler, "step", self._around_scaler)
        # Both: scripts import the function from either.
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            replace(place, "clip_grad_norm_", self._around_clipping)
        # By sys.modules: the attribute torch.multiprocessing.spawn is the function of that name.
        for place in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            replace(place, "start_processes", self._around_starting)
        atexit.register(self._end)
        before_hard_exit(self._end_hard)

    def _end_hard(self, code: int) -> int:
        """The process leaves by `os._exit`: close every record; a code other than 0 is not a run that finished."""
        try:
            if code and sys.exc_info()[1] is None:
                raise SystemExit(code)  # for the record, which says how a run has ended
            self._end()
        except SystemExit:
            self._end()
        return code

    def _end(self) -> None:
        """Close every record, then report the totals when not every optimizer had its own line."""
        if os.getpid() == self._process:
            self.close()
            self._report_unseen()
            folder, start = self._options.run_dir, self._options.started_in
            self.terminal.report_totals("" if folder is None else f"; steadygrad report {spell_folder(folder, start)}")

    def _report_unseen(self) -> None:
        """Report optimizers of which no step was seen, though they keep a state or their parameters have gradients.

        Not one that wraps another, as SAM does: the same parameters were guarded in the steps of the inner one.
        """
        if self.num_guarded == 0:
            return  # reported for the whole run
        watches = self._list_watches()
        guarded = {id(p) for watch in watches if watch.has_stepped for p in list_parameters(watch.optimizer)}
        for watch in [one for one in watches if not one.has_stepped]:
            parameters, name = list_parameters(watch.optimizer), type(watch.optimizer).__name__
            if watch.optimizer.state and not guarded.issuperset(map(id, parameters)):
                self.terminal.say_once(f"no step of {name} was seen: if it has trained, it was NOT guarded")
            elif any(p.grad is not None and id(p) not in guarded for p in parameters):
                name += "" if type(watch.owner) is nn.Module else f" of {type(watch.owner).__name__}"
                self.terminal.say_once(f"{name} never took a step, though the loss reaches its parameters")

    def close(self) -> None:
        """Close every record now; without it they are closed when the process ends."""
        for watch in self._list_watches():
            watch.finish()

    def move_in(self) -> None:
        """Guard this process, which was forked from the one that the Session began in."""
        if self._process == os.getpid():
            return
        self._process, self.is_child = os.getpid(), True
        self.terminal = Terminal(sys.stderr, is_child=True)
        self._places.become_child()
        # The parent's watches stay with its optimizers; `_find_watch` replaces one when its optimizer steps here.
        self._watches, self._losses = weakref.WeakSet(), Losses()
        self.num_made = self.num_guarded = 0
        self._thread = threading.local()
        self._lock = threading.RLock()  # another thread may have held it when the process was forked

    def _keep_log_to_itself(self) -> None:
        """Log only errors, since the script's logging may go to standard output; incidents are printed here."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.ERROR)
        logger.addHandler(handler)
        logger.propagate = False

    def _note_loads(self) -> None:
        """Note which weights the script loads, from now on."""
        from steadygrad.measure import loads

        loads.install()

    @property
    def _is_here(self) -> bool:
        """Whether this is the script's own process, running the script's code and not ours."""
        return os.getpid() == self._process and not getattr(self._thread, "is_ours", False)

    # --- what is made -----------------------------------------------------------------------------------------------

    def _after_making(self, make: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        # First: torch wraps `step` of a new class in here (`_patch_step_function`). Ours must be the outer one, or the
        # hooks of the step would run for one that is skipped.
        make(optimizer, *args, **kwargs)
        # Before `_is_here`, which is False in a process that was forked and has not moved in.
        self.move_in()
        if not self._is_here:
            return
        kind = type(optimizer)
        # Inherited, so a subclass without a `step` of its own is not wrapped twice.
        if not getattr(kind.step, "_is_gated", False):
            replace(kind, "step", self._around_step)
            kind.step._is_gated = True  # type: ignore[attr-defined]
        with self._lock:
            known = dict(self._known)
        if not self._ours(self._heirs.admit, optimizer, known):
            self._ours(self._watch, optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        inherited = self._heirs.succeed(optimizer)
        if inherited is not None:
            with self._lock:
                self._known[optimizer] = inherited
            return
        with own_path():
            from steadygrad.adapters.scripts.owners import list_parts
            from steadygrad.adapters.scripts.watch import Watch

        with self._lock:
            self.num_made += 1
            number = self.num_made
            # If anything below fails it stays None: known, unguarded, and not tried again at each step.
            self._known[optimizer] = None
        if len(self._watches) >= MAX_WATCHED:
            gc.collect()  # an optimizer and its scheduler refer to each other
        if len(self._watches) >= MAX_WATCHED:
            self.terminal.say_once(f"{MAX_WATCHED} optimizers are guarded, any others at the same time are NOT guarded")
            return
        if number == 1 and multiprocessing.process.parent_process() is not None:
            multiprocessing.util.Finalize(None, self.close, exitpriority=10)  # exit handlers do not run there
        watch = Watch(
            share(optimizer),
            options=self._options,
            voice=Voice(self.terminal, type(optimizer).__name__, has_others=lambda: len(self._watches) > 1),
            number=number,
            choose_folder=self._choose_folder,
            list_optimizers=lambda: [watch.optimizer for watch in self._list_watches()],
        )
        with self._lock:
            self._known[optimizer] = watch
            self._watches.add(watch)
        listener = _Listener(weakref.ref(watch), self)
        for part in list_parts(watch.owner):
            hear_calls(part, listener)

    def _choose_folder(self, watch: Watch) -> Path | None:
        """Return the folder of an optimizer at its first step, when it also gets its name."""
        with self._lock:
            self.num_guarded += 1
            if not self._places.is_full and self._trains_beside_others(watch):
                gc.collect()  # unless the others are of an earlier trial, and only wait to be freed; half a second
            watch.voice.name = self._choose_name(watch)
            folder = self._places.choose(trains_beside_others=self._trains_beside_others(watch))
            if self._places.is_full:
                self.terminal.say_once(f"{MOST_TRIALS} trainings have a record; further ones are guarded without one")
            return folder

    def _choose_name(self, watch: Watch) -> str:
        """Return a name that no other living optimizer has: 'Adam', 'Adam of Generator', 'Adam 2 of Generator'."""
        others = [other for other in self._list_watches() if other is not watch]
        kind = type(watch.optimizer).__name__
        if all(type(other.optimizer).__name__ != kind for other in others):
            return kind
        whose = "" if type(watch.owner) is nn.Module else f" of {type(watch.owner).__name__}"
        taken = {other.voice.name for other in others}
        names = (f"{kind}{number}{whose}" for number in ("", *(f" {n}" for n in range(2, MAX_WATCHED + 2))))
        return next(name for name in names if name not in taken)

    def _trains_beside_others(self, watch: Watch) -> bool:
        return any(other.has_stepped for other in self._list_watches() if other is not watch)

    def _around_starting(self, start: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return start(GuardedEntry(fn, self._options) if self._is_here else fn, *args, **kwargs)

    # --- what happens in a step -------------------------------------------------------------------------------------

    def _around_backward(
        self, run: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        # With gradients given, backward starts from an intermediate tensor and not from a loss.
        is_loss = grad_tensors is None and isinstance(tensors, Tensor) and tensors.numel() == 1
        is_inside = torch._C._current_graph_task_id() != -1  # inside another backward, as with activation checkpointing
        if is_loss and not is_inside and self._is_here:
            # vars() of a threading.local is this thread's own dict.
            # A name of its own: another thread's backward may set the attribute before this one has noted its loss.
            losses = self._losses = vars(self._thread).setdefault("losses", Losses())
            watches = self._list_watches_here()
            if losses.are_open and watches and self._ours(_are_cleared, watches):
                losses.forget()
            losses.note(tensors)
            loss = losses.newest
            for watch in watches:
                self._ours(watch.note_backward, tensors)
            run(tensors, grad_tensors, *args, **kwargs)
            for watch in watches:
                self._ours(watch.note_gradients, loss, has_many_ranks=count_ranks() > 1)
        else:
            run(tensors, grad_tensors, *args, **kwargs)

    def _around_scaling(self, scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Remember the unscaled loss: a scaled loss can overflow where the loss itself did not."""
        scaled = scale(scaler, outputs)
        # A disabled scaler returns the loss itself, which is the script's: nothing may be attached to it.
        if self._is_here and isinstance(scaled, Tensor) and scaled is not outputs and scaled.numel() == 1:
            vars(scaled)[LOSS] = outputs.detach()
        return scaled

    def _around_clipping(
        self, clip: Callable[..., Tensor], parameters: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not self._is_here:
            return clip(parameters, max_norm, *args, **kwargs)
        # A list: model.parameters() is a generator, which can be read only once.
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped = {id(p) for p in parameters}
        watches = [watch for watch in self._list_watches_here() if watch.is_about(clipped)]
        for watch in watches:
            self._ours(watch.note_clipping)
        norm = clip(parameters, max_norm, *args, **kwargs)
        for watch in watches:
            self._ours(watch.note_clipped, norm, max_norm)
        return norm

    def _list_watches(self) -> list[Watch]:
        with self._lock:
            return list(self._watches)

    def _list_watches_here(self) -> list[Watch]:
        """Return those of this thread: the gradients of another one may be changing, inside its backward."""
        here = threading.get_ident()
        return [watch for watch in self._list_watches() if watch.thread == here]

    def _find_losses(self) -> Losses:
        """Return this thread's losses. A thread of the autograd engine calls no backward, and steps for another."""
        losses: Losses = vars(self._thread).get("losses", self._losses)
        return losses

    def _around_step(self, make: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.move_in()
        # A step may call that of its base class, or of an optimizer that it wraps: one decision for both.
        if not self._is_here or getattr(self._thread, "is_stepping", False):
            return make(optimizer, *args, **kwargs)
        if is_called_by_guard():
            self.has_own_guard = True
            return make(optimizer, *args, **kwargs)
        watch = self._find_watch(optimizer)
        if watch is None:
            return make(optimizer, *args, **kwargs)
        self._thread.is_stepping = self._thread.has_stepped = True
        # Not for a thread of the autograd engine, which steps inside a backward that another thread called.
        if "losses" in vars(self._thread):
            watch.thread = threading.get_ident()
        try:
            return self._step(watch, functools.partial(make, optimizer), optimizer, args, kwargs)
        finally:
            self._thread.is_stepping = False
            self._find_losses().spend()

    def _find_watch(self, optimizer: Optimizer) -> Watch | None:
        """Return its watch. A copy has none yet: its constructor never ran; nor has one made before a fork."""
        watch = self._known.get(optimizer)
        if optimizer not in self._known or (watch is not None and watch.process != os.getpid()):
            self._ours(self._watch, optimizer)
            watch = self._known.get(optimizer)
        return watch

    def _step(self, watch: Watch, make: functools.partial[Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._ours(watch.begin_step)
        if callable(kwargs.get("closure", args[0] if args else None)):
            from steadygrad.adapters.scripts.closures import step_with_closure

            return step_with_closure(
                make,
                optimizer,
                args,
                kwargs,
                is_bad=lambda: bool(self._ours(watch.measure, self._look_around(optimizer))),
                conclude=lambda skipped: self._ours(watch.conclude, skipped=skipped),
            )
        # None where measuring failed: the step is then taken, as without us.
        bad = bool(self._ours(watch.measure, self._look_around(optimizer), functools.partial(make, *args, **kwargs)))
        result = None if bad else watch.make_step(make, args, kwargs)
        self._ours(watch.conclude, skipped=bad)
        return result

    def _around_scaler(
        self, make: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        # A wrapper of an optimizer has none, and must not get one.
        is_known = isinstance(optimizer, Optimizer) and (optimizer in self._known or optimizer in self._heirs)
        watch = self._find_watch(optimizer) if is_known else None
        if watch is None or watch.process != os.getpid() or not self._is_here or not scaler.is_enabled():
            return make(scaler, optimizer, *args, **kwargs)
        self._thread.scaler, self._thread.has_stepped = scaler, False
        try:
            result = make(scaler, optimizer, *args, **kwargs)
            if not self._thread.has_stepped:  # the scaler found an overflow and skipped the step
                self._ours(watch.measure, self._look_around(optimizer))
                self._ours(watch.conclude, skipped=True)
                self._find_losses().spend()
            return result
        finally:
            self._thread.scaler = None

    def _look_around(self, optimizer: Optimizer) -> Circumstances:
        scaler = getattr(self._thread, "scaler", None)
        return Circumstances(
            losses=tuple(self._find_losses().list()),
            loss_counts=len(self._watches) == 1,  # with several optimizers it is unknown whose loss it is
            has_many_ranks=count_ranks() > 1,
            # GradScaler sets grad_scale on a fused optimizer while that steps. Neither of the two waits for the device.
            carried_scale=getattr(optimizer, "grad_scale", None),
            loss_scale=None if scaler is None else scaler._get_scale_async(),
        )

    # --- our own ----------------------------------------------------------------------------------------------------

    def hear(self, watch: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when a model is called."""
        if self._is_here:
            self._ours(watch.hear_call, module, args, kwargs)
        if self._is_here and module.training and torch.is_grad_enabled():
            self._ours(watch.begin, module, args, kwargs)

    def _ours(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call our own code. Return None if it fails: the training continues as if we were not there."""
        # Not nested: every hook asks `_is_here` first, so our own calls of torch do not come back in here.
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
        logger.error("steadygrad: %s failed, the script continues without it: %r", name, error)
        logger.debug("in full:", exc_info=error)
        if owner is not None and hasattr(owner, "optimizer"):
            with self._lock:
                for optimizer in [optimizer for optimizer, watch in self._known.items() if watch is owner]:
                    self._known[optimizer] = None
            self.terminal.say_once(f"{owner.voice.name} is NOT guarded from here on")


def explain_in_all(error: BaseException) -> None:
    """Have every optimizer's watch explain an error that ends the script, if numbers may be behind it."""
    for session in _current if may_be_of_numbers(error) else ():
        for watch in session._list_watches():
            session._ours(watch.explain, error)


class GuardedEntry:
    """Entry of a process that the script starts with `torch.multiprocessing.spawn`: runs its function in a Session.

    Such a process begins as a fresh interpreter. Workers of a DataLoader are started differently.
    """

    # Pickled for the new process: hold nothing here that is not plain, above all no Session.
    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function, self._options = function, options

    def __call__(self, number: int, *args: Any) -> Any:
        if _current:
            _current[0].move_in()  # forked, or guarded by the environment
        else:
            Session(self._options, is_child=True).begin()
        try:
            return self._function(number, *args)
        finally:
            _current[0].close()  # such processes exit without running exit handlers


class _Listener:
    """Forwards calls of a model without keeping its Watch alive."""

    def __init__(self, watch: weakref.ref[Watch], session: Session) -> None:
        self._watch, self._session = watch, session

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        watch = self._watch()
        if watch is not None:
            self._session.hear(watch, module, args, kwargs)


def _are_cleared(watches: Sequence[Watch]) -> bool:
    """Whether no optimizer has gradients: the script dropped those of its last backward, without a step."""
    return not any(watch.has_gradients() for watch in watches)
