"""An Origin and what was seen of its op -> the Situation that is explained, and the Cause that is reported.

The line, the module and the operands are those of the forward op, in backward too. Nothing is run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from steadygrad.diagnose.blame import Blame, Origin
from steadygrad.diagnose.closeup import View, find_bad_rows, measure_operand
from steadygrad.diagnose.explanations import explain
from steadygrad.diagnose.expressions import name_operands
from steadygrad.diagnose.frames import Place, read_source, spell_place
from steadygrad.diagnose.own_names import name_fixes, use_own_names
from steadygrad.diagnose.situation import Operand, Situation
from steadygrad.diagnose.trace import Event, Read, Trace
from steadygrad.facts import Cause, name_holder
from steadygrad.state.shards import take_local

MAX_NEIGHBOURS = 6
"""Ops before and after the culprit that an explanation can use."""

OUTSIDE_OF_STEP = "a tensor made outside the step"
"""Name of a tensor that is neither of the batch nor of the model, and that the step function reaches by no name."""


class Owner(NamedTuple):
    """What a tensor from outside the step is."""

    phase: str
    """'input' or 'parameter'."""
    name: str
    tensor: Tensor
    is_models: bool = True
    """Whether a parameter is the model's, and not another network's."""


@dataclass(slots=True)
class CauseBuilder:
    """What is known about one origin, and how it is reported."""

    trace: Trace
    blame: Blame
    origin: Origin
    modules: Mapping[int, str]
    views: Mapping[int, View] = field(default_factory=dict)

    # --- the culprit ------------------------------------------------------------------------------------------------

    @property
    def culprit(self) -> Event:
        """The op that is named: the forward op, when its derivative failed."""
        event = self.origin.event
        if event.in_engine and event.forward is not None:
            return self.trace.events[event.forward]
        return event

    @property
    def phase(self) -> str:
        """'forward' also when only the derivative hurt, but the op's own result was bad already."""
        event = self.origin.event
        if not (event.in_engine or event.place.in_backward):
            return "forward"
        culprit = self.culprit
        return "forward" if culprit is not event and self.blame.is_birth(culprit) else "backward"

    @property
    def in_custom_backward(self) -> bool:
        """Whether Python code ran the op in backward: the op itself failed, on the operands that the line shows."""
        event = self.origin.event
        return event.place.in_backward and not event.in_engine

    @property
    def place(self) -> Place:
        """Where the culprit was called; for a tensor from outside, where it was first used."""
        for event in (self.culprit, *(self.trace.events[index] for index in self.origin.path)):
            if event.place.code is not None:
                return event.place
            if event.forward is not None and self.trace.events[event.forward].place.code is not None:
                return self.trace.events[event.forward].place
        return Place()

    @property
    def targets(self) -> dict[int, str]:
        """The calls to look at closely: number -> name."""
        events = (self.culprit, self.origin.event)
        return {event.number: event.name for event in events if event.number >= 0}

    # --- what it looked like ----------------------------------------------------------------------------------------

    @property
    def situation(self) -> Situation:
        """The culprit in numbers."""
        view = self.views.get(self.culprit.number, View())
        place = self.place
        return Situation(
            op=self.culprit.name,
            phase="forward" if self.in_custom_backward else self.phase,
            kind=self.born,
            operands=add_sources(self._add_upstream(view.operands), place, self.culprit.name),
            scalars=view.scalars,
            output=view.outputs[0] if view.outputs else None,
            grad=self._find_grad() if self.phase == "backward" and not self.in_custom_backward else None,
            upstream=self._find_upstream(),
            downstream=self._find_downstream(),
            module_type=type(place.module).__name__ if place.module is not None else None,
        )

    @property
    def born(self) -> str:
        """What was born first."""
        return "nan" if self.origin.range.has_nan else "inf"

    def _find_grad(self) -> Operand | None:
        """Return the gradient that the failing derivative received from the previous node."""
        event = self.origin.event
        view = self.views.get(event.number)
        if view is None:
            return None
        for read, operand in zip(event.reads, view.operands):
            writer = self.trace.events[read.writers[-1]]
            # From another node: what the same node made itself is not the gradient that came in.
            if not writer.is_given and writer.forward != event.forward and (writer.in_engine or not writer.place.code):
                return operand
        return None

    def _add_upstream(self, operands: Sequence[Operand]) -> list[Operand]:
        """Return the operands with the ops that made each of them, where each is known by its read."""
        reads = self.culprit.reads
        if len(reads) != len(operands):
            return list(operands)
        return [
            dataclasses.replace(operand, upstream=self._find_upstream([read])) for operand, read in zip(operands, reads)
        ]

    def _find_downstream(self) -> tuple[str, ...]:
        """Return the ops that took the result; none for a result that was bad already where its derivative hurt.

        The path then begins with that derivative: the ops on it took a gradient, and not the result.
        """
        if self.phase == "forward" and self.origin.event is not self.culprit:
            return ()
        return tuple(self.trace.events[index].name for index in self.origin.path[1:])[:MAX_NEIGHBOURS]

    def _find_upstream(self, reads: Sequence[Read] | None = None) -> tuple[str, ...]:
        """Return the ops that made what the culprit has read, or some of it, nearest first."""
        names: list[str] = []
        waiting, seen = [self.culprit.reads if reads is None else reads], {self.culprit.index}
        while waiting and len(names) < MAX_NEIGHBOURS:
            # Breadth first: explanations look at the nearest ops first.
            for writer in dict.fromkeys(writer for read in waiting.pop(0) for writer in read.writers[-2:]):
                made = self.trace.events[writer]
                if writer not in seen and not made.is_given:
                    seen.add(writer)
                    waiting.append(made.reads)
                    names.append(made.name)
        return tuple(names[:MAX_NEIGHBOURS])

    # --- reporting --------------------------------------------------------------------------------------------------

    def build(self) -> Cause:
        """Return the Cause, without samples, terms and repetition."""
        place, situation = self.place, self.situation
        why = explain(situation)
        hurt = self.origin.hurt
        seen = "NaN" if hurt.range.has_nan else "Inf"
        kind = self.born if self.phase == "forward" else seen.lower()
        return Cause(
            kind=kind,
            phase=self.phase,
            op="aten.lift_fresh" if self.culprit.is_given else self.culprit.name,
            node=self.origin.event.node,
            inputs=self.spell_operands(situation),
            explanation=why.text,
            fixes=use_own_names(why.fixes, situation.sources, self.culprit.name, situation.scalars),
            name=why.name,
            symptom=f"{seen} {hurt.name.partition(' of ')[0]}",
            chain=self._describe_chain(),
            in_custom_backward=self.in_custom_backward or None,
            **self.where_of(place, self.modules),
        )

    def build_for_optimizer(self, optimizer: str, parameter: str) -> Cause:
        """Return the Cause of a value that the optimizer's own arithmetic made."""
        event, hurt = self.origin.event, self.origin.hurt
        reads = [self.blame.find_range(read) for read in event.reads]
        operands = tuple(
            Operand(name=f"operand {place}", dtype="", shape=(), minimum=range.low, maximum=range.high)
            for place, range in enumerate(reads)
        )
        why = explain(Situation(op=event.name, phase="optimizer", kind=self.born, upstream=self._find_upstream()))
        return Cause(
            kind="nan" if hurt.range.has_nan else "inf",
            phase="optimizer",
            op=event.name,
            symptom=f"{'NaN' if hurt.range.has_nan else 'Inf'} weight after {optimizer}.step()",
            name=why.name,
            explanation=why.text,
            fixes=why.fixes,
            inputs=tuple(f"{one.name}: min {one.minimum:.4g}, max {one.maximum:.4g}" for one in operands),
            chain=(f"{event.name} in {optimizer}.step()", f"parameter {parameter}"),
        )

    def find_given_key(self) -> int | None:
        """Return the storage of a value from outside the step."""
        readers = [self.origin.hurt.read, *(r for index in self.origin.path for r in self.trace.events[index].reads)]
        return next((read.key for read in readers if self.origin.event.index in read.writers), None)

    @staticmethod
    def where_of(place: Place, modules: Mapping[int, str]) -> dict[str, Any]:
        """Return module, file, line, source and caller of a place."""
        caller = None
        if place.caller is not None:
            caller = f"{spell_place(place.caller, place.caller_line)}   {read_source(place.caller, place.caller_line)}"
        return {
            "module": None if place.module is None else modules[id(place.module)],
            "file": None if place.code is None else place.code.co_filename,
            "line": place.line,
            "source": read_source(place.code, place.line),
            "caller": caller,
        }

    @staticmethod
    def spell_operands(situation: Situation) -> tuple[str, ...]:
        """Return what went in, under the user's own names where the line spells them."""
        texts = [spell_operand(operand, operand.title) for operand in situation.operands]
        if situation.grad is not None:
            texts.append(spell_operand(situation.grad, "incoming gradient"))
        return tuple(texts)

    def _describe_chain(self) -> tuple[str, ...]:
        origin = self.origin
        links = [self._spell_link(self.culprit)]
        if origin.source is not None:
            links.insert(0, self._spell_link(origin.source))
        if self.phase == "backward" and origin.event.node is not None:
            links.append(f"{origin.event.node} in backward")
        if origin.turned is not None:
            links.append(self._spell_link(origin.turned))
        return (*links, origin.hurt.name)

    def _spell_link(self, event: Event) -> str:
        place = event.place
        if event.is_given:
            where = spell_place(place.code, place.line)
            return "an infinity, given" if where is None else f"a constant at {where}"
        if place.code is None and event.forward is not None:
            forward = self.trace.events[event.forward]
            return f"backward of {forward.name} at {spell_place(forward.place.code, forward.place.line)}"
        return event.name if place.code is None else f"{event.name} at {spell_place(place.code, place.line)}"


