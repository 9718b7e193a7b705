"""ModeWatch: calls of a model -> ModeScans: which dropout and norm layers were active in which sort of forward.

Flags are read and never set: programs redefine `train()`. A forward with gradients belongs to a step, one without
gradients between two steps is an evaluation; inside a step function the latter is part of the step and ignored. In one
evaluation of a model in eval mode, a torch function mode looks for dropout and batch norm that are active nevertheless.
Cost: flags of the layers above once a step; all modules when these flags change, and twice a block of evaluations,
which is also when layers that came or went inside the model are noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.overrides import TorchFunctionMode

from steadygrad.facts.program import ModeScan, RandomEvaluation
from steadygrad.measure.call_in_place import call_in_place
from steadygrad.measure.graph import may_enter
from steadygrad.measure.one_call import watch_one_call
from steadygrad.measure.rows import is_readable
from steadygrad.measure.suspicious_ops import find_caller
from steadygrad.state.modules import list_modules

DROPOUTS = (nn.modules.dropout._DropoutNd,)
NORMS = (nn.modules.batchnorm._BatchNorm,)
DONE = -1
"""In place of an input: two forwards of a block were noted."""
MOST_CALLS = 8
"""Active dropouts that are listed."""
MOST_INPUTS = 256
"""Inputs between two steps that are counted."""
MOST = 0.5
"""Share of a module's parameters that must be trained before it is odd that all of it is in eval mode."""
NUM_DRAWS = 3
"""Evaluations of one input between two steps that are repeated on purpose: Monte Carlo dropout, test-time averaging."""


