"""Rules about where the gradient arrives: vanishing on the way back, dead units, parameters without a gradient.

Thresholds of AUTOTRAINER (first to last below 1e-3 and first below 1e-4; 70 % of zeros) and SageMaker Debugger (1e-7)
are `info`. A warning compares the run with itself: its first layers with its last ones over several steps, or a
parameter with what it used to be. Layers that start at zero pass nothing back for one step; that is healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Episode, Remembering, Streak
from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.detect.once import at
from steadygrad.detect.precision import NUM_STEPS as NUM_FLUSHED
from steadygrad.detect.precision import is_flushed
from steadygrad.facts import (
    NUM_COLUMNS,
    Fact,
    Finding,
    GradientTable,
    MaskChange,
    ModelScan,
    ParameterScan,
    PrecisionScan,
    Reading,
    Severity,
)
from steadygrad.facts.program import CutGraph
from steadygrad.stats import median

FEWEST_ROWS = 8
"""Fewer parameters than this are too few to compare quarters of the model."""
SHORT_HISTORY = 32
"""Steps in which the usual share of zeros is learnt."""
CONNECT = (
    "Look for detach(), no_grad, or checkpoint(use_reentrant=True) on an input without a gradient; freeze what is not "
    "meant to learn."
)
SOFTEN = (
    "Use something with a gradient: softmax for argmax, a sigmoid for a comparison, rsample() for sample(), a "
    "straight-through estimator; freeze what is not meant to learn."
)
NUM_ZERO = 20
"""Steps without any gradient: a margin that is met, or a ratio that is clipped, passes sooner."""


class VanishingGradient(Remembering):
    """The gradient fades on its way to the first layers, or is tiny everywhere."""

    name = "vanishing_gradient"
    memory = ("_tiny", "_faded", "_warning", "_streak")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.flow
        self._tiny = Episode(config.repeat_after, quiet=100)
        self._faded = Episode(config.repeat_after, quiet=100)
        self._warning = Episode(config.repeat_after, quiet=100)
        self._streak = Streak()

    def passes(self, reading: Reading) -> bool:
        """A model of few parameters with gradients that are not small anywhere near its input."""
        names, config = reading.gradients.names, self._config
        if len(names) >= FEWEST_ROWS or not reading.finite_grad_norm >= config.vanishing_norm:
            return False
        return not names or reading.gradients.cells[0] >= config.vanishing_first

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an info for absolute thresholds, a warning when the first quarter of the model gets nothing."""
        if not isinstance(fact, Reading) or fact.is_nonfinite or not fact.gradients.names:
            return
        # Runs at every step: a strided slice of one column, because decoding rows costs an object for each parameter
        norms = fact.gradients.cells[0::NUM_COLUMNS]
        if not all(fact.gradients.numels):  # a parameter without elements has a norm of 0 wherever it stands
            norms = [norm for norm, numel in zip(norms, fact.gradients.numels) if numel]
            if not norms:
                return
        norm, first, last = fact.finite_grad_norm, norms[0], max(norms[-2:])  # the larger of weight and bias
        if self._tiny.is_due(fact.step, 0 < norm < self._config.vanishing_norm):
            yield self._make(Severity.INFO, fact.step, f"gradient norm {norm:.3g}", {"grad_norm": norm})
        ratio = first / last if last > 0 else 1.0
        faded = ratio < self._config.vanishing_ratio and first < self._config.vanishing_first
        if self._faded.is_due(fact.step, faded):
            message = f"the first parameter's gradient norm is {first:.3g}, the last one's {last:.3g}"
            yield self._make(Severity.INFO, fact.step, message, {"first": first, "last": last, "ratio": ratio})
        if len(norms) >= FEWEST_ROWS:
            yield from self._compare_quarters(fact, norms)

    def _compare_quarters(self, reading: Reading, norms: Sequence[float]) -> Iterable[Finding]:
        quarter = len(norms) // 4
        near, far, limit = norms[-quarter:], norms[:quarter], self._config.vanishing_depth_ratio
        first, last, faded = 0.0, 0.0, False
        if min(far) < limit * max(near):  # else the medians, which need sorting, cannot be that far apart
            first, last = median(sorted(far)), median(sorted(near))
            faded = last > 0 and first < limit * last
        length = self._streak.feed(reading.step, faded)
        if self._warning.is_due(reading.step, length >= self._config.vanishing_patience):
            message = (
                f"the first quarter of the model gets {first / last:.1g} of the gradient that the last quarter gets"
            )
            evidence = {"first": first, "last": last, "num_steps": length}
            yield self._make(Severity.WARNING, self._streak.start, message, evidence)

    def _make(self, severity: Severity, step: int, message: str, evidence: dict[str, float]) -> Finding:
        return Finding(
            kind=self.name,
            severity=severity,
            step=step,
            message=message,
            advice="Use residual connections, normalisation, ReLU-like activations, and an initialisation to match.",
            evidence=evidence,
        )


