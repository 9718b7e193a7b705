"""ProgramWatch: the calls of a model, its losses and its steps -> facts about errors of the program that never crash.

Connects the watches of this package to the few places that every training passes: a call of the model, the step
function, a loss before its backward, the optimizer's step. A Guard and `steadygrad run` call the same methods. Each
watch states its own cost; most look at the first steps only. Reads only; what fails is switched off, never raised.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.facts import Fact, Reading
from steadygrad.facts.program import LossCall, LossScan, MixedAxes
from steadygrad.measure.cuts import CutWatch
from steadygrad.measure.dependence import STARTS, DependenceWatch
from steadygrad.measure.divisors import PendingDivisions, scan_divisors
from steadygrad.measure.exchanged_arguments import PendingExchange, Suspect, find_suspects
from steadygrad.measure.graph import CallWatch, may_enter
from steadygrad.measure.labels import ModelCall, PendingLabels, list_keeping, list_texts, read_call, scan_labels
from steadygrad.measure.leaks import LeakWatch
from steadygrad.measure.loss_graph import (
    Labels,
    find_divisors,
    find_masks,
    find_one_element_norms,
    look_at_loss,
    sees_all,
)
from steadygrad.measure.loss_targets import LossTarget, PendingTargets, find_loss_targets
from steadygrad.measure.mixed_axes import ReshapeWatch, TimeFirstWatch
from steadygrad.measure.modes import ModeWatch
from steadygrad.measure.next_token import NextTokenWatch
from steadygrad.measure.one_call import watch_one_call
from steadygrad.measure.own_loads import OwnLoadWatch
from steadygrad.measure.padding_masks import AttentionWatch, PendingMasks, find_hidden, scan_masks
from steadygrad.measure.pixels import PixelWatch
from steadygrad.measure.restored import LOOKS, PendingRestored, RestoredWatch
from steadygrad.measure.row_gradients import RowGradientWatch
from steadygrad.measure.rows import is_readable
from steadygrad.measure.seeds import SeedWatch
from steadygrad.measure.splits import SplitWatch
from steadygrad.measure.stored_data import StoredDataWatch
from steadygrad.measure.stream import StreamWatch, sum_on_device
from steadygrad.measure.suspicious_ops import SuspiciousOps, find_caller
from steadygrad.measure.transfer import Transfer
from steadygrad.state.modules import list_buffers, list_modules, list_parameters, walk_once
from steadygrad.state.trained_parameters import TrainedParameters
from steadygrad.state.tree import find_tensors

NUM_FULL = 3
"""Backwards whose labels are compared with tokens and mask."""
NUM_DIVISORS = 64
"""Divisions of the first graph that are looked at."""
NUM_TARGETS = 4
"""Losses of a backward whose targets are looked at."""
Pending = PendingExchange | PendingMasks | PendingLabels | PendingDivisions | PendingRestored | PendingTargets
NUM_LABELS = 64
"""Backwards whose labels are looked at, if there is one for each sample; later ones with the periodic scans."""


class ProgramWatch:
    """Sees what the program does around its steps; `read` returns what is new."""

    def __init__(self, trained: TrainedParameters, *, every: int) -> None:
        """`every`: steps between two periodic scans; 0 switches the watch off."""
        # With more copies unread than slots, sending would wait.
        transfer = Transfer(slots=16)
        self._model, self._every = trained.model, every
        self._modes = ModeWatch(trained.model)
        self._stream, self._stored = StreamWatch(transfer), StoredDataWatch(transfer)
        self._dependence, self._row_gradients = DependenceWatch(transfer), RowGradientWatch(transfer)
        self._leaks, self._pixels = LeakWatch(transfer), PixelWatch(transfer)
        self._next_token, self._seeds = NextTokenWatch(transfer), SeedWatch(trained.model)
        self._transfer = transfer
        self._restored = RestoredWatch(trained, transfer)
        self.own_loads, self._splits = OwnLoadWatch(trained), SplitWatch()
        self._attention = AttentionWatch(trained.model)
        self._time_first: TimeFirstWatch | None = None
        self._reshapes: ReshapeWatch | None = None
        self._cuts: CutWatch | None = None
        self._trained = trained
        self._facts: list[tuple[int, Fact | Pending]] = []
        self._call: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        self._next_step = self._num_backwards = self._num_calls = 0
        self._is_inside = self._has_batch = self._has_sample_labels = self._may_differentiate = False
        self._has_function = False  # whether steps are made from a function, which training forwards are then inside of
        self._is_causal_by_flags = self._tests_next_token = False
        self._unmasked: dict[int, bool] = {}
        self._given: frozenset[int] = frozenset()
        self._last_given: list[weakref.ref[Tensor]] = []
        self._last_loss: float | None = None
        self._loss: weakref.ref[Tensor] | None = None
        self.loss_places: Mapping[str, str] = {}
        """Loss functions that the first step called, and where; only known where its calls could be watched."""
        self.loss_targets: Sequence[LossTarget] = ()
        """Targets of losses that the first step called and that leave no node of their own; likewise."""
        self.exchanged: Sequence[Suspect] = ()
        """Calls of losses in which only the target has a gradient; likewise."""

    def compile(self, device: torch.device) -> None:
        """Load the kernels of the looks at batch and labels now: on CUDA each costs milliseconds when first used."""
        tokens = torch.arange(16, device=device).reshape(2, 8)
        labels = Labels(tokens.flatten(), -100, 16, is_reduced=True, is_whole=True, outputs=None)
        self._try(scan_labels, labels, ModelCall(tokens, tokens > 3))
        self._try(scan_masks, [tokens], [tokens[:, None] > 3])
        self._try(scan_divisors, [torch.ones(2, device=device)])
        self._try(sum_on_device, tokens)
        self._try(self._restored.compile)

    @property
    def has_call(self) -> bool:
        """Whether the model was called for training since the last backward."""
        return self._call is not None

    # --- what happens -------------------------------------------------------------------------------------------------

    def hear_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is about to be called."""
        if not self._every:
            return
        is_training = torch.is_grad_enabled()
        self._try(lambda: self._splits.note_call(self._next_step, is_training=is_training))
        if self._restored.is_watching:
            self._try(lambda: self._restored.note_call(self._next_step - 1, is_training=is_training))
        if not is_training:
            if not self._is_inside:
                first = next((tensor for _, tensor in find_tensors(args, kwargs)), None)
                self._try(self._modes.note_evaluation, self._next_step - 1, first)
            return
        if self._has_function and not self._is_inside:
            self._modes.note_outside()
        self._call = (args, kwargs)
        if not self._has_batch and self._wants_batch(self._next_step):
            self._note_batch(list(find_tensors(args, kwargs)), is_given=False)
        if self._pixels.wants_more:
            self._try(self._pixels.note, self._next_step, args, kwargs)
        self._num_calls += 1
        if self._num_calls == 1:
            self._try(self._seeds.begin)
        self._note_seeds()
        if self._num_backwards < NUM_FULL:
            with walk_once():
                self._look_at_layers(model)
        else:
            self._try(self._modes.note_training, self._next_step)

    def _look_at_layers(self, model: nn.Module) -> None:
        """Look at the layers of a model that is about to be called, in the first steps."""
        self._try(self._modes.note_training, self._next_step)
        if not may_enter(self._model):
            return
        self._try(self._attention.begin)
        if self._num_calls == 1:
            self._time_first = TimeFirstWatch(self._model)
            if not self._is_inside and model is self._model:
                self._watch_reshapes()

    def begin_function(self, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The program's step function is about to run."""
        if not self._every:
            return
        self._next_step, self._is_inside, self._given = step, True, frozenset()
        self._has_function = True
        self._note_seeds()
        if self._has_batch or not self._wants_batch(step):
            return
        tensors = list(find_tensors(args, kwargs))
        if tensors:
            # Addresses hold for this step only, while the caller holds the batch.
            data = self._leave_out_constants([tensor for _, tensor in tensors])
            self._given = frozenset(t.data_ptr() for t in data if is_readable(t) and not t.is_floating_point())
            is_loose = any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))
            self._note_batch(tensors, is_given=not is_loose)

    def _leave_out_constants(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of a batch without those that the program passes again beside new ones."""
        known = {id(tensor) for one in self._last_given if (tensor := one()) is not None}
        self._last_given = [weakref.ref(tensor) for tensor in tensors]
        return [tensor for tensor in tensors if id(tensor) not in known] or tensors

    def end_function(self) -> None:
        """The step function has returned or raised."""
        self._is_inside = False

    def before_backward(
        self,
        step: int,
        loss: Tensor,
        reshapes: ReshapeWatch | None = None,
        cuts: CutWatch | None = None,
        *,
        is_own: bool = False,
    ) -> None:
        """A loss is about to be differentiated; `reshapes` and `cuts`: what was seen of the calls that made it.

        `is_own`: by a backward of the program's own, which is heard of in the first steps only.
        """
        if not self._every or loss.grad_fn is None or (self._loss is not None and self._loss() is loss):
            return
        self._note_seeds()
        # Weak: a loss holds its graph.
        self._loss = weakref.ref(loss)
        self._next_step, self._has_batch = step, False
        number, self._num_backwards = self._num_backwards, self._num_backwards + 1
        if reshapes is not None:
            self._reshapes = reshapes
        cuts, self._cuts = cuts or self._cuts, None
        if cuts is not None:
            cut = self._try(cuts.report, step, loss, self._name_trained())
            self._facts += [] if cut is None else [(step, cut)]
        is_scan = step % self._every == 0
        self._tests_next_token = self._next_token.wants(step, number, may_wait=not is_own)
        if number < NUM_FULL or is_scan or self._row_gradients.wants_more or self._tests_next_token:
            self._try(self._look, step, loss, number, True)
            if self._tests_next_token:
                self._next_token.end_look()
        elif self._leaks.wants_more or (
            self._has_sample_labels and (number < NUM_LABELS or any(0 <= step - start <= 64 for start in STARTS))
        ):
            self._try(self._look, step, loss, number, False)
        # Do not keep the batch alive beyond its backward.
        self._call = None
        self._attention.close()

    def before_own_backward(self, loss: Tensor) -> None:
        """The program calls backward itself; losses that were seen already, and those of other models, are left out."""
        if self.has_call:
            self.before_backward(self._next_step, loss, is_own=True)

    def after_optimizer(self, step: int) -> None:
        """The optimizer has made its step, and the gradients are still there."""
        if not self._every:
            return
        self._next_step, self._has_batch, self._call, self._cuts = step + 1, False, None, None
        self._attention.close()
        self._modes.end_step()
        self.own_loads.end_step(step)
        self._splits.listen()
        seed = self._try(self._seeds.end_step, step) if self._seeds.is_on else None
        self._facts += [] if seed is None else [(step, seed)]
        if self._restored.is_watching or step in LOOKS:
            restored = self._try(self._restored.end_step, step)
            self._facts += [] if restored is None else [(step, restored)]
        if self._time_first is not None:  # a backward of the program's own: no loss was seen
            self._time_first.close()
            self._time_first = None

    def note_validation(self, step: int) -> None:
        """A validation loss was reported after `step`."""
        if self._every:
            self._try(self._modes.note_validation, step)

    def read(self, reading: Reading) -> list[Fact]:
        """Return what is known by the time that a step is judged."""
        if not self._every:
            return []
        step = reading.step
        self._last_loss = reading.loss
        facts: list[Fact] = list(self._modes.take())
        if self._facts:
            waiting, self._facts = self._facts, [one for one in self._facts if one[0] > step]
            known = [fact for when, fact in waiting if when <= step]
            read = [one.read(step) if isinstance(one, Pending) else one for one in known]
            facts += [fact for fact in read if fact is not None]
        watches = (self._stream, self._stored, self._dependence, self._row_gradients, self._next_token)
        for watch in (*watches, self._leaks, self._pixels, self._splits):
            if watch.has_news:
                facts += self._try(watch.take, step) or []
        return facts

    # --- looks --------------------------------------------------------------------------------------------------------

    def _wants_batch(self, step: int) -> bool:
        return self._stream.is_on or self._stored.is_due(step)

    def _note_batch(self, tensors: Sequence[tuple[str, Tensor]], *, is_given: bool) -> None:
        self._has_batch = True
        self._stream.note_batch(self._next_step, tensors, is_given=is_given)
        if self._stored.is_due(self._next_step):
            self._stored.note_batch(self._next_step, tensors)

    def _look(self, step: int, loss: Tensor, number: int, is_full: bool) -> None:
        look = look_at_loss(loss)
        args, kwargs = self._call or ((), {})
        if number == 0:
            self._may_differentiate = self._reshapes is not None and not self._reshapes.has_hooks
            calls = tuple(_place(call, self.loss_places) for call in look.calls)
            scan = LossScan(step=step, calls=calls, one_element_norms=find_one_element_norms(loss))
            self._facts.append((step, scan))
            self._facts += [(step, fact) for fact in self._find_mixed(step, look.labels, args, kwargs)]
            self._facts.append((step, scan_divisors(list(itertools.islice(find_divisors(loss), NUM_DIVISORS)))))
        if is_full:
            # In a script they are known by the second backward only.
            seen, self.loss_targets = self.loss_targets, ()
            calls = tuple(LossCall(op=one.op, fed_by=one.fed_by, where=one.where) for one in seen)
            self._facts += [(step, LossScan(step=step, calls=calls))] if calls else []
            targets = [*seen, *itertools.islice(find_loss_targets(loss), NUM_TARGETS)]
            self._facts += [(step, PendingTargets(one, self._transfer)) for one in targets]
            suspects, self.exchanged = [*self.exchanged, *itertools.islice(find_suspects(loss), NUM_TARGETS)], ()
            self._facts += [(step, PendingExchange(one, self._transfer)) for one in suspects]
        graph_masks = self._list_masks(loss) if is_full and list_texts(self._model, args, kwargs) else []
        self._try(self._scan_masks, step, loss, graph_masks)
        self._has_sample_labels = _are_of_samples(look.labels, args, kwargs)
        for labels in look.labels[:4]:
            call = read_call(self._model, args, kwargs) if is_full else ModelCall()
            pending = scan_labels(
                labels,
                call,
                masks=() if call.tokens is not None and self._sees_all(loss, call.tokens.shape[1]) else graph_masks,
                is_given=labels.target.data_ptr() in self._given,
                is_recurrent=is_full and self._is_recurrent(),
                where=self.loss_places.get("cross_entropy") or self.loss_places.get("nll_loss") or find_caller(),
                transfer=self._transfer,
            )
            self._facts.append((step, pending))
        if self._leaks.wants_more:
            self._try(self._leaks.note, step, loss, look.labels, args, kwargs)
        if len(look.labels) == 1:
            self._dependence.note(step, self._last_loss, look.labels[0], args, kwargs)
            if self._may_differentiate and (number == 1 or self._row_gradients.wants_more):
                inputs = [tensor for _, tensor in find_tensors(args, kwargs) if tensor.dim()]
                self._try(self._row_gradients.note, step, loss, look.labels[0], inputs)
            if self._may_differentiate and self._tests_next_token:
                self._try(self._next_token.note, step, loss, look.labels[0])

    def _scan_masks(self, step: int, loss: Tensor, found: Sequence[Tensor | bool]) -> None:
        layers, (args, kwargs) = self._attention, self._call or ((), {})
        if not layers.is_on or layers.has_unmasked:
            return
        texts = list_texts(self._model, args, kwargs)
        given = [find_hidden(mask) for mask in list_keeping(self._model, args, kwargs)]
        masks = [*layers.masks, *given, *(mask for mask in found if isinstance(mask, Tensor))]
        is_known = bool(layers.masks or given or not masks)
        if not is_known and any(self._sees_all(loss, text.shape[1]) for text in texts):
            return
        pending = scan_masks(texts, masks, layers.where, self._transfer)
        self._facts += [] if pending is None else [(step, pending)]

    def _list_masks(self, loss: Tensor) -> list[Tensor | bool]:
        """Return the masks of attention; a model that is causal by flags alone is not searched again."""
        if self._is_causal_by_flags:
            return [True]
        masks = list(find_masks(loss))
        self._is_causal_by_flags = bool(masks) and all(mask is True for mask in masks)
        return masks

    def _sees_all(self, loss: Tensor, length: int) -> bool:
        """Return whether some attention over `length` positions has no mask; searched once as well."""
        known = self._unmasked.get(length) if self._is_causal_by_flags else None
        found = sees_all(loss, length) if known is None else known
        self._unmasked = {length: found}
        return found

    def _find_mixed(
        self, step: int, labels: Sequence[Labels], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[MixedAxes]:
        found: list[MixedAxes] = []
        tensors = [tensor for _, tensor in find_tensors(args, kwargs) if tensor.dim()]
        num_labels = labels[0].target.numel() if labels and labels[0].target.dim() == 1 else 0
        num_rows = num_labels or (len(tensors[0]) if tensors else 0)
        if self._reshapes is not None:
            found += self._reshapes.report(step, num_rows)
            found += self._reshapes.report_positions(step, num_labels)
        if self._time_first is not None:
            self._time_first.close()
            if num_labels and tensors and len(tensors[0]) == num_labels:
                found += self._time_first.report(step, num_labels)
        self._reshapes = self._time_first = None
        return found

    def _watch_reshapes(self) -> None:
        """Watch the calls that the model makes, where no mode is around the whole step."""
        self._reshapes, self._cuts = ReshapeWatch(), CutWatch()
        self._reshapes.constants = {id(buffer) for _, buffer in list_buffers(self._model)}
        watch_one_call(self._model, CallWatch(SuspiciousOps(), self._reshapes, self._cuts), lambda: None)

    def _name_trained(self) -> dict[int, str]:
        own = {id(p) for _, p in list_parameters(self._model)}
        return {id(p): name for name, p in self._trained.named if id(p) in own}

    def _is_recurrent(self) -> bool:
        return any(isinstance(one, nn.RNNBase) and not one.bidirectional for _, one in list_modules(self._model))

    def _note_seeds(self) -> None:
        if self._seeds.is_on:
            self._try(self._seeds.note)

    def _try(self, call: Any, *args: Any) -> Any:
        """Call our own code; what fails says nothing."""
        try:
            # A mode that watches the program's own calls (`graph.py`) must not see these: it would take them for its.
            with torch._C.DisableTorchFunction():
                return call(*args)
        except Exception:
            return None


def _are_of_samples(labels: Sequence[Labels], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether some loss has one label for each sample that the model was called with."""
    rows = [len(tensor) for _, tensor in find_tensors(args, kwargs) if tensor.dim()]
    return any(one.target.dim() == 1 and one.target.numel() in (rows or [one.target.numel()]) for one in labels)


def _place(call: LossCall, places: Mapping[str, str]) -> LossCall:
    name = "cross_entropy" if call.op == "nll_loss" and "nll_loss" not in places else call.op
    return dataclasses.replace(call, where=places.get(name, ""))