def add_sources(operands: Sequence[Operand], place: Place, op: str) -> tuple[Operand, ...]:
    """Return the operands with the program's own expressions, where its line spells the op."""
    schema_names = tuple(operand.name for operand in operands)
    texts = () if place.code is None else name_operands(place.code, place.instruction, op, schema_names)
    named = [dataclasses.replace(operand, source=text) for operand, text in zip(operands, texts)]
    return (*named, *operands[len(named) :])


def describe_given(builder: CauseBuilder, owner: Owner | None, batch: Sequence[tuple[str, Tensor]]) -> Cause:
    """The Cause of a value that was bad before the step began."""
    origin = builder.origin
    phase, name, tensor, is_models = owner or ("input", OUTSIDE_OF_STEP, None, False)
    operand = None if tensor is None else measure_operand(name, tensor)
    is_sample = phase == "input" and any(tensor is take_local(one) for _, one in batch)
    situation = Situation(
        op=phase if is_sample or (phase == "parameter" and is_models) else "outside",
        phase=phase,
        kind=builder.born,
        operands=() if operand is None else (operand,),
        output=operand,
    )
    why = explain(situation)
    hurt = origin.hurt
    where = builder.where_of(builder.place, builder.modules)
    where["module"] = name.rpartition(".")[0] if phase == "parameter" and is_models else None
    rows = find_bad_rows(tensor) if is_sample and tensor is not None else ()
    size = tensor.shape[0] if rows and tensor is not None else 0
    return Cause(
        kind=builder.born,
        phase=phase,
        op=phase,
        name=name,
        inputs=() if operand is None else (spell_operand(operand, name),),
        explanation=why.text,
        fixes=name_fixes(why, name) if phase == "input" else why.fixes,
        symptom=f"{'NaN' if hurt.range.has_nan else 'Inf'} {hurt.name.partition(' of ')[0]}",
        chain=(name_holder(phase, name).removeprefix("the "), hurt.name),
        samples=rows,
        samples_note=f"{len(rows)} of {size} in the batch ({spell_indices(rows)})" if rows else "",
        **where,
    )


