"""What a guard has to tell when it is asked: Parts -> a screen of text, a health check, counts. Reads only."""

from __future__ import annotations

from steadygrad.facts import Action
from steadygrad.guard.parts import Moment, Parts
from steadygrad.measure.check import find_nonfinite
from steadygrad.measure.states import count_bad
from steadygrad.state.shards import take_local
from steadygrad.view.summary import summarise


def tell_summary(parts: Parts) -> str:
    """The run so far on one screen of text."""
    rates = parts.rates
    rate = f"rate       learning rate {parts.learning_rates()[0]:.4g}" + (
        f", {rates.factor:g} of its schedule" if rates.factor != 1.0 else ""
    )
    return summarise(
        parts.judgement.tally,
        parts.judgement.incidents,
        max_norm=getattr(parts.config.clip, "max_norm", None),
        rate=max(parts.learning_rates(), default=None),
        extra=[rate, f"snapshots  {parts.snapshots.describe()}"],
    )


def tell_health(parts: Parts) -> dict[str, bool]:
    """Whether model (buffers too), gradients, losses and parameters are finite now; reads the weights once."""
    last = parts.judgement.last_reading
    parameters = not find_nonfinite(parts.model.named_parameters())
    held = dict(parts.model.named_buffers())
    buffers = {name for name in find_nonfinite(held.items()) if count_bad(name, take_local(held[name]))}
    health = {
        "model_healthy": parameters and not buffers - parts.periodic_scans.born_nonfinite,
        "gradients_healthy": last is None or last.num_nonfinite == 0,
        "losses_healthy": last is None or not last.loss_is_nonfinite,
        "parameters_healthy": parameters,
    }
    return {**health, "overall_healthy": all(health.values())}


def tell_stats(parts: Parts, moment: Moment) -> dict[str, float | int | None]:
    """Counts and current numbers."""
    last, tally = parts.judgement.last_reading, parts.judgement.tally
    return {
        "current_learning_rate": parts.learning_rates()[0],
        "current_gradient_norm": None if last is None else last.grad_norm,
        "current_loss": None if last is None else last.loss,
        "loss_scale": None if last is None else last.loss_scale,
        "mean_gradient_norm": tally.norm_mean,
        "max_gradient_norm": tally.norm_max,
        "num_steps": tally.num_steps,
        "num_skipped": tally.num_skipped,
        "num_clipped": tally.num_clipped,
        "num_dropped_microbatches": tally.num_dropped_microbatches,
        "num_incidents": len(parts.judgement.incidents),
        "num_rollbacks": tally.actions[Action.ROLLBACK.value],
        "num_skipped_batches": moment.num_skipped_batches,
        "learning_rate_factor": parts.rates.factor,
        "weight_decay_factor": parts.rates.weight_decay_factor,
        "epoch": moment.epoch,
    }
