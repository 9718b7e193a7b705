"""Rules about NaN and Inf in loss, gradients, weights and buffers. One is enough: reported at every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Fact, Finding, ParameterScan, Reading, Severity
from steadygrad.words import spell_count

SHOWN = 5
"""Names in a message; the rest are counted."""


def show(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def spell(value: float | None) -> str:
    """Return a number in a message: NaN and Inf by the names that every view gives them."""
    return f"{value}".replace("nan", "NaN").replace("inf", "Inf")


OVERFLOWED = (
    "Add it up in float32, or take the mean: a sum in half precision overflows while its gradient does not. If the "
    "gradients are right as they are, call loss.backward() and then guard.step(): a loss that is not passed to the "
    "guard is not judged."
)


class NonfiniteLoss(Remembering):
    """The loss is NaN or Inf: its gradient means nothing.

    Finite gradients do not excuse an infinite loss. Where errors are clipped, or count by their sign, weights that ran
    away and targets of Inf have gradients of the usual size as well, so the finding only says that they are finite.
    """

    name = "nonfinite_loss"
    hears_plain = False

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error when the loss is not finite; an info where the program has dealt with it."""
        if not isinstance(fact, Reading) or not fact.loss_is_nonfinite:
            return
        if fact.is_cleaned:
            yield _describe_cleaned(fact)
            return
        is_value_alone = fact.loss in (math.inf, -math.inf) and bool(fact.gradients.names) and not fact.num_nonfinite
        yield Finding(
            kind=self.name,
            severity=Severity.ERROR,
            step=fact.step,
            message=f"the loss is {spell(fact.loss)}" + (", and all gradients are finite" if is_value_alone else ""),
            advice=OVERFLOWED
            if is_value_alone
            else "Look for log(0), a division by an empty mask, every label ignored, or overflow in half precision.",
            evidence={"loss": str(fact.loss)},
        )


def _describe_cleaned(reading: Reading) -> Finding:
    return Finding(
        kind=NonfiniteLoss.name,
        severity=Severity.INFO,
        step=reading.step,
        message=f"the loss is {spell(reading.loss)}; the program replaced the NaN in its gradients before the step",
        advice="Nothing was skipped. Look for log(0), a division by an empty mask or every label ignored if it is new.",
        evidence={"loss": str(reading.loss)},
    )


class NonfiniteGradient(Remembering):
    """A gradient holds a NaN or an Inf. Names the parameters; under a loss scaler an overflow is normal."""

    name = "nonfinite_gradient"
    hears_plain = False

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error when a gradient is not finite; an info while a loss scale is searched."""
        if not isinstance(fact, Reading) or not fact.num_nonfinite:
            return
        names = list(fact.gradients.nonfinite())
        # A dynamic loss scale finds its limit by overflowing: that is how it works, not a defect of the model.
        searching = fact.loss_scale is not None and not fact.loss_is_nonfinite
        yield Finding(
            kind=self.name,
            severity=Severity.INFO if searching else Severity.ERROR,
            step=fact.step,
            message=f"{'NaN' if fact.num_nan else 'Inf'} in the gradients of {len(names)} of {len(fact.gradients)} "
            f"parameters: {show(names)}",
            advice=f"The loss scale {fact.loss_scale:g} was too high and is lowered."
            if searching
            else "Look for sqrt, norm or division at 0, log of 0, or overflow in half precision.",
            evidence={
                "num_nonfinite": fact.num_nonfinite,
                "num_nan": fact.num_nan,
                "parameters": names[:SHOWN],
                "num_parameters": len(names),
            },
        )


class NonfiniteRate(Remembering):
    """A learning rate is NaN or Inf: one step with it would do the same to every weight of its group."""

    name = "nonfinite_rate"
    hears_plain = False

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error when a learning rate is not finite."""
        if not isinstance(fact, Reading) or not fact.bad_rates:
            return
        place, rate = next(iter(fact.bad_rates.items()))
        more = f" and of {spell_count(len(fact.bad_rates) - 1, 'other group')}" if len(fact.bad_rates) > 1 else ""
        yield Finding(
            kind=self.name,
            severity=Severity.ERROR,
            step=fact.step,
            message=f"the learning rate of parameter group {place}{more} is {spell(rate)}",
            advice="Look at the schedule, or at the line that sets the rate: a division by 0 steps, 0/0 at the end of "
            "a warm-up, the root of a negative number. Steps are skipped until it is finite.",
            evidence={"groups": list(fact.bad_rates), "rates": [str(value) for value in fact.bad_rates.values()]},
        )


