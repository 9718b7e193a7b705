"""Watched: the trained parameters -> all that looks at them. Made anew when the optimizers get others.

Everything here depends on the list of parameters; what does not is made once, elsewhere. Ask for a part where it is
used, and keep none: `add_param_group`, the usual way to unfreeze, replaces them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.microbatches import MicrobatchGate
from steadygrad.act.reflex import Reflex
from steadygrad.act.scaler import ScalerDriver
from steadygrad.clip import Clipper
from steadygrad.clip.outliers import OutlierClipper
from steadygrad.config import MeasureConfig
from steadygrad.facts import Reading
from steadygrad.measure import Measurement, Meter, Transfer
from steadygrad.measure.edits import EditWatch
from steadygrad.measure.origin import OwnGradients
from steadygrad.measure.periodic_scans import PeriodicScans
from steadygrad.measure.ranks import Ranks
from steadygrad.measure.uncleared_gradients import UnclearedGradientsWatch, UsedMark
from steadygrad.measure.updates import UpdateMeter
from steadygrad.state.trained_parameters import TrainedParameters, find_trained_parameters


class Watched:
    """What measures, clips and scans the parameters that the optimizers hold."""

    def __init__(
        self,
        trained: TrainedParameters,
        config: MeasureConfig,
        *,
        clipper: Clipper | None,
        ranks: Ranks,
        scaler: ScalerDriver,
        buffers: BufferKeeper,
    ) -> None:
        self._config, self._clipper, self._ranks, self._scaler, self._buffers = config, clipper, ranks, scaler, buffers
        self.transfer = Transfer(slots=6)
        self._watch(trained)

    def _watch(self, trained: TrainedParameters) -> None:
        named, ranks = trained.named, self._ranks
        self.trained = trained
        constant_norm = None if self._clipper is None else self._clipper.constant_norm
        self.meter = Meter(named, self._config.implementation, max_norm=constant_norm, ranks=ranks)
        ranks.watch(named)
        self.own_gradients = OwnGradients(ranks, named)
        self.updates = UpdateMeter(named, ranks=ranks)
        self.edits = EditWatch(named)
        self.uncleared_gradients = UnclearedGradientsWatch(named)
        self.used = UsedMark()
        self.reflex = Reflex(trained.optimizers, self._clipper)
        self.gate = MicrobatchGate(
            [p for _, p in named],
            meter=self.meter,
            transfer=self.transfer,
            scaler=self._scaler,
            buffers=self._buffers,
        )
        self.periodic_scans = PeriodicScans(trained, self._config, ranks=ranks)
        self._signature = _sign(trained.optimizers)

    @property
    def has_new_parameters(self) -> bool:
        """Whether the optimizers have others than were watched so far."""
        return _sign(self.trained.optimizers) != self._signature

    def watch_new_parameters(self) -> None:
        """From now on these are watched too. Every step before must have been judged."""
        trained = find_trained_parameters(self.trained.model, self.trained.optimizers)
        self.own_gradients.close()
        self._watch(trained)

    def measure(self, loss: Tensor | None, *, step: int, scale: Tensor | None) -> Measurement | None:
        """The gradients of `step`, which still carry `scale`; None where there are none."""
        if isinstance(self._clipper, OutlierClipper):
            self._clipper.prepare(step)
        if self._clipper is not None:
            self.meter.max_norm = self._clipper.constant_norm  # a policy may have lowered it
        return self.meter.measure(loss, scale=scale, told_scale=self._scaler.now)

    def hear(self, reading: Reading) -> None:
        """A step was measured, and its numbers are here: clipping learns from it."""
        self.reflex.expects_clipping = reading.clipped
        if isinstance(self._clipper, OutlierClipper) and not reading.is_nonfinite and not reading.skipped:
            self._clipper.hear(reading.step, reading.finite_grad_norm)

    def forget(self) -> None:
        """The weights were put back by us: what was remembered of them is no more."""
        self.periodic_scans.forget()
        self.edits.forget()

    def close(self) -> None:
        """Let go of the parameters."""
        self.own_gradients.close()


def _sign(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[int, ...]]:
    """What changes when parameters are added or exchanged, looked at in microseconds."""
    return [tuple(map(id, group["params"])) for optimizer in optimizers for group in optimizer.param_groups]
