"""Summary: what a guard reports on request: a screen of text, a health check, counts. Reads only."""

from __future__ import annotations

from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.facts import Action
from steadygrad.guard.moment import Moment
from steadygrad.guard.run_start import RunStart
from steadygrad.guard.training import Training
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Judgement
from steadygrad.measure.check import find_nonfinite
from steadygrad.measure.states import count_bad
from steadygrad.state.shards import take_local
from steadygrad.view.summary import summarise


class Summary:
    """Describes the run so far, after judging every step that can be judged."""

    def __init__(
        self,
        training: Training,
        *,
        moment: Moment,
        judgement: Judgement,
        rates: Rates,
        snapshots: Snapshots,
        watched: Watched,
        start: RunStart | None,
    ) -> None:
        self._training, self._moment, self._judgement = training, moment, judgement
        self._rates, self._snapshots, self._watched = rates, snapshots, watched
        self._start = start

    def describe(self) -> str:
        """Return ten lines of text."""
        learning_rates, factor = self._rates.learning_rates(), self._rates.factor
        rate = f"rate       learning rate {learning_rates[0]:.4g}" + (
            f", {factor:g} of its schedule" if factor != 1.0 else ""
        )
        return summarise(
            self._judgement.tally,
            self._judgement.incidents,
            max_norm=getattr(self._training.config.clip, "max_norm", None),
            rate=max(learning_rates, default=None),
            extra=[f"{rate}; {self._snapshots.describe()}"],
            run_dir=None if self._start is None else str(self._start.path),
        )

    def assess_health(self) -> dict[str, bool]:
        """Return whether model (with buffers), gradients, losses and parameters are finite now; reads weights once."""
        last, model = self._judgement.last_reading, self._training.model
        bad = find_nonfinite((*model.named_parameters(), *self._watched.trained.named))
        meant = self._snapshots.list_meant()
        parameters = meant.issuperset(bad)
        held = dict(model.named_buffers())
        buffers = {name for name in find_nonfinite(held.items()) if count_bad(name, take_local(held[name]))}
        health = {
            "model_healthy": parameters and not buffers - self._watched.periodic_scans.born_nonfinite - meant,
            "gradients_healthy": last is None or last.num_nonfinite == 0,
            "losses_healthy": last is None or not last.loss_is_nonfinite,
            "parameters_healthy": parameters,
        }
        return {**health, "overall_healthy": all(health.values())}

    def list_stats(self) -> dict[str, float | int | None]:
        """Return counts and current values."""
        last, tally = self._judgement.last_reading, self._judgement.tally
        return {
            "current_learning_rate": self._rates.learning_rates()[0],
            "current_gradient_norm": None if last is None else last.grad_norm,
            "current_loss": None if last is None else last.loss,
            "loss_scale": None if last is None else last.loss_scale,
            "mean_gradient_norm": tally.norm_mean,
            "max_gradient_norm": tally.norm_max,
            "num_steps": tally.num_steps,
            "num_skipped": tally.num_skipped,
            "num_clipped": tally.num_clipped,
            "num_dropped_microbatches": tally.num_dropped_microbatches,
            "num_incidents": len(self._judgement.incidents),
            "num_rollbacks": tally.actions[Action.ROLLBACK.value],
            "num_skipped_batches": self._moment.num_skipped_batches,
            "learning_rate_factor": self._rates.factor,
            "weight_decay_factor": self._rates.weight_decay_factor,
            "epoch": self._moment.epoch,
        }