def name_owners(trace: Trace, inputs: Mapping[str, Tensor], model: nn.Module | None) -> dict[int, Owner]:
    """Map each storage to its owner, of which this rank may hold a part."""
    owners: dict[int, Owner] = {}
    states = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
    named = [*(("parameter", name, t) for name, t in states), *(("input", name, t) for name, t in inputs.items())]
    for phase, name, tensor in named:
        part = take_local(tensor)
        for key in trace.lineage.find_keys(part)[:1]:
            # The first name wins: tied weights, and a batch that is a view of another argument, have several.
            owners.setdefault(key, Owner(phase, name, part))
    return owners


def spell_operand(operand: Operand, name: str) -> str:
    """Format an operand: 'var: min 0, max 3.1, 17 zeros of 4096, float32'."""
    parts = [] if operand.minimum is None else [f"min {operand.minimum:.4g}", f"max {operand.maximum:.4g}"]
    zeros = "zero" if operand.num_zeros == 1 else "zeros"
    counts = {zeros: operand.num_zeros, "NaN": operand.num_nan, "Inf": operand.num_inf}
    parts += [f"{count} {what} of {operand.numel}" for what, count in counts.items() if count]
    if not operand.numel:
        parts.append("no elements")
    return f"{name}: {', '.join([*parts, operand.dtype])}"


def spell_indices(indices: tuple[int, ...]) -> str:
    """Format indices: 'index 4', 'indices 4, 9, 30'."""
    shown = ", ".join(map(str, indices[:16])) + (", ..." if len(indices) > 16 else "")
    return f"{'index' if len(indices) == 1 else 'indices'} {shown}"
