"""Watched: the trained parameters -> everything that measures them. Rebuilt when the optimizers' parameters change.

Everything here depends on the list of parameters; what does not is built once, elsewhere. Fetch a part where you use
it and never store one: `add_param_group`, the usual way to unfreeze, replaces them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.call_listener import CallListeners
from steadygrad.act.microbatches import MicrobatchGate
from steadygrad.act.reflex import Reflex
from steadygrad.act.scaler import LossScale
from steadygrad.clip import Clipper
from steadygrad.clip.outliers import OutlierClipper
from steadygrad.config import MeasureConfig
from steadygrad.facts import Reading
from steadygrad.measure import Measurement, Meter, Transfer
from steadygrad.measure.edits import EditWatch
from steadygrad.measure.origin import OwnGradients
from steadygrad.measure.periodic_scans import PeriodicScans
from steadygrad.measure.program import ProgramWatch
from steadygrad.measure.ranks import Ranks
from steadygrad.measure.uncleared_gradients import UnclearedGradientsWatch, UsedMark
from steadygrad.measure.updates import UpdateMeter
from steadygrad.state.trained_parameters import TrainedParameters, find_trained_parameters


class Watched:
    """The pieces that measure, clip and scan the optimizers' parameters."""

    def __init__(
        self,
        trained: TrainedParameters,
        config: MeasureConfig,
        *,
        clipper: Clipper | None,
        ranks: Ranks,
        scaler: LossScale,
        buffers: BufferKeeper,
    ) -> None:
        self._config, self._clipper, self._ranks, self._scaler, self._buffers = config, clipper, ranks, scaler, buffers
        self.transfer = Transfer(slots=6)
        self.program = ProgramWatch(trained, every=config.scan_every)
        self._listeners: CallListeners | None = None
        self._watch(trained)

    def listen(self, models: Sequence[nn.Module]) -> None:
        """Listen to calls of the model, directly and through its wrappers."""
        self._listeners = CallListeners(models, self.program.hear_call)

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
        buffers = self._buffers
        self.periodic_scans = PeriodicScans(
            trained,
            self._config,
            ranks=ranks,
            program=self.program,
            edits=self.edits,
            count_buffer_edits=lambda: buffers.num_edits,
        )
        self._signature = _sign(trained.optimizers)
        held = (p for optimizer in trained.optimizers for group in optimizer.param_groups for p in group["params"])
        self._lazy = [p for p in held if is_lazy(p)]
        """Parameters that `trained` does not name yet, since their first forward makes them."""

    def compile(self) -> None:
        """On CUDA, compile or load all kernels now, so that no step waits for one."""
        device = next((parameter.device for _, parameter in self.trained.named if parameter.is_cuda), None)
        if device is not None:
            self.meter.compile()
            self.reflex.compile(device)
            self.periodic_scans.compile()

    @property
    def has_many_ranks(self) -> bool:
        """Whether other ranks train too."""
        return self._ranks.many

    @property
    def has_new_parameters(self) -> bool:
        """Whether the optimizers' parameters differ from those watched so far."""
        return _sign(self.trained.optimizers) != self._signature or not all(map(is_lazy, self._lazy))

    def watch_new_parameters(self) -> None:
        """Watch the new parameters from now on. Every earlier step must have been judged."""
        trained = find_trained_parameters(self.trained.model, self.trained.optimizers)
        # Their hooks first: those of both generations would fire in the next backward.
        self.uncleared_gradients.take()
        self.own_gradients.close()
        self.periodic_scans.close()
        self._watch(trained)

    def measure(self, loss: Tensor | None, *, step: int, scale: Tensor | None) -> Measurement | None:
        """Measure the gradients of `step`, which still carry `scale`; return None if there are none."""
        if isinstance(self._clipper, OutlierClipper):
            self._clipper.prepare(step)
        if self._clipper is not None:
            self.meter.max_norm = self._clipper.constant_norm  # a policy may have lowered it
        return self.meter.measure(loss, scale=scale, told_scale=self._scaler.now)

    def hear(self, reading: Reading) -> None:
        """Let clipping learn from the numbers of a measured step."""
        self.reflex.expects_clipping = reading.clipped
        if isinstance(self._clipper, OutlierClipper) and not reading.is_nonfinite and not reading.skipped:
            self._clipper.hear(reading.step, reading.finite_grad_norm)

    def forget(self) -> None:
        """Clear what was remembered about the weights, after the guard itself put them back."""
        self.periodic_scans.forget()
        self.edits.forget()

    def close(self) -> None:
        """Release the parameters and the model."""
        self.uncleared_gradients.take()  # its hooks are on the parameters
        self.own_gradients.close()
        self.periodic_scans.close()
        if self._listeners is not None:
            self._listeners.close()


def _sign(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[int, ...]]:
    """Return a signature that changes when parameters are added or exchanged; it takes microseconds to compute."""
    # An id cannot be reused here: `trained` keeps the watched parameters alive.
    return [tuple(map(id, group["params"])) for optimizer in optimizers for group in optimizer.param_groups]