class DeadGradient(Remembering):
    """Most of a parameter's gradient has become exactly zero and stays so: its units no longer fire.

    Compared with the parameter's own largest share of zeros before, because embeddings and experts are always sparse.
    One that was zero from the first step on is a warning only when it is half of the model. A unit that does not fire
    gives its bias no gradient either: where the bias gets one, a mask or sparse inputs made the zeros. Those of an
    embedding are the rows that the batch does not look up, however few it looks up. When the program prunes weights,
    or edits a buffer that it does not usually edit (a gate), what is usual is learnt again from scratch, in the layers
    behind them too.
    """

    name = "dead_units"
    hears = (Reading, MaskChange, ModelScan)
    memory = ("_usual", "_doubts", "_num_steps", "_tables")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.flow
        self._usual: dict[str, float] = {}
        self._doubts: dict[str, list[float]] = {}  # name -> step where it began, steps since, share of zeros
        self._num_steps = 0
        self._tables: set[str] = set()

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading without a zero, once it is known what is usual."""
        if self._doubts or self._num_steps < SHORT_HISTORY or not reading.finite_grad_norm > 0:
            return False
        if any(reading.gradients.cells[NUM_COLUMNS - 1 :: NUM_COLUMNS]):
            return False
        self._num_steps += 1
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a finding when a parameter's units have died, at the step where they did."""
        if isinstance(fact, MaskChange):
            self._usual, self._doubts, self._num_steps = {}, {}, 0
        if isinstance(fact, ModelScan):
            self._tables.update(fact.tables)
        if not isinstance(fact, Reading) or fact.is_nonfinite or not fact.finite_grad_norm > 0:
            return
        self._num_steps += 1
        table, limit = fact.gradients, self._config.dead_share
        zeros = table.cells[NUM_COLUMNS - 1 :: NUM_COLUMNS]  # num_zeros is the last column
        # The way of nearly every step: what follows goes over all parameters
        if self._num_steps > SHORT_HISTORY and not self._doubts and not any(zeros):
            return
        pairs = enumerate(zip(zeros, table.numels)) if any(zeros) else ()
        rows = [(i, z / n) for i, (z, n) in pairs if n and z >= limit * n]
        unusual = ((table.names[i], share) for i, share in rows if self._is_unusual(table.names[i], share))
        suspects = {name: share for name, share in unusual if share == 1.0 or not self._is_sparse(name, table)}
        for name in [name for name in self._doubts if name not in suspects]:
            # Zeros that went away by themselves are usual from now on, as for an expert that is rarely chosen
            self._usual[name] = max(self._usual.get(name, 0.0), self._doubts.pop(name)[2])
        if self._num_steps <= SHORT_HISTORY:
            for name, zero, numel in zip(table.names, zeros, table.numels):
                if numel and name not in suspects:
                    self._usual[name] = max(self._usual.get(name, 0.0), zero / numel)
        dead = [name for name, share in suspects.items() if self._count(name, share, fact.step)]
        if dead:
            yield self._describe(dead, table)

    def _is_sparse(self, name: str, table: GradientTable) -> bool:
        return name in self._tables or _has_live_bias(name, table, self._config.dead_share)

    def _is_unusual(self, name: str, share: float) -> bool:
        usual = self._usual.get(name)
        return share == 1.0 if usual is None else share >= usual + self._config.dead_rise

    def _count(self, name: str, share: float, step: int) -> bool:
        """Whether this step is the one at which the doubt has lasted long enough."""
        doubt = self._doubts.setdefault(name, [step, 0, share])
        doubt[1] += 1
        return doubt[1] == self._config.dead_patience  # equal, not above: reported once for each excursion

    def _describe(self, dead: list[str], table: GradientTable) -> Finding:
        numels = dict(zip(table.names, table.numels))
        weight = sum(numels[name] for name in dead) / sum(table.numels)
        risen = any(name in self._usual for name in dead)
        shares = [self._doubts[name][2] for name in dead]
        return Finding(
            kind=self.name,
            severity=Severity.WARNING if risen or weight >= 0.5 else Severity.INFO,
            step=int(min(self._doubts[name][0] for name in dead)),
            message=f"{max(shares):.0%} of the gradient of {show(dead)} is exactly 0"
            + (", and was not before" if risen else " from the start"),
            advice="Units died: lower the learning rate, use LeakyReLU or GELU, and check the biases.",
            evidence={"parameters": dead[:SHOWN], "zero_share": shares[:SHOWN]},
        )


