"""Diagnosis: a step -> its Cause, or None when it is healthy.

A plain replay says whether and where it hurts; a traced one finds where the bad value was born; a third looks at that
op closely; parts of the batch are replayed to find the samples. Each leaves everything as it was. What cannot be
diagnosed is reported as such, with the reason; the step's own exception propagates if no bad value explains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from steadygrad.diagnose.blame import Blame, Hurt, Origin
from steadygrad.diagnose.cause_builder import CauseBuilder, Owner, add_sources, describe_given, name_owners
from steadygrad.diagnose.closeup import Closeup, View
from steadygrad.diagnose.explanations import explain
from steadygrad.diagnose.failures import find_failure, find_refusal
from steadygrad.diagnose.frames import StackReader
from steadygrad.diagnose.health import find_ailment, find_amplifier
from steadygrad.diagnose.meeting import CollectiveError
from steadygrad.diagnose.optimizers import trace_optimizers
from steadygrad.diagnose.own_names import use_own_names
from steadygrad.diagnose.ranges import Range
from steadygrad.diagnose.reachable import name_reachable
from steadygrad.diagnose.replay import Observer, Run, Step, call_user, sum_outputs
from steadygrad.diagnose.samples import SampleSearch
from steadygrad.diagnose.situation import Situation
from steadygrad.diagnose.step_arguments import name_inputs, name_modules
from steadygrad.diagnose.symptoms import Symptoms, find_symptoms, name_states
from steadygrad.diagnose.terms import describe_named_terms, describe_summed_terms
from steadygrad.diagnose.trace import Event, Trace
from steadygrad.facts import Cause
from steadygrad.measure.loss import find_loss

EXACT = "yes, bit for bit (software, not hardware)"
SAME_KIND = "yes, the same kind with other bits: an op of the step is not deterministic"
RECEIVED = "it came from another rank, through a collective"
TALKS = "the step itself talks to other ranks, so it cannot be replayed on one"
COLLECTIVE_REPLAYS = 3
"""Every rank makes this many, whatever it finds: the others wait for it in their collectives."""
NOT_AGAIN = "no: the same step, replayed, was healthy"


class Diagnosis:
    """One step, diagnosed."""

    def __init__(
        self,
        step: Step,
        *,
        optimizers: Sequence[Optimizer] = (),
        suspect: str | None = None,
    ) -> None:
        self._step, self._optimizers, self._suspect = step, optimizers, suspect
        self._collective, self._num_replays = step.meeting is not None, 0
        self.fingerprints: list[tuple[int, ...]] = []
        """Of the first replays: equal if the step is deterministic."""
        self._modules = name_modules(step.model)
        self._stack = StackReader(self._modules, call_user, sum_outputs)
        self._trace = Trace(self._stack)
        self._culprit: Event | None = None

    def make(self) -> Cause | None:
        """Return the Cause; None when the step is healthy."""
        reason = self._find_obstacle()
        if reason:
            return unknown(reason)
        try:
            return self._make()
        finally:
            # Also after an error or an early answer.
            while self._collective and self._num_replays < COLLECTIVE_REPLAYS:
                with self._replay():
                    pass

    def _replay(self, observer: Observer | None = None) -> AbstractContextManager[Run]:
        self._num_replays += 1
        return self._step.replay(observer)

    def _make(self) -> Cause | None:
        with self._replay() as run:
            first = find_symptoms(run, self._step.model)
            self.fingerprints.append(first.fingerprint)
            if not first.hurts and run.loss is None and not run.grads:
                find_loss(run.result)  # raises: without loss and gradient nothing was looked at
        if isinstance(first.error, CollectiveError):
            return unknown(str(first.error) if self._collective else TALKS)
        # `_look_further` makes replays of its own, which other ranks would not make.
        if not first.hurts and not self._collective:
            return self._look_further()
        with self._replay(self._trace) as run:
            second = find_symptoms(run, self._step.model)
            self.fingerprints.append(second.fingerprint)
            terms = describe_named_terms(run.result)
            # Inside `with`: tensors and their storages are still those that the trace has seen.
            hurts = self._find_hurts(run, second)
            self._trace.ranges.read()
        blame = Blame(self._trace.events, self._trace.ranges)
        if first.error is not None:
            hurts += find_failure(self._trace, blame)
        origin = self._find_own_origin(blame, hurts) if self._collective else blame.find_origin(hurts)
        if origin is None or (first.error is not None and origin.event.constant):
            return self._describe_without_origin(first, second)
        cause, view = self._describe(origin, blame)
        if self._collective and cause.file is None:
            return unknown(RECEIVED, kind=cause.kind)
        # Empty for a value that this rank sent and did not use itself.
        if not terms and hurts and hurts[0].name == "loss":
            terms = describe_summed_terms(self._trace, blame, hurts[0].read)
        cause = dataclasses.replace(cause, terms=terms, reproducible=compare_replays(first, second))
        if first.error is not None:
            cause = dataclasses.replace(cause, symptom=spell_error(first.error))
        return self._add_samples(cause, view)

    # --- finding ----------------------------------------------------------------------------------------------------

    def _find_obstacle(self) -> str:
        """Return why the step must not be replayed; empty if it may be."""
        group = torch.distributed
        num_ranks = group.get_world_size() if group.is_available() and group.is_initialized() else 1
        if num_ranks == 1 or self._collective or self._step.is_alone:
            return ""
        return (
            f"{num_ranks} ranks train together: a replay on one of them would wait in a collective for the others. "
            "Diagnose on all ranks at once, or the saved batch in one process."
        )

    def _find_hurts(self, run: Run, symptoms: Symptoms) -> list[Hurt]:
        """Return what the step left behind that is not finite, the loss first."""
        found: list[tuple[str, Tensor | None, Range]] = []
        if symptoms.loss is not None:
            found.append(("output" if self._step.is_model_call else "loss", run.loss, symptoms.loss))
        states = dict(name_states(self._step.model))
        found += [(f"state of {name}", states[name], range) for name, range in symptoms.states.items()]
        found += [(f"gradient of {name}", run.grads[name], range) for name, range in symptoms.gradients.items()]
        reads = ((name, self._trace.find_read(tensor), range) for name, tensor, range in found if tensor is not None)
        return [Hurt(name, read, range) for name, read, range in reads if read is not None]

    def _find_own_origin(self, blame: Blame, hurts: list[Hurt]) -> Origin | None:
        """Return where this rank itself made what hurts it; else, what it sent to others and what hurts those."""

        def is_own(origin: Origin) -> bool:
            event = origin.event
            is_known = self._find_owner(CauseBuilder(self._trace, blame, origin, self._modules)) is not None
            # Backends may fill what they received from their own tensor, which then seems to be given.
            return not event.is_collective and (is_known or event.constant or not event.is_given)

        return blame.find_origin(hurts, is_own) or blame.find_origin(self._find_sent(blame), is_own)

    def _find_sent(self, blame: Blame) -> list[Hurt]:
        """Return what is not finite of all that this rank gave to collectives."""
        events = self._trace.events
        given = [read for event in events if event.is_collective for read in event.reads]
        # Not what other ranks gave: they explain it themselves.
        sent = [read for read in given if not all(events[writer].is_uninitialised for writer in read.writers)]
        ranges = [(read, blame.find_range(read)) for read in sent]
        return [Hurt("value sent to other ranks", read, one) for read, one in ranges if one.is_nonfinite]

    def _look_further(self) -> Cause | None:
        """Loss, gradients and buffers are finite: the optimizer's arithmetic, then sizes that are out of hand."""
        spoilt = trace_optimizers(self._step, self._optimizers)
        if spoilt is not None:
            builder = CauseBuilder(spoilt.trace, spoilt.blame, spoilt.origin, {})
            return builder.build_for_optimizer(type(spoilt.optimizer).__name__, spoilt.parameter)
        ailment = find_ailment(self._step, self._modules, self._suspect)
        if ailment is None:
            return self._describe_amplifier() if self._suspect == "exploding" else None
        return Cause(
            kind=ailment.kind,
            phase="backward" if ailment.kind == "vanishing" else "forward",
            explanation=ailment.text,
            fixes=ailment.fixes,
            growth=ailment.growth,
            symptom=f"{ailment.kind} {'units' if ailment.kind == 'dead' else 'gradients'}",
            **(CauseBuilder.where_of(ailment.place, self._modules) | {"module": ailment.module}),
        )

    def _describe_amplifier(self) -> Cause | None:
        """No layer grows: the op whose derivative enlarged the gradient most."""
        with self._replay(self._trace):
            pass
        self._trace.ranges.read()
        found = find_amplifier(self._trace, Blame(self._trace.events, self._trace.ranges))
        if found is None:
            return None
        event, factor = found
        assert event.forward is not None
        forward = self._trace.events[event.forward]
        return Cause(
            kind="exploding",
            phase="backward",
            op=forward.name,
            node=event.node,
            symptom="exploding gradients",
            explanation=f"the derivative of {forward.name} makes the gradient {factor:.3g} times as large",
            growth=factor,
            **CauseBuilder.where_of(forward.place, self._modules),
        )

    # --- reporting --------------------------------------------------------------------------------------------------

    def _describe(self, origin: Origin, blame: Blame) -> tuple[Cause, View | None]:
        builder = CauseBuilder(self._trace, blame, origin, self._modules)
        if origin.event.is_given:
            owner = self._find_owner(builder)
            if owner is not None or not origin.event.constant:
                return describe_given(builder, owner, name_inputs(self._step.args, self._step.kwargs)), None
        closeup = Closeup(builder.targets)
        with self._replay(closeup):
            pass
        builder.views = closeup.views
        self._culprit = builder.culprit
        return builder.build(), closeup.views.get(origin.event.number)

    def _find_owner(self, builder: CauseBuilder) -> Owner | None:
        """Return what a tensor from outside the step is; None if the step function reaches it by no name."""
        # Where no line of the program uses the tensor, the line that called the model is shown, with its words.
        inputs = dict(self._step.spell_inputs(at_call=builder.place.code is None))
        key = builder.find_given_key()
        owner = name_owners(self._trace, inputs, self._step.model).get(key or 0)
        if owner is not None or key is None:
            return owner
        lineage = self._trace.lineage
        found = name_reachable(
            self._step.fn, self._step.args, self._step.kwargs, lambda tensor: key in lineage.find_keys(tensor)[:1]
        )
        return None if found is None else Owner(*found, is_models=False)

    def _add_samples(self, cause: Cause, view: View | None) -> Cause:
        if cause.phase in ("input", "parameter"):
            return cause
        # What Python or numpy gave may have been made of the batch all the same.
        if self._culprit is not None and not self._culprit.is_given and not self._sees_batch(self._culprit):
            return dataclasses.replace(cause, samples_note="none is to blame: the op sees nothing of the batch")
        rows, num_rows = ((), 0) if view is None else (view.bad_rows, view.num_rows)
        try:
            search = SampleSearch(self._step)
            # Parts of the batch are not tried on many ranks: each might need another number of replays.
            samples, note = search.read_rows(rows, num_rows) if self._collective else search.find(rows, num_rows)
        except Exception as error:  # a batch that cannot be taken apart: what broke the step is known all the same
            samples, note = (), f"could not be determined: taking the batch apart raised {error!r:.120}"
        return dataclasses.replace(cause, samples=samples, samples_note=note)

    def _sees_batch(self, event: Event) -> bool:
        """Whether something of the batch went into what `event` was given."""
        inputs = name_inputs(self._step.args, self._step.kwargs)
        keys = {key for _, tensor in inputs for key in self._trace.lineage.find_keys(tensor)}
        waiting, seen = [event], {event.index}
        while waiting and keys:
            for read in waiting.pop().reads:
                if read.key in keys:
                    return True
                new = [writer for writer in read.writers if writer not in seen]
                seen.update(new)
                waiting += [self._trace.events[writer] for writer in new]
        return not keys

    def _describe_without_origin(self, first: Symptoms, second: Symptoms) -> Cause | None:
        """Nothing was born: an op refused to compute, the replay went well, or the ops were not seen."""
        if first.error is not None:
            return self._describe_refusal(first.error)
        if second.error is not None:
            return unknown(f"the replay with every op watched failed: {second.error!r:.200}", kind=first.kind)
        if not second.hurts:
            return None if not first.hurts else unknown("", kind=first.kind, reproducible=NOT_AGAIN)
        if self._collective:
            return unknown(RECEIVED, kind=second.kind)
        reason = self._trace.trouble or "it was made by code that torch's dispatcher does not show"
        where = next(iter(second.gradients), "the loss")
        return unknown(f"{second.kind} in {where}, and no op was seen producing it: {reason}", kind=second.kind)

    def _describe_refusal(self, error: BaseException) -> Cause:
        """Describe a call that raised on finite values. Any other exception is the program's own."""
        refusal = find_refusal(self._trace, self._stack, error)
        if refusal is None:
            raise error
        event, view = refusal.event, View()
        if event is not None:
            closeup = Closeup({event.number: event.name})
            with self._replay(closeup):
                pass
            view = closeup.views.get(event.number, View())
        phase = "backward" if event is not None and event.in_engine else "forward"
        situation = Situation(
            op=refusal.op,
            phase=phase,
            kind="error",
            operands=add_sources(view.operands, refusal.place, refusal.op),
            scalars=view.scalars,
        )
        why = explain(situation)
        return Cause(
            kind="error",
            phase=phase,
            op=refusal.op,
            node=None if event is None else event.node,
            symptom=spell_error(error),
            name=why.name,
            explanation=why.text,
            fixes=use_own_names(why.fixes, situation.sources, refusal.op, situation.scalars),
            inputs=CauseBuilder.spell_operands(situation),
            **CauseBuilder.where_of(refusal.place, self._modules),
        )


def unknown(note: str, *, kind: str = "unknown", reproducible: str | None = None) -> Cause:
    """Return a Cause that says why there is none."""
    seen = {"unknown": "no diagnosis", "nan": "NaN, no origin found", "inf": "Inf, no origin found"}
    return Cause(kind=kind, phase="unknown", symptom=seen.get(kind, kind), note=note, reproducible=reproducible)


def spell_error(error: BaseException) -> str:
    """Format an error: 'IndexError: index out of range'."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text:.160}" if text else type(error).__name__


def compare_replays(first: Symptoms, second: Symptoms) -> str:
    """Return what two replays say about each other."""
    if first.fingerprint == second.fingerprint:
        return EXACT
    return SAME_KIND if first.kind == second.kind else NOT_AGAIN
