"""PeriodicScans: what is scanned every so many steps, besides the gradients of every step.

Every `MeasureConfig.scan_every` steps: the batch, the activations, the labels; some steps before, Adam's ratio, and as
many steps before that the weights and the program. On the first step: the graph. Before the first step and after the
eighth, and likewise after a rollback: the weights. After a bad step: the batch and the weights that produced it. Scans
are queued without a wait and read when the step is judged. Reads only; one that fails counts as one that saw nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadygrad.config import MeasureConfig
from steadygrad.facts import Fact, GraphScan, MaskChange, Reading
from steadygrad.measure import masks
from steadygrad.measure.activations import ActivationWatch, PendingActivations
from steadygrad.measure.edits import EditWatch
from steadygrad.measure.gradient_access import GradientAccess
from steadygrad.measure.graph import GraphWatch
from steadygrad.measure.inputs import PendingScan, scan_inputs
from steadygrad.measure.leading import AdamWatch, PendingRms
from steadygrad.measure.logged import Logged
from steadygrad.measure.program import ProgramWatch
from steadygrad.measure.program_scans import PendingProgram, ProgramScans
from steadygrad.measure.quiet_hook import QuietHook
from steadygrad.measure.ranks import Ranks
from steadygrad.measure.states import ParameterWatch, PendingParameterScan, is_statistic
from steadygrad.measure.transfer import Transfer
from steadygrad.state.modules import walk_once
from steadygrad.state.trained_parameters import TrainedParameters

FIRST_STEPS = 8
"""Steps after which the weights are first scanned, to see whether they have run away from their start."""
GAPS = 25
"""Gaps in a period. Three parts of a scan are one gap apart: all together take the host 11 ms for GPT-2 124M, which is
longer than it is ahead of an H200, and the device would idle for 5 ms; each alone delays no step."""


@dataclass(slots=True)
class Looks:
    """What was queued for one step."""

    batch: tuple[Sequence[Any], Mapping[str, Any]] | None = None
    """The arguments of the step's last microbatch, to be scanned after the fact."""
    captures: Sequence[Any] = ()
    """What a replay of the step needs; kept here for `diagnose`, which this package does not import."""
    access: GradientAccess = GradientAccess.NONE
    """What the program could do to the gradients before the step."""
    inputs: PendingScan | None = None
    activations: PendingActivations | None = None
    graph: GraphScan | None = None
    weights: PendingParameterScan | None = None
    rms: PendingRms | None = None
    own_finite: Tensor | None = None
    """With several ranks: whether this rank's gradients were finite before they were summed, as far as checked."""
    logged: Logged | None = None
    """Numbers that the user's program logged beside the loss."""
    program_scans: PendingProgram | None = None
    """What was seen of the program's own calls, its model and its number formats."""

    @property
    def under_way(self) -> bool:
        """Whether a scan was queued on the device for it."""
        return any(look is not None for look in (self.inputs, self.activations, self.weights, self.rms))