def _has_live_bias(name: str, table: GradientTable, limit: float) -> bool:
    bias = ".".join([*name.split(".")[:-1], "bias"])
    if bias == name or bias not in table.names:
        return False
    at = table.names.index(bias)
    return table.cells[at * NUM_COLUMNS + NUM_COLUMNS - 1] < limit * table.numels[at]


class ZeroGradient(Remembering):
    """Every gradient is exactly 0, step after step, though the loss is not: it does not depend on what is trained.

    Seen with adapters whose matrices are both 0, an output that is cut off (a ReLU that is dead everywhere), a loss
    that is multiplied by 0. A loss of exactly 0 is `zero_loss`, gradients that float16 cannot hold are
    `flushed_gradient`. Nothing is reported where the loss stays at one number, below all that had a gradient: a margin
    is met, and the rest of the loss is a constant; nor where an optimizer that is not torch's moves weights all the
    same: it keeps the gradients elsewhere. Cost: two comparisons a step.
    """

    name = "zero_gradient"
    hears = (Reading, PrecisionScan, ParameterScan)
    memory = ("_streak", "_flushed", "_told", "_least", "_level", "_is_floor", "_last_scan")

    def __init__(self) -> None:
        self._streak, self._flushed = Streak(), Streak()
        self._told = False
        self._least: float | None = None  # loss of a step with a gradient
        self._level, self._is_floor = 0.0, False
        self._last_scan = -1

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading with a gradient."""
        if self._told or reading.loss is None:
            return True
        if reading.finite_grad_norm == 0.0:
            return False
        self._admit(reading.loss)
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report once, after `NUM_ZERO` such steps in a row."""
        if isinstance(fact, PrecisionScan) and self._flushed.feed(fact.step, is_flushed(fact)) >= NUM_FLUSHED:
            self._told = True  # as `flushed_gradient`, with its cause
        if isinstance(fact, ParameterScan):
            self._note_moved(fact)
        if not isinstance(fact, Reading) or self._told or fact.is_nonfinite or fact.loss is None:
            return
        # Without any gradient at all it is `missing_gradient`; a loss of 0 is `zero_loss`
        if not fact.gradients.names or fact.finite_grad_norm != 0.0 or fact.loss == 0.0:
            self._admit(fact.loss)
            return
        if not self._streak.length:
            self._level, self._is_floor = fact.loss, self._least is not None and fact.loss < self._least
        self._is_floor &= fact.loss == self._level
        if self._streak.feed(fact.step, True) < NUM_ZERO or self._is_floor:
            return
        self._told = True
        yield Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=self._streak.start,
            message=f"all gradients have been exactly 0 for {NUM_ZERO} steps, and the loss is {fact.loss:.3g}: nothing "
            "is learnt",
            advice="The loss does not depend on what is trained: look for adapters that start at 0 on both sides, a "
            "dead ReLU at the output, a clamp, or a weight of 0 on the loss.",
            evidence={"num_steps": NUM_ZERO, "loss": fact.loss},
        )

    def _admit(self, loss: float) -> None:
        """Take in the loss of a step that ends a row of steps without gradients."""
        self._streak.length = 0
        self._least = loss if self._least is None else min(self._least, loss)

    def _note_moved(self, scan: ParameterScan) -> None:
        """Stay silent where an optimizer of the program's own moved weights between two scans without any gradient."""
        if self._streak.length and self._streak.start <= self._last_scan + 1:
            self._told |= any(not set(names).isdisjoint(scan.changed) for names in scan.steered)
        self._last_scan = scan.step


