"""The prover of a guard: tests findings on finite numbers, connected to the training that it tests.

Reads only; replays and trials run in isolation, so that no other piece takes them for steps of the run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.snapshots import Snapshots
from steadygrad.diagnose.investigator import Investigator
from steadygrad.guard.optimizers import Optimizers
from steadygrad.guard.rehearsal import MakeGuard
from steadygrad.guard.second_try import make_again
from steadygrad.guard.training import Training
from steadygrad.guard.watched import Watched
from steadygrad.measure.ranks import Ranks
from steadygrad.prove import Prover
from steadygrad.prove.comparison import Comparison
from steadygrad.prove.paired import PairedTest
from steadygrad.prove.reference import References


def is_proving(training: Training) -> bool:
    """Return whether findings on finite numbers are tested; otherwise they are acted on at once, or never."""
    config = training.config
    return not training.off and config.prove.enabled and config.policy.require_proof


def make_prover(
    training: Training,
    optimizers: Optimizers,
    snapshots: Snapshots,
    *,
    watched: Watched,
    buffers: BufferKeeper,
    ranks: Ranks,
    investigator: Investigator,
    make_guard: MakeGuard,
) -> Prover | None:
    """Build the test of findings on finite numbers, if the settings ask for it."""
    if not is_proving(training):
        return None
    config, rates = training.config, optimizers.rates
    test = PairedTest(training.model, training.optimizers, ranks=ranks)
    return Prover(
        config.prove,
        comparison=Comparison(
            config.prove,
            test,
            aside=functools.partial(_look_aside, investigator, buffers),
            rehearse=functools.partial(make_again, training, make_guard, watched, rates, snapshots, ranks),
        ),
        references=References(
            training.model,
            snapshots,
            edits=lambda: watched.edits,  # not watched.edits itself, which new parameters replace
            settings=rates.list_settings,
            maximises=optimizers.maximise,
            ranks=ranks,
        ),
        snapshots=snapshots,
        rate_factor=config.policy.start_lr_factor,
        ranks=ranks,
        exempt=config.policy.actions,
    )


@contextlib.contextmanager
def _look_aside(investigator: Investigator, buffers: BufferKeeper) -> Iterator[None]:
    """Isolate replays and trials: no other piece takes them for a step, and every buffer is put back."""
    with investigator.aside(), buffers.unchanged():
        yield