class ModeWatch:
    """Notes the flags of each forward; `take` returns what is new."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[tuple[str, nn.Module]] = []
        self._num_children = -1
        self._training: ModeScan | None = None
        self._seen: dict[bool, ModeScan] = {}
        self._facts: list[ModeScan | RandomEvaluation] = []
        self._block, self._block_trains = (-1, DONE), False
        self._flags: list[bool] = []
        self._fresh: dict[int, bool] = {}
        self._may_listen = True
        self._repeats: dict[tuple[Any, ...], int] = {}  # input, and how often it was evaluated since the last step
        self._repeated_step = -1
        self._drawn_modes: set[bool] = set()  # `training` of evaluations that are repeated on purpose
        self._num_outside = 0

    def note_training(self, step: int) -> None:
        """Note a forward with gradients; the last one before a step counts."""
        if len(self._model._modules) != self._num_children:
            self._list_layers()
        flags = [self._model.training, *[layer.training for _, layer in self._layers]]
        if flags != self._flags:  # else nothing has changed since the forward before
            self._flags, self._training = flags, self._read(step, is_evaluation=False)

    def note_evaluation(self, step: int, given: Tensor | None = None) -> None:
        """Note a forward without gradients after `step`: the first of each block, and the next with another input.

        And the first in eval mode: what came before it, in train mode, was not the evaluation. `given`: the first
        tensor of its input.
        """
        self._count_repeats(step, given)
        first_input = 0 if given is None else id(given)
        is_first = self._block[0] != step
        turns_to_eval = self._block_trains and not self._model.training
        if step < 0 or (not is_first and self._block[1] in (first_input, DONE) and not turns_to_eval):
            return
        self._block, self._block_trains = (step, first_input if is_first else DONE), self._model.training
        scan = dataclasses.replace(self._read(step, is_evaluation=True), is_first=is_first)
        if any(getattr(layer, "momentum", 0.1) in (None, 1.0) and layer.training for _, layer in self._layers):
            return  # statistics are measured again: by torch's update_bn, or one batch at a time, as fvcore's
        if self._model.training in self._drawn_modes:
            return
        self._facts.append(scan)
        if not scan.is_training and self._may_listen:
            self._may_listen = False
            self._listen(step)

    def note_outside(self) -> None:
        """Note a forward with gradients between two calls of the step function."""
        self._num_outside += 1

    def note_validation(self, step: int) -> None:
        """A validation loss is reported after `step`: forwards outside the step function were its own."""
        num, self._num_outside = self._num_outside, 0
        if num:
            self._facts.append(self._read(step, is_evaluation=True))

    def _count_repeats(self, step: int, given: Tensor | None) -> None:
        """Drop what was noted of evaluations that repeat an input, in a row or in turn: they draw on purpose."""
        if step != self._repeated_step:
            self._repeats, self._repeated_step = {}, step
        if given is None or not is_readable(given) or len(self._repeats) == MOST_INPUTS:
            return
        # Held weakly by what owns the memory: a new batch may have the address of one that is gone.
        owner = given if given._base is None else given._base
        key = weakref.ref(owner), given.storage_offset(), given.shape
        num = self._repeats[key] = self._repeats.get(key, 0) + 1
        if num == NUM_DRAWS:
            self._drawn_modes.add(self._model.training)
            self._facts = [fact for fact in self._facts if isinstance(fact, ModeScan) and not fact.is_evaluation]

    def end_step(self) -> None:
        """The forward noted last was that of a step which is over."""
        scan, self._training, self._num_outside = self._training, None, 0
        if scan is not None and not _are_alike(scan, self._seen.get(False)):
            self._seen[False] = scan
            self._facts.append(scan)

    def take(self) -> list[ModeScan | RandomEvaluation]:
        """Return what is new since it was last taken."""
        facts, self._facts = self._facts, []
        return facts

    def _read(self, step: int, *, is_evaluation: bool) -> ModeScan:
        # Each time, beside a step that costs far more: a layer may have come or gone anywhere inside.
        self._list_layers()
        on = {True: 0, False: 0}
        norm_on = {True: 0, False: 0}
        fresh, stray, num_idle = [], [], 0
        is_hollow = not is_evaluation and _is_hollow(self._model)
        is_training = self._model.training and not is_hollow
        for name, layer in self._layers:
            if _is_spectral(layer):
                num_idle += not layer.training
                continue
            if isinstance(layer, NORMS):
                norm_on[layer.training] += 1
                if not layer.training and self._is_fresh(layer):
                    fresh.append(name)
            elif layer.p > 0:  # type: ignore[operator]
                on[layer.training] += 1
            else:
                continue
            if layer.training and not is_training:
                stray.append(name)
        return ModeScan(
            step=step,
            is_evaluation=is_evaluation,
            is_training=is_training,
            is_hollow=is_hollow,
            dropouts_on=on[True],
            dropouts_off=on[False],
            norms_on=norm_on[True],
            norms_off=norm_on[False],
            spectral_norms_off=num_idle,
            fresh_norms=tuple(fresh),
            stray=tuple(stray),
            where=find_caller() if is_evaluation else "",
        )

    def _list_layers(self) -> None:
        """List the layers whose mode matters."""
        self._num_children = len(self._model._modules)
        self._layers = [
            (name, module)
            for name, module in list_modules(self._model)
            if isinstance(module, DROPOUTS) or _is_spectral(module) or _keeps_statistics(module)
        ]

    def _is_fresh(self, norm: nn.Module) -> bool:
        """Whether a BatchNorm has its initial statistics; read once for each that is seen in eval mode."""
        if id(norm) not in self._fresh:
            mean, var = norm.running_mean, norm.running_var
            if isinstance(mean, Tensor) and isinstance(var, Tensor):
                self._fresh[id(norm)] = not bool(mean.any()) and not bool((var - 1).any())
            else:
                self._fresh[id(norm)] = False
        return self._fresh[id(norm)]

    def _listen(self, step: int) -> None:
        """Watch this one forward of the model, from its first hook to its last, for what is active as in training."""
        if not may_enter(self._model):
            return
        mode = _ActiveCalls()

        def report() -> None:
            has_stray = any(layer.training for _, layer in self._layers)  # reported by name, from the flags
            norms = () if has_stray else tuple(mode.norms)
            if mode.calls or norms:
                self._facts.append(RandomEvaluation(step=step, calls=tuple(mode.calls), norms=norms))

        watch_one_call(self._model, mode, report)


class _ActiveCalls(TorchFunctionMode):
    """Lists calls of dropout that drop something, and of batch norm that update running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.norms: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name or name == "scaled_dot_product_attention":
            with contextlib.suppress(Exception):  # an unusual call: the program's own must go through all the same
                self._look(name, args, kwargs)
        elif name == "batch_norm":
            with contextlib.suppress(Exception):
                self._look_at_norm(args, kwargs, place=1 if func is F.batch_norm else 3)
        return call_in_place(func, args, kwargs)

    def _look_at_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, place: int) -> None:
        """Without running statistics those of the batch are meant; `place`: where the running mean is given."""
        mean = kwargs.get("running_mean", args[place] if len(args) > place else None)
        # F.batch_norm and torch.batch_norm differ in where statistics stand, but both have `training` at 5.
        is_active = bool(kwargs.get("training", args[5] if len(args) > 5 else False))
        call = f"batch_norm at {find_caller()}"
        if is_active and mean is not None and call not in self.norms and len(self.norms) < MOST_CALLS:
            self.norms.append(call)

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "scaled_dot_product_attention":
            p, is_active = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0), True
        else:
            p = kwargs.get("p", args[1] if len(args) > 1 and not isinstance(args[1], Tensor) else 0.5)
            is_active = bool(kwargs.get("training", args[2] if len(args) > 2 else True))
        call = f"{name} at {find_caller()}"
        if is_active and p > 0 and call not in self.calls and len(self.calls) < MOST_CALLS:
            self.calls.append(call)


def _is_hollow(model: nn.Module) -> bool:
    """Return whether the model, or a part with a `train()` of its own, is in training mode and nothing inside it is.

    That happens when `train()` is redefined and forgets its children, or when `eval()` is called on what a wrapper
    holds. A frozen part is kept in eval mode on purpose: most of the parameters inside must be trained.
    """
    for _, module in list_modules(model):
        is_own = type(module).train is not nn.Module.train and not type(module).__module__.startswith("torch.")
        if not module.training or not (module is model or is_own):
            continue
        inside = [one for one in module.modules() if one is not module]
        if inside and not any(one.training for one in inside):
            parameters = [p for child in module.children() for p in child.parameters()]
            trained = sum(p.numel() for p in parameters if p.requires_grad)
            if trained > MOST * sum(p.numel() for p in parameters):
                return True
    return False


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, NORMS) and bool(module.track_running_stats) and module.running_mean is not None


def _is_spectral(module: nn.Module) -> bool:
    """Return whether this divides a weight by its largest singular value, found by an iteration in train mode only."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(type(hook).__name__ == "SpectralNorm" for hook in hooks)


def _are_alike(one: ModeScan, other: ModeScan | None) -> bool:
    """Whether two scans differ in nothing but their step."""
    if other is None:
        return False
    return all(
        getattr(one, name) == getattr(other, name)
        for name in (
            *("is_training", "is_hollow", "dropouts_on", "dropouts_off", "norms_on", "norms_off", "spectral_norms_off"),
            *("fresh_norms", "stray"),
        )
    )