class MissingGradient(Remembering):
    """Parameters that the optimizer holds get no gradient: an unused branch, or a cut graph.

    An unused pooler is common, so it is an info; most of the model without a gradient is a cut (reentrant checkpointing
    on inputs that need no gradient, a stray detach), and a warning. So is any part, with the values it was made with,
    whose output goes into the loss through an op without a gradient (argmax, a comparison, `sample()`): looked for in
    the calls of the first forward. What the program itself moves, such as a teacher that follows the model, needs none.
    """

    name = "missing_gradient"
    hears = (Reading, CutGraph, ParameterScan)
    memory = ("_streak", "_always", "_share", "_info", "_warning", "_cut", "_moved", "_last_scan")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.flow
        self._streak = Streak()
        self._always: list[str] = []
        self._share = 0.0  # least share of one step: no more than this can have been missing throughout
        self._info = Episode(config.repeat_after, quiet=100)
        self._warning = Episode(config.repeat_after, quiet=100)
        self._cut: list[str] = []  # op, file:line, and the parameters before it
        self._moved: set[str] = set()  # parameters that changed without a gradient
        self._last_scan = -1

    def passes(self, reading: Reading) -> bool:
        """Nothing is missing, and nothing was."""
        return not (reading.missing or self._streak.length or self._always)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report when the same parameters were missing for `missing_patience` steps in a row."""
        if isinstance(fact, CutGraph):
            self._cut = [fact.op, fact.where, *fact.parameters]
        if isinstance(fact, ParameterScan):
            self._note_moved(fact)
        if not isinstance(fact, Reading) or fact.is_nonfinite:
            return
        if not fact.missing and not self._streak.length:
            self._always = []
            return
        missing = [name for name in fact.missing if name not in self._moved]
        # Only what was missing at every step of the row: heads and branches that take turns drop out
        here = set(missing)
        self._always = [n for n in self._always if n in here] if self._streak.length else missing
        length = self._streak.feed(fact.step, bool(self._always))
        self._share = min(self._share, fact.missing_share) if length > 1 else fact.missing_share
        long = length >= self._config.missing_patience
        most = self._share >= self._config.missing_share and not self._moved
        is_cut = bool(self._cut) and set(self._cut[2:]) <= set(self._always)
        why = f"; {self._cut[0]}{at(self._cut[1])}, which has no gradient, cuts them off" if is_cut else ""
        if (self._warning if most or is_cut else self._info).is_due(fact.step, long):
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING if most or is_cut else Severity.INFO,
                step=self._streak.start,
                message=f"{len(self._always)} parameters of the optimizer got no gradient for {length} steps "
                f"({self._share:.0%} of the trainable elements): {show(self._always)}{why}",
                advice=SOFTEN if is_cut else CONNECT,
                evidence={
                    "parameters": self._always[:SHOWN],
                    "num_parameters": len(self._always),
                    "share": self._share,
                },
            )

    def _note_moved(self, scan: ParameterScan) -> None:
        """Remember what changed since the last scan although it had no gradient in any step between the two."""
        if self._streak.length and self._streak.start <= self._last_scan + 1:
            self._moved.update(set(scan.changed).intersection(self._always))
        self._last_scan = scan.step


class StaleGradient(Remembering):
    """Gradients of the previous step were still there when backward began: zero_grad() was forgotten."""

    name = "stale_gradient"
    memory = ("_episode", "_last_norm")

    def __init__(self, config: DetectConfig) -> None:
        self._episode = Episode(config.repeat_after, quiet=100)
        self._last_norm = 0.0

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading whose gradients were cleared before."""
        if reading.stale:
            return False
        self._last_norm = reading.finite_grad_norm
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning at the first step that adds to an old gradient; adding to zeros is harmless."""
        if not isinstance(fact, Reading):
            return
        # Before this step's norm replaces it: the stale gradient is the one of the step before
        was_zero = self._last_norm == 0.0
        if not fact.is_nonfinite:
            self._last_norm = fact.finite_grad_norm  # a bad step's norm leaves out elements: 0 would not mean zeros
        if not self._episode.is_due(fact.step, bool(fact.stale) and not was_zero):
            return
        yield Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=fact.step,
            message=f"{len(fact.stale)} gradients of the previous step were not cleared and are added up: "
            f"{show(fact.stale)}",
            advice="Call optimizer.zero_grad() after each optimizer step.",
            evidence={"num_parameters": len(fact.stale), "parameters": list(fact.stale[:SHOWN])},
        )
