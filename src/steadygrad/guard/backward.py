"""BackwardPass: the backward of one microbatch, ours or a framework's. Ranks exchange their losses alongside it.

With `drop_bad_microbatches` a bad microbatch is left out and reported. Nothing else here waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from steadygrad.act.scaler import LossScale
from steadygrad.config import GuardConfig
from steadygrad.detect.nonfinite import NonfiniteGradient, NonfiniteLoss
from steadygrad.facts import Action, Outcome, Verdict
from steadygrad.guard.moment import Moment
from steadygrad.guard.rollback import Rollback
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Event, Judgement
from steadygrad.measure import Measurement
from steadygrad.measure.gradient_access import sign_gradients
from steadygrad.measure.measurement import StepContext
from steadygrad.measure.ranks import Ranks


class BackwardPass:
    """Runs backward, or notes that a framework is about to run it."""

    def __init__(
        self,
        config: GuardConfig,
        *,
        moment: Moment,
        watched: Watched,
        rollback: Rollback,
        scaler: LossScale,
        ranks: Ranks,
        judgement: Judgement,
    ) -> None:
        self._drops_bad = config.drop_bad_microbatches
        self._moment, self._watched, self._rollback = moment, watched, rollback
        self._scaler, self._ranks, self._judgement = scaler, ranks, judgement

    def run_backward(self, loss: Tensor) -> None:
        """Run backward for one microbatch; leave it out if it is bad and the settings ask for that."""
        batches, ranks = self._moment.batches, self._ranks
        batches.num += 1
        # Before backward, which frees what the graph holds.
        self._watched.periodic_scans.look_at_graph(self._moment.next_step, self._moment.looks, loss)
        # Before DDP's own collectives, in the same order on every rank. Each sum replaces the one that was sent before
        # it; a microbatch that may be dropped is decided alone.
        ranks.start([loss] if self._drops_bad else [*batches.losses, loss])
        if self._drops_bad:
            ranks.check_synchronised()
            dropped = self._watched.gate.backward(loss, batches)
            if dropped is not None:
                self._report_dropped(*dropped)
        else:
            self._scaler.scale(loss).backward()
            batches.losses.append(loss.detach())
            batches.signature = sign_gradients(self._watched.trained.named)
            ranks.finish_backward(batches.losses)

    def watch_backward(self, loss: Tensor) -> None:
        """Prepare for a backward that a framework is about to run."""
        batches = self._moment.batches
        self._moment.is_driven = True
        batches.num += 1
        # Every rank refuses this step without measuring it, so none of them exchanges a loss for it.
        if self._rollback.is_open:
            return
        self._watched.periodic_scans.look_at_graph(self._moment.next_step, self._moment.looks, loss)
        batches.losses.append(loss.detach())
        self._ranks.start(batches.losses)

    def _report_dropped(self, m: Measurement, numbers: Sequence[float]) -> None:
        """Report that a bad microbatch was left out."""
        reading = m.read(numbers, StepContext(step=self._moment.next_step), skipped=True)
        verdict = Verdict(action=Action.SKIP, reason="drop_bad_microbatches is on")
        outcome = Outcome(action=Action.SKIP, message="the microbatch was left out")
        where = f"microbatch {self._moment.batches.num - 1}"
        found = (*NonfiniteLoss().observe(reading), *NonfiniteGradient().observe(reading))
        named = [dataclasses.replace(one, message=f"{where}: {one.message}") for one in found]
        self._judgement.conclude([Event(finding, verdict, outcome) for finding in named])