class NonfiniteParameter(Remembering):
    """A weight is NaN or Inf. Each is reported once, and again only after it recovered.

    What was there before training may be meant: transitions that are -inf because they cannot occur, a mask kept as a
    frozen parameter, memory that no forward reads. So may what the program writes between steps, as a search that
    prunes a choice. The next step shows it: it is finite all the same.
    """

    name = "nonfinite_parameter"
    hears = (ParameterScan, Reading)
    memory = ("_known", "_given", "_is_tried")

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._given: dict[str, int] = {}
        """Parameters that the program gave as bad, and how many of their elements."""
        self._is_tried = True
        """Whether a step has shown that those do no harm."""

    def passes(self, _reading: Reading) -> bool:
        """A plain Reading is that of a finite step."""
        self._is_tried = True
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a critical finding at the last step that could have written it."""
        if isinstance(fact, Reading):
            yield from self._try(fact)
            return
        if not isinstance(fact, ParameterScan):
            return
        bad = fact.nonfinite_parameters
        if fact.step < 0:
            self._given, self._is_tried = {name: num for name, num in bad.items() if name not in self._known}, False
        # One that recovered, or partly did, has no more excuse than that.
        self._given = {name: min(num, bad[name]) for name, num in self._given.items() if name in bad}
        new = [name for name, num in bad.items() if name not in self._known and num > self._given.get(name, 0)]
        if fact.is_edited and new:
            self._given |= {name: bad[name] for name in new}
            self._is_tried = False
            return
        # Healed ones are forgotten, so that they are reported again.
        self._known = {name for name in bad if name in self._known or name in new}
        if new:
            yield _describe_parameters(fact.step, {name: bad[name] for name in new})

    def _try(self, reading: Reading) -> Iterable[Finding]:
        # Under a loss scaler gradients overflow in the first steps of healthy runs: only the loss counts then.
        is_bad = reading.is_nonfinite if reading.loss_scale is None else reading.loss_is_nonfinite
        if not self._is_tried and is_bad and self._given:
            self._known.update(self._given)
            yield _describe_parameters(reading.step, self._given)
            self._given = {}
        self._is_tried |= not reading.is_nonfinite


def _describe_parameters(step: int, bad: Mapping[str, int]) -> Finding:
    names = list(bad)
    return Finding(
        kind=NonfiniteParameter.name,
        severity=Severity.CRITICAL,
        step=max(0, step),
        message=f"NaN or Inf in {spell_count(len(names), 'parameter')}: {show(names)}",
        advice="If the optimizer made them (Adam in half precision, a learning rate far too high), keep the "
        "weights in float32 under autocast, or lower the rate. Where nothing was rolled back, load a "
        "checkpoint: skipping steps does not repair a weight.",
        evidence={
            "parameters": names[:SHOWN],
            "num_parameters": len(names),
            "num_nonfinite": sum(bad.values()),
        },
    )


class NonfiniteBuffer(Remembering):
    """A buffer has become NaN or Inf, as BatchNorm's statistics do after one bad forward.

    Observers start at plus and minus infinity, so a buffer must have been finite at a scan before. Only evaluation
    reads the statistics of a norm; what any other bad buffer spoils shows in the next step. If that is finite, no step
    reads the buffer: a NaN marks what was not measured, or is the metric of an absent class. That is an info.
    """

    name = "nonfinite_buffer"
    hears_plain = False
    hears = (ParameterScan, Reading)
    memory = ("_excused", "_known", "_seen", "_doubtful")

    def __init__(self) -> None:
        self._excused: set[str] = set()
        self._known: set[str] = set()
        self._doubtful: list[str] = []  # the next step shows whether a forward reads them
        self._seen = False

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error for each buffer that was finite and is not now, or would not be after a step."""
        if isinstance(fact, Reading):
            if self._doubtful:
                yield _describe_buffers(fact.step, self._doubtful, is_read=fact.is_nonfinite)
                self._doubtful = []
            if fact.spoilt_buffers:
                yield _describe_spoilt(fact)
        if not isinstance(fact, ParameterScan):
            return
        bad = fact.nonfinite_buffers
        if not self._seen:
            self._seen, self._excused = True, set(bad)
        # A buffer that was finite once loses its excuse for good
        self._excused &= set(bad)
        new = [name for name in bad if name not in self._excused and name not in self._known]
        self._known = set(bad)
        statistics = [name for name in new if name.rpartition(".")[2].startswith("running_")]
        self._doubtful = [name for name in new if name not in statistics]
        if statistics:
            yield _describe_buffers(fact.step, statistics, is_read=True)


def _describe_buffers(step: int, names: Sequence[str], *, is_read: bool) -> Finding:
    return Finding(
        kind=NonfiniteBuffer.name,
        severity=Severity.ERROR if is_read else Severity.INFO,
        step=max(0, step),
        message=f"NaN or Inf in {spell_count(len(names), 'buffer')} that held none before: {show(names)}"
        + ("" if is_read else "; the next step was finite, so it reads none of that"),
        advice="A forward with a bad batch wrote them. Reset them (BatchNorm: reset_running_stats()), or go back to a "
        "checkpoint.",
        evidence={"buffers": list(names[:SHOWN]), "num_buffers": len(names)},
    )


def _describe_spoilt(reading: Reading) -> Finding:
    names = list(reading.spoilt_buffers)
    return Finding(
        kind=NonfiniteBuffer.name,
        severity=Severity.ERROR,
        step=reading.step,
        message=f"this forward wrote NaN or Inf into {spell_count(len(names), 'buffer')}, though its loss is finite: "
        f"{show(names)}",
        advice="The batch is bad, or something hides a NaN from the loss (nan_to_num, where, the program's own check).",
        evidence={"buffers": names[:SHOWN], "num_buffers": len(names)},
    )
