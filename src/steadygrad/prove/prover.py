"""Prover: findings on finite numbers are held back, tested, and come out with a proof or as what they are, a report.

    suspicion                a rule says that the loss exploded, diverged, or that the rate is too high
    collect                  the batches of the next steps, with their random state
    first test               present against verified earlier weights, on the same batches
    patience, second test    harm that heals by itself needs nobody
    answer                   damaged: the policy acts; unharmed or unknown: it is reported, and nothing is done

A steady healthy run never gets here. While a suspicion is open no snapshot is taken and none becomes good: what was
taken in trouble proves nothing. Tests are counted against a budget in steps, the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steadygrad.act.snapshots import Snapshots
from steadygrad.config import ProveConfig
from steadygrad.diagnose.capture import Capture
from steadygrad.facts import Answer, Finding, Proof, Reading, Severity
from steadygrad.facts.kinds import find_kind
from steadygrad.prove.comparison import NUM_QUICK, Comparison
from steadygrad.prove.held import HeldSteps
from steadygrad.prove.paired import PASS_FUNCTION, CannotTestError
from steadygrad.prove.reference import References
from steadygrad.prove.rule import find_excess
from steadygrad.prove.words import report_answer, report_spike

NUM_FIRST = 16
"""Losses of the run whose median is where it began."""
MAX_ROUNDS = 4
"""Tests of one suspicion that heals so slowly that each is better than the last."""
HEALING = 0.5
"""Share of the excess of the test before below which the weights are healing by themselves."""
SPIKE_COST = 4.0
"""Training steps that the test of one batch takes, about: two forwards, and the weights out and in again."""


@dataclass(slots=True)
class Case:
    """An open suspicion."""

    finding: Finding
    held: HeldSteps
    begins_at: int
    """The first step whose batch is collected."""
    tries_rate: bool = False
    """A lower rate is tried on the steps that are held."""
    previous: Proof | None = None
    num_rounds: int = 0
    num_skipped: int = 0
    """Steps in a row that were not finite."""


@dataclass(slots=True)
class Memory:
    """What goes into a checkpoint."""

    cost: float = 0.0
    first_losses: list[float] = field(default_factory=list)


class Prover:
    """Answers, for each finding that would change a run of finite numbers, whether the weights were harmed."""

    def __init__(
        self,
        config: ProveConfig,
        *,
        comparison: Comparison,
        references: References,
        snapshots: Snapshots,
        rate_factor: float,
        exempt: Collection[str] = (),
    ) -> None:
        """`rate_factor`: what is tried where a rule does not say how much too high the rate is.

        `exempt`: kinds that the user has an answer of their own for, which is given at once.
        """
        self._config, self._comparison, self._references = config, comparison, references
        self._snapshots, self._rate_factor, self._exempt = snapshots, rate_factor, frozenset(exempt)
        self._case: Case | None = None
        self._was_answered = False
        self._memory = Memory()
        # A quarter of the bound: they are held before anything is suspected.
        self._start: HeldSteps | None = HeldSteps(wanted=config.rate_steps, max_bytes=config.max_bytes // 4)

    @property
    def is_open(self) -> bool:
        """Whether a suspicion is being tested."""
        return self._case is not None

    def drop(self) -> None:
        """The training was put back or loaded: whatever was suspected is gone."""
        self._case, self._was_answered = None, False
        self._snapshots.is_held = False

    def close(self, reason: str) -> Finding | None:
        """The suspicion that is open, which nothing can be tested about any more; None when there is none."""
        case = self._case
        if case is None:
            return None
        self.drop()
        proof = _tell_unknown(case.begins_at, reason)
        return dataclasses.replace(report_answer(case.finding, proof), severity=case.finding.severity)

    # --- findings in, findings out ----------------------------------------------------------------------------------

    def sift(self, findings: Sequence[Finding], step: int) -> list[Finding]:
        """The findings that need no proof; the others are held back until there is an answer."""
        kept = []
        for finding in findings:
            if finding.kind in self._exempt or not _is_suspicion(finding):
                kept.append(finding)
            elif finding.kind == "unrecovered_loss" and self._was_answered:
                continue  # the explosion that it speaks of was tested: this is the same event
            elif self._case is None:
                self._case = Case(finding, self._hold(), begins_at=step + 1)
                self._snapshots.is_held = True
            elif finding.step < self._case.finding.step:
                self._case.finding = finding  # one event, reported once, from where it began
        return kept

    def answer(self, reading: Reading, findings: Sequence[Finding], captures: Sequence[Capture]) -> list[Finding]:
        """After a step: `findings` less those held back, and with those that have an answer now."""
        self._note_start(reading, captures)
        out = []
        for finding in self.sift(findings, reading.step):
            is_tested = _is_spike(finding) and finding.kind not in self._exempt
            out.append(self._answer_spike(finding, reading.step, captures) if is_tested else finding)
        concluded = self._advance(reading, captures)
        return out if concluded is None else [*out, concluded]

    def _advance(self, reading: Reading, captures: Sequence[Capture]) -> Finding | None:
        """Collect this step for the open suspicion, and test when enough are there."""
        case = self._case
        if case is None or reading.step < case.begins_at:
            return None
        case.num_skipped = case.num_skipped + 1 if reading.skipped else 0
        if not reading.skipped and reading.loss is not None and case.held is not self._start:
            case.held.add(captures, reading.loss)
        if case.num_skipped >= self._config.num_batches:
            return self.close("the steps since are not finite")
        concluded = self._try(case, reading.step) if case.held.is_complete else None
        if concluded is not None:
            self.drop()
            self._was_answered = True
        return concluded

    def _hold(self) -> HeldSteps:
        return HeldSteps(wanted=self._config.num_batches, max_bytes=self._config.max_bytes)

    def _note_start(self, reading: Reading, captures: Sequence[Capture]) -> None:
        """The first losses; and the first batches, as long as the rate may turn out to be too high."""
        usable = not reading.skipped and reading.loss is not None and math.isfinite(reading.loss)
        if usable and len(self._memory.first_losses) < NUM_FIRST:
            self._memory.first_losses.append(float(reading.loss or 0.0))
        if self._start is None:
            return
        if usable and reading.step == len(self._start.steps):
            self._start.add(captures, float(reading.loss or 0.0))
        is_needed = self._case is not None and self._case.finding.kind == "rate_too_high"
        if reading.step >= self._config.rate_steps and not is_needed:
            self._start = None

    # --- one suspicion ----------------------------------------------------------------------------------------------

    def _try(self, case: Case, step: int) -> Finding | None:
        """Test once; the finding with its proof, or None while the answer is still open."""
        is_trial = case.tries_rate
        proof = self._try_rate(case, step) if is_trial else self._prove(case, step)
        self._memory.cost += self._comparison.take_cost()
        case.num_rounds += 1
        if proof.answer is Answer.UNHARMED and case.finding.kind == "rate_too_high" and not is_trial:
            # No worse than having learnt nothing is no praise: would a lower rate have done better on these batches?
            self._prepare_trial(case)
            return self._try(case, step) if case.held.is_complete else None
        if proof.answer is not Answer.DAMAGED or is_trial:
            return self._conclude(case.finding, proof)
        before, case.previous = case.previous, proof
        if before is not None and _is_lasting(before, proof):
            return self._conclude(case.finding, proof)
        if case.num_rounds >= MAX_ROUNDS:  # each time better than the last: it heals
            return self._conclude(case.finding, dataclasses.replace(proof, answer=Answer.UNHARMED))
        case.held, case.begins_at = self._hold(), step + 1 + self._config.patience
        return None

    def _prepare_trial(self, case: Case) -> None:
        case.tries_rate, case.held.wanted = True, self._config.rate_steps
        if self._start is not None and len(self._start.steps) > len(case.held.steps):
            case.held = self._start  # from the very first step on, so fewer more are needed

    def _prove(self, case: Case, step: int) -> Proof:
        captures = case.held.captures[-self._config.num_batches :]
        if len(captures) < NUM_QUICK:
            return _tell_unknown(step, "no batch of these steps is known", PASS_FUNCTION)
        if not self._may_spend(step, 2 * len(captures) + 4):
            return _tell_unknown(step, f"the budget of {self._config.budget_share:.0%} of all steps is spent")
        try:
            reference = self._references.find(case.finding)
        except CannotTestError as error:
            return _tell_unknown(step, error.reason, error.remedy)
        return self._comparison.compare(
            reference, captures, step, initial=self._references.initial, began_at=self._began_at
        )

    def _try_rate(self, case: Case, step: int) -> Proof:
        steps, advised = case.held.steps, case.finding.evidence.get("lr_factor")
        factor = float(advised) if isinstance(advised, int | float) and 0 < advised < 1 else self._rate_factor
        if self._references.is_rate_falling:
            return _tell_unknown(step, "the schedule lowers the learning rate by itself")
        if len(steps) < 4 * self._config.num_batches or not self._may_spend(step, len(steps) + 4):
            return _tell_unknown(step, "a lower rate could not be tried on enough batches")
        first = next(iter(self._memory.first_losses), math.nan)
        return self._comparison.compare_rate(steps, factor, step, first=first)

    def _conclude(self, finding: Finding, proof: Proof) -> Finding:
        if proof.answer is not Answer.DAMAGED:
            return report_answer(finding, proof)
        factor = self._references.find_factor(finding)
        self._snapshots.condemn(self._references.find_way_back(finding))
        return report_answer(finding, proof, lr_factor=factor)

    # --- spikes -----------------------------------------------------------------------------------------------------

    def _answer_spike(self, finding: Finding, step: int, captures: Sequence[Capture]) -> Finding:
        proof = self._prove_spike(finding, step, captures)
        self._memory.cost += self._comparison.take_cost()
        if proof.answer is Answer.UNKNOWN:
            finding = dataclasses.replace(finding, severity=Severity.INFO)  # one step, and nothing shows that it hurt
        return report_spike(finding, proof)

    def _prove_spike(self, finding: Finding, step: int, captures: Sequence[Capture]) -> Proof:
        if not captures:
            return _tell_unknown(step, "this step's batch is not known", PASS_FUNCTION)
        if self._case is not None or not self._may_spend(step, SPIKE_COST + self._allowance(step) / 2):
            return _tell_unknown(step, "it was not tested")  # half of the budget is left for what may be acted on
        try:
            reference = self._references.find(finding)
        except CannotTestError as error:
            return _tell_unknown(step, error.reason, error.remedy)
        return self._comparison.compare_batch(reference, captures[-1], step, began_at=self._began_at)

    # --- numbers ----------------------------------------------------------------------------------------------------

    @property
    def _began_at(self) -> float:
        """The loss that the run began with; NaN while it is not known."""
        first = self._memory.first_losses
        return statistics.median(first) if first else math.nan

    def _allowance(self, step: int) -> float:
        return self._config.first_budget + self._config.budget_share * step

    def _may_spend(self, step: int, cost: float) -> bool:
        return self._memory.cost + cost <= self._allowance(step)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What tests have cost and shown; an open suspicion is not saved."""
        return dataclasses.asdict(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of `state_dict()`."""
        self.drop()
        self._start = None
        known = {one.name for one in dataclasses.fields(Memory)}
        self._memory = Memory(**{name: value for name, value in state.items() if name in known})


def _is_suspicion(finding: Finding) -> bool:
    needs = find_kind(finding.kind).needs_proof and finding.severity is not Severity.INFO
    return needs and not find_kind(finding.kind).is_spike and "proof" not in finding.evidence


def _is_spike(finding: Finding) -> bool:
    return find_kind(finding.kind).is_spike and finding.severity is not Severity.INFO


def _is_lasting(before: Proof, now: Proof) -> bool:
    """Whether the harm is still there and not on its way out, or is so large that nothing is left to heal from."""
    if now.reference == 0 or (now.first is not None and now.mean_now > now.first):
        return True
    return find_excess(now.now, now.then) >= HEALING * find_excess(before.now, before.then)


def _tell_unknown(step: int, reason: str, remedy: str = "") -> Proof:
    return Proof(answer=Answer.UNKNOWN, step=step, reason=reason, remedy=remedy)
