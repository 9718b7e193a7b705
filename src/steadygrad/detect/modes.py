"""Rules about train() and eval(): forwards that ran in the wrong mode.

Only layers whose behaviour depends on the mode count: dropout with a probability above 0, BatchNorm with running
statistics, and spectral norm. Single layers in eval mode inside a model in training (frozen statistics) are normal
practice.
"""

from __future__ import annotations

from collections.abc import Iterable

from steadygrad.detect.memory import Remembering
from steadygrad.detect.nonfinite import show
from steadygrad.detect.once import OnceRule, at
from steadygrad.facts import Fact, Finding, Reading, Severity, Validation
from steadygrad.facts.program import ModeScan, RandomEvaluation
from steadygrad.words import spell_count

PATIENCE = 8
"""Steps in eval mode after which it is not an accident of one step."""
REDEFINED = (
    "Look for a train() that does not call super().train(mode), and for an eval() of what a wrapper holds, such as "
    "model.module.eval(), without a train() after it."
)
APART = 10
"""Steps between two blocks of evaluations from which they look like validations, not like parts of a step."""


class EvalWhileTraining(Remembering):
    """The model trains in eval mode: dropout is off, and BatchNorm uses statistics that do not move.

    A warning if the model was in training mode before, if dropout or the iteration of a spectral norm is switched off
    by it, or if BatchNorm has never seen a batch. A model with trained BatchNorm alone that was in eval mode from the
    start is an info: that freezes it. A model whose own flag alone is set counts as in eval mode. Cost: none in a step
    whose flags are those of the step before.
    """

    name = "eval_while_training"
    hears = (ModeScan, Reading)
    memory = (
        *("_num_steps", "_start", "_num_dropouts", "_num_norms", "_num_spectral"),
        *("_fresh", "_is_hollow", "_has_trained", "_told"),
    )

    def __init__(self) -> None:
        self._num_steps = self._start = self._num_dropouts = self._num_norms = self._num_spectral = 0
        self._fresh: list[str] = []
        self._has_trained = self._is_hollow = self._told = False

    def passes(self, _reading: Reading) -> bool:
        """Nothing is counted while no layer is off."""
        return not (self._num_dropouts or self._num_norms or self._num_spectral)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report once, after `PATIENCE` steps."""
        if isinstance(fact, ModeScan) and not fact.is_evaluation:
            # Single layers in eval mode are frozen on purpose: every layer that depends on the mode must be off
            is_idle = not (fact.is_training or fact.dropouts_on or fact.norms_on)
            off = (fact.dropouts_off, fact.norms_off, fact.spectral_norms_off) if is_idle else (0, 0, 0)
            if off != self._idle:  # a resumed run hears again what it knows
                (self._num_dropouts, self._num_norms, self._num_spectral), self._num_steps = off, 0
                self._start = fact.step
                self._fresh, self._is_hollow = list(fact.fresh_norms[:5]), fact.is_hollow
            self._has_trained |= fact.is_training
        elif isinstance(fact, Reading) and not fact.is_nonfinite and any(self._idle):
            self._num_steps += 1
            if self._num_steps == PATIENCE and not self._told:
                self._told = True
                yield self._report()

    @property
    def _idle(self) -> tuple[int, int, int]:
        return self._num_dropouts, self._num_norms, self._num_spectral

    @property
    def _flags(self) -> str:
        return "model.training is True, and no layer's is" if self._is_hollow else "model.training is False"

    def _report(self) -> Finding:
        layers = zip(self._idle, ("dropout layer", "BatchNorm layer", "spectral norm"))
        off = " and ".join(spell_count(number, what) for number, what in layers if number)
        since = f"since step {self._start}" if self._has_trained else "from the first step on"
        is_certain = self._has_trained or bool(self._num_dropouts or self._num_spectral or self._fresh)
        fresh = "; BatchNorm has its initial statistics, so it normalises nothing" if self._fresh else ""
        return Finding(
            kind=self.name,
            severity=Severity.WARNING if is_certain else Severity.INFO,
            step=self._start,
            message=f"training runs in eval mode {since} ({self._flags}): {off} inactive{fresh}",
            advice=REDEFINED
            if self._is_hollow
            else "Call model.train() before training"
            + (", again after each evaluation: model.eval() stays until then." if self._has_trained else ".")
            + " To freeze single layers, put only those in eval mode.",
            evidence={
                "num_dropouts": self._num_dropouts,
                "num_norms": self._num_norms + self._num_spectral,
                "fresh_norms": self._fresh,
            },
        )


class TrainModeValidation(OnceRule[ModeScan | Validation | Reading]):
    """A validation runs in train mode: dropout blurs its loss, and BatchNorm's statistics take in validation data.

    A forward without gradients after whose step `guard.validate` was called is a validation; without that call, two
    blocks of several such forwards, at least `APART` steps apart. One forward alone may be a sample drawn from a
    generator, for which train mode is usual. A program that evaluates in eval mode too is left alone: what it runs in
    train mode is meant so.
    """

    name = "train_mode_validation"
    hears = (ModeScan, Validation, Reading)
    memory = ("_validated", "_last", "_num_blocks", "_knows_eval", "_told")

    def __init__(self) -> None:
        self._validated, self._last, self._num_blocks = -1, -1, 0
        self._knows_eval = False
        self._suspect: ModeScan | None = None  # not saved: it waits for the Reading that comes with it

    def passes(self, _reading: Reading) -> bool:
        """A Reading matters to a suspicion only."""
        return self._suspect is None

    def judge(self, fact: ModeScan | Validation | Reading) -> Finding | None:
        """Return the finding when a forward in train mode is seen to be a validation."""
        if isinstance(fact, Reading):
            # Not before: a sample in train mode may come first, and the validation in eval mode after it
            scan, self._suspect = self._suspect, None
            return None if scan is None or self._knows_eval else self._describe(scan)
        if isinstance(fact, Validation):
            self._validated = fact.step
            return None
        if not fact.is_evaluation:
            return None
        # Kept for good: a program that has evaluated in eval mode once knows the difference
        self._knows_eval |= not fact.is_training
        is_active = fact.is_training and bool(fact.dropouts_on or fact.norms_on)
        if not is_active or self._knows_eval:
            return None
        # The first forward of a block alone may be a sample from a generator: a block counts from its second one
        if not fact.is_first:
            self._num_blocks = self._num_blocks + 1 if fact.step - self._last >= APART else 1
            self._last = fact.step
        if self._suspect is None and (fact.step == self._validated or self._num_blocks >= 2):
            self._suspect = fact
        return None

    def _describe(self, scan: ModeScan) -> Finding:
        layers = [(scan.dropouts_on, "dropout layer"), (scan.norms_on, "BatchNorm layer")]
        on = " and ".join(spell_count(number, what) for number, what in layers if number)
        harm = " and the validation data goes into BatchNorm's statistics" if scan.norms_on else ""
        return self.report(
            step=scan.step,
            message=f"the model is evaluated in train mode{at(scan.where)}: {on} active, so its loss is not that of "
            f"the trained model{harm}",
            advice="Call model.eval() before an evaluation and model.train() after it.",
            evidence={"num_dropouts": scan.dropouts_on, "num_norms": scan.norms_on, "where": scan.where},
        )


class DropoutInEvaluation(OnceRule[ModeScan | RandomEvaluation]):
    """Dropout is active although the model is in eval mode: evaluations are random, and worse than they should be."""

    name = "dropout_in_evaluation"
    hears = (ModeScan, RandomEvaluation)

    def judge(self, fact: ModeScan | RandomEvaluation) -> Finding | None:
        """Return the finding, with the lines or the layers."""
        if isinstance(fact, RandomEvaluation) and fact.calls:
            what = f"dropout is active in eval mode: {show(fact.calls)}"
            fix = "Pass training=self.training to F.dropout (its default is True), and 0.0 as dropout_p in evaluation."
        elif isinstance(fact, ModeScan) and fact.is_evaluation and not fact.is_training and fact.stray:
            layers = spell_count(len(fact.stray), "layer")
            what = f"the model is in eval mode, but has {layers} in training mode: {show(fact.stray)}"
            fix = "Check what overrides train() or eval(), and layers added after eval() was called."
        else:
            return None
        calls = fact.calls if isinstance(fact, RandomEvaluation) else fact.stray
        return self.report(step=fact.step, message=what, advice=fix, evidence={"where": list(calls[:5])})


class NormInEvaluation(OnceRule[RandomEvaluation]):
    """Batch norm uses and updates the statistics of the batch although the model is in eval mode.

    Outputs then depend on the other samples of a batch, and validation data goes into the running statistics. Batch
    norm without running statistics is left alone: it has no others to use. Cost: one evaluation is watched.
    """

    name = "norm_in_evaluation"
    hears = (RandomEvaluation,)

    def judge(self, fact: RandomEvaluation) -> Finding | None:
        """Return the finding, with the lines."""
        if not fact.norms:
            return None
        return self.report(
            step=fact.step,
            message=f"batch norm updates its running statistics in eval mode: {show(fact.norms)}",
            advice="Pass training=self.training to F.batch_norm.",
            evidence={"where": list(fact.norms[:5])},
        )