class PeriodicScans:
    """Queues scans while a step runs, and turns them into facts when it is judged."""

    def __init__(
        self,
        trained: TrainedParameters,
        config: MeasureConfig,
        *,
        ranks: Ranks | None = None,
        program: ProgramWatch | None = None,
        edits: EditWatch | None = None,
        count_buffer_edits: Callable[[], int] = int,
    ) -> None:
        """`program`: what watches the program; it outlives this object, which is created again for new parameters.

        `count_buffer_edits`: returns how often the program has changed buffers that it does not change in each step.
        """
        self._trained, self._every = trained, config.scan_every
        transfer = Transfer(slots=8)  # a step sends up to four copies, and two steps may be in flight
        self._weights = ParameterWatch(trained, transfer=transfer, ranks=ranks)
        self._adam = AdamWatch(trained.optimizers, trained.named, transfer=transfer)
        self._activations = ActivationWatch(trained.model, transfer=transfer)
        self._transfer = transfer
        self._graph: GraphWatch | None = GraphWatch(trained) if self._every else None
        self._opening: PendingParameterScan | None = None
        self._opened_after_forward = False
        self._is_ranked = ranks is not None and ranks.many
        self._program = program if program is not None else ProgramWatch(trained, every=self._every)
        self._program_scans: ProgramScans | None = (
            ProgramScans(
                trained,
                see_loss=QuietHook(self._look_at_loss, num_arguments=1),
                see_graph=QuietHook(self._program.before_own_backward, num_arguments=1),
                ranks=ranks,
            )
            if self._every
            else None
        )
        self._graph_scan: GraphScan | None = None
        self._first: list[Fact] = []
        masks.install()
        self._count_buffer_edits = count_buffer_edits
        self._num_masks = self._count_masks()
        self._edits = edits
        self._edited: int | None = None
        self._scanned_at = -1
        self._has_begun = False
        self.num_since = 0
        """Number of optimizer steps since the weights were initialised or replaced."""
        self._given_nonfinite: frozenset[str] | None = None
        self._meant_parameters: frozenset[str] = frozenset()
        self._meant_buffers: frozenset[str] = frozenset()
        self._bad_parameters: frozenset[str] = frozenset()  # in the last scan
        self._written: frozenset[str] = frozenset()  # parameters that the program made infinite, and that do no harm
        self._doubtful_written: frozenset[str] = frozenset()  # ... of the last scan: is the next step finite?
        self._doubtful_buffers: frozenset[str] = frozenset()  # NaN in the last scan: does the next step read them?
        self._born_nonfinite: frozenset[str] = frozenset()

    def compile(self) -> None:
        """Compile or load the kernels of the scans now."""
        if self._every:
            self._adam.compile()
            self._weights.compile()
            device = self._trained.named[0][1].device
            scan_inputs([torch.zeros(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)], {}).read(-1)
            self._program.compile(device)
        if self._program_scans is not None:
            self._program_scans.compile(self._trained.named[0][1].device)

    def _is_due(self, step: int, *, gaps_before: int = 0) -> bool:
        """Whether a scan falls on `step`, or on so many gaps after it."""
        place = step + gaps_before * (self._every // GAPS)
        return self._every > 0 and step > 0 and place % self._every == 0

    def looks_at_forward(self, step: int) -> bool:
        """Whether something is to be seen while the forward of `step` runs."""
        return self._graph is not None or self._is_due(step)

    def begin(self, *, has_run_forward: bool = False) -> None:
        """Scan the user's weights before the first step.

        `has_run_forward`: the step's forward, perhaps a bad one, may have changed the buffers: they are not judged.
        """
        if not self._has_begun:
            self._has_begun = True
            if self._every:
                # Read when the first step is judged: on CUDA its numbers arrive behind those of the first snapshot.
                self._opening = self._weights.begin(shares_later=self._is_ranked)
                self._opened_after_forward = has_run_forward
                if self._program_scans is not None:
                    self._program_scans.begin()

    def begin_ranked(self) -> None:
        """Scan the weights at the latest before the first measurement: other ranks may have done so in a forward."""
        if self._is_ranked:
            self.begin()

    @property
    def given_nonfinite(self) -> frozenset[str] | None:
        """Parameters that were not finite to begin with; None if not known yet."""
        if not self._is_ranked:  # several ranks read when they judge the step, all at the same point
            self._read_opening()
        return self._given_nonfinite

    @property
    def meant_nonfinite(self) -> frozenset[str]:
        """Those parameters, once a finite step has shown that they do no harm: transitions that are -inf.

        So are parameters into which the program wrote later, to prune a choice; and buffers other than a norm's
        statistics that were NaN in a scan and did not harm the next step either.
        """
        return self._meant_parameters | self._written | self._meant_buffers

    @property
    def born_nonfinite(self) -> frozenset[str]:
        """Buffers that were never finite: masks of -inf."""
        if not self._is_ranked:
            self._read_opening()
        return self._born_nonfinite

    def _read_opening(self) -> None:
        """Read the scan from before the first step."""
        if self._opening is not None:
            scan, self._opening = self._opening.read(-1), None
            if self._opened_after_forward:
                scan = dataclasses.replace(scan, nonfinite_buffers={})
            self._first.append(scan)
            self._born_nonfinite = frozenset(scan.nonfinite_buffers)
            self._given_nonfinite = frozenset(scan.nonfinite_parameters)

    @contextlib.contextmanager
    def around_forward(self, step: int, looks: Looks, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Run the scans that belong around the user's function."""
        self.begin_forward(step, looks, args, kwargs)
        try:
            if not self.looks_at_forward(step):
                yield
                return
            due = self._is_due(step) and looks.inputs is None
            with contextlib.ExitStack() as stack:
                if self._graph is not None:
                    stack.enter_context(self._graph)
                if due:
                    # Before the function runs, which may change its batch in place.
                    looks.inputs = scan_inputs(args, kwargs, transfer=self._transfer)
                    stack.enter_context(self._activations)
                yield
            if due:
                looks.activations = self._activations.pending
        finally:
            self.end_forward()

    def begin_forward(self, step: int, looks: Looks, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """All that `around_forward` does before a forward, unless `looks_at_forward`."""
        looks.batch = (args, kwargs)
        self._program.begin_function(step, args, kwargs)

    def end_forward(self) -> None:
        """All that it then does after it."""
        self._program.end_function()

    def look_at_graph(self, step: int, looks: Looks, loss: Tensor) -> None:
        """Scan the graph once, before the first backward; the labels of the loss in the first steps and at scans."""
        graph, self._graph = self._graph, None
        if graph is None:
            self._program.before_backward(step, loss)
            return
        with walk_once():
            looks.graph = graph.read(step, loss)
            self._program.loss_places, self._program.loss_targets = graph.loss_places, graph.loss_targets
            self._program.exchanged = graph.exchanged
            seen = (graph.reshapes, graph.cuts) if graph.has_watched else ()
            self._program.before_backward(step, loss, *seen)

    def _look_at_loss(self, loss: Tensor) -> None:
        """Scan the graph of a loss whose backward the program ran itself."""
        if self._graph is not None and not self._graph.is_watching:
            self._graph_scan, self._graph = self._graph.read(0, loss), None

    def before_optimizer(self, looks: Looks, *, scale_is_known: bool) -> None:
        """Note what the program has called since the last step; the gradients are complete, and not yet clipped by us.

        `scale_is_known`: the step divides the gradients by the loss scale.
        """
        self.begin(has_run_forward=True)  # the user's own backward: no forward of this step was announced
        if self._program_scans is not None:
            looks.program_scans = self._program_scans.before_optimizer(scale_is_known=scale_is_known)

    def after_optimizer(self, step: int, looks: Looks) -> None:
        """Queue the scans after the optimizer step, while the gradients are still there."""
        self.num_since += 1
        self._program.after_optimizer(step)
        if self._is_due(step, gaps_before=1):
            looks.rms = self._adam.measure()
        if self._is_due(step, gaps_before=2) or (self._every > 0 and self.num_since == FIRST_STEPS):
            with walk_once():  # by both
                # A collective with several ranks: due by step numbers alone, which are the same on all.
                looks.weights = self._weights.begin(is_edited=self._were_edited(step))
                self._scan_program(step, looks, is_due=True)
        else:
            self._scan_program(step, looks, is_due=False)

    def _scan_program(self, step: int, looks: Looks, *, is_due: bool) -> None:
        if self._program_scans is not None and looks.program_scans is not None:
            self._program_scans.after_optimizer(step, looks.program_scans, looks.batch, is_due=is_due)

    def _count_masks(self) -> int:
        """Return how often the program has masked weights or outputs, here and elsewhere."""
        return masks.count_masks() + self._count_buffer_edits()

    def _were_edited(self, step: int) -> bool:
        """Return whether the program has changed weights since the previous scan; this one is after `step`."""
        last, since = None if self._edits is None else self._edits.last, self._scanned_at
        self._scanned_at = step
        return last is not None and since < last <= step

    def read(self, reading: Reading, looks: Looks) -> list[Fact]:
        """Return the facts around a judged step; after a bad one, scan the batch and the weights now."""
        self._read_opening()
        # Before the scan of the weights is read, which asks what this step should have moved.
        self._weights.note_step(reading)
        facts, self._first = self._first, []
        step = reading.step
        if self._given_nonfinite and not reading.is_nonfinite:
            self._meant_parameters = self._given_nonfinite
        if self._doubtful_written:
            self._written |= frozenset() if reading.is_nonfinite else self._doubtful_written
            self._doubtful_written = frozenset()
        if self._doubtful_buffers and not reading.is_nonfinite:
            self._meant_buffers |= self._doubtful_buffers
            self._doubtful_buffers = frozenset()
        if self._num_masks != (num := self._count_masks()):
            self._num_masks = num
            facts.append(MaskChange(step=step))
        edited = None if self._edits is None else self._edits.last
        if edited is not None and edited <= step and edited != self._edited:
            self._edited = edited
            facts.append(MaskChange(step=step))
        if looks.graph is not None:
            facts.append(looks.graph)
        if self._graph_scan is not None:
            facts.append(dataclasses.replace(self._graph_scan, step=step))
            self._graph_scan = None
        if looks.inputs is not None:
            facts.append(looks.inputs.read(step))
        elif (reading.is_nonfinite or reading.loss == 0.0) and looks.batch is not None:
            # Waits for the device, which a bad step may.
            facts.append(scan_inputs(*looks.batch).read(step))
        if looks.activations is not None:
            facts.append(looks.activations.read(step))
        if looks.weights is not None:
            scan = looks.weights.read(step)
            scan = dataclasses.replace(scan, is_edited=scan.is_edited and not reading.is_nonfinite)
            facts.append(scan)
            bad, before = frozenset(scan.nonfinite_parameters), self._bad_parameters
            self._bad_parameters, self._written = bad, self._written & bad
            if scan.is_edited:
                self._doubtful_written = bad - before
            self._doubtful_buffers = frozenset(name for name in scan.nonfinite_buffers if not is_statistic(name))
        elif reading.is_nonfinite:
            # A collective with several ranks: their Readings are equal, so all of them scan.
            facts.append(self._weights.scan(step))
        if self._program_scans is not None:
            # tuple(): read() is a generator, and the list grows while it runs.
            facts.extend(self._program_scans.read(reading, looks.program_scans, tuple(facts)))
        return [*facts, *self._program.read(reading)]

    def close(self) -> None:
        """Leave the program alone from now on."""
        if self._program_scans is not None:
            self._program_scans.close()

    def forget(self) -> None:
        """Scan the weights again before the next step, because they were replaced."""
        self._weights.forget()
        self._has_begun = False
        self.num_since = 0
