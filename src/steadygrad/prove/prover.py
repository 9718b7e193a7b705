"""Prover: holds findings on finite numbers back, tests them, and returns each with a proof or as a mere report.

    suspicion                a rule says that the loss exploded or diverged, or that the rate is too high
    collect                  the batches of the next steps, with their random state
    first test               present against verified earlier weights, on the same batches
    patience, second test    harm that heals by itself needs no action
    answer                   damaged: the policy acts; unharmed or unknown: it is only reported

A steady healthy run never gets here. While a suspicion is open, no snapshot is taken and none is verified: one taken
in trouble proves nothing. Tests count against a budget in steps, the same on all ranks. Whether a suspicion is opened
or answered depends only on what all ranks know: each step of an open one begins with an exchange.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steadygrad.act.snapshot import Snapshot
from steadygrad.act.snapshots import Snapshots
from steadygrad.config import ProveConfig
from steadygrad.diagnose.capture import Capture
from steadygrad.facts import Answer, Finding, Proof, Reading, Severity
from steadygrad.facts.kinds import find_kind
from steadygrad.measure.ranks import Ranks
from steadygrad.prove.comparison import NUM_QUICK, Comparison
from steadygrad.prove.held import HeldSteps
from steadygrad.prove.paired import PASS_FUNCTION, CannotTestError
from steadygrad.prove.reference import ASCENT, References
from steadygrad.prove.rule import find_excess, is_spike_of_weights
from steadygrad.prove.words import report_answer, report_spike

NUM_FIRST = 16
"""Number of first losses whose median is the run's starting level."""
MAX_ROUNDS = 4
"""Most tests of one suspicion that heals slowly, each better than the last."""
HEALING = 0.5
"""The weights are healing if the excess is below this share of the previous test's."""
LOOK_EVERY = 8
"""Steps between checks whether the rate has returned; each costs an exchange between the ranks."""
SAME_EVENT = 128
"""Steps after an answer during which other rules' findings about earlier steps are ignored."""
RECENT = 64
"""Number of recent losses whose median is the usual loss."""
SPIKE_COST = 4.0
"""Approximate cost of testing one batch, in training steps: two forwards, and moving the weights out and in."""


@dataclass(slots=True)
class Case:
    """An open suspicion."""

    finding: Finding
    held: HeldSteps
    begins_at: int
    """The first step whose batch is collected."""
    is_reported: bool = False
    """Whether the step itself was already reported, so that only lasting harm is news."""
    trial: Snapshot | None = None
    """State from which the held steps are repeated."""
    previous: Proof | None = None
    num_rounds: int = 0
    num_skipped: int = 0
    """Number of consecutive non-finite steps."""
    since: int = 0
    """The first step that any rule objects to: weights are good only before it."""

    def __post_init__(self) -> None:
        self.since = self.finding.step

    def join(self, other: Finding) -> None:
        """Merge another rule's finding about the same event, which is reported once, by the rule that saw it first."""
        self.since = min(self.since, other.step)
        if self.is_reported:  # so far only its first step was reported
            self.finding, self.is_reported = other, False

    @property
    def trouble(self) -> Finding:
        """The finding, dated to where the trouble may have begun."""
        return dataclasses.replace(self.finding, step=self.since)


@dataclass(slots=True)
class Memory:
    """The part of the state that is saved in a checkpoint."""

    cost: float = 0.0
    first_losses: list[float] = field(default_factory=list)


class Prover:
    """Decides, for each finding that would change a run of finite numbers, whether the weights were harmed."""

    def __init__(
        self,
        config: ProveConfig,
        *,
        comparison: Comparison,
        references: References,
        snapshots: Snapshots,
        rate_factor: float,
        ranks: Ranks,
        exempt: Collection[str] = (),
    ) -> None:
        """`rate_factor`: the factor to try if a rule does not say by how much the rate is too high.

        `exempt`: kinds with an action of the user's own, which is taken at once.
        """
        self._config, self._comparison, self._references = config, comparison, references
        self._snapshots, self._rate_factor, self._exempt = snapshots, rate_factor, frozenset(exempt)
        self._ranks = ranks
        self._case: Case | None = None
        self._answered_at = -1  # the step after which the last answer was given
        self._put_off: Finding | None = None  # until the rate is back at a level that allows a fair comparison
        self._recent: deque[float] = deque(maxlen=RECENT)  # losses while nothing was suspected
        self._memory = Memory()
        # A quarter of the limit: these are held before any suspicion. With several ranks no lower rate is tried.
        self._start = None if ranks.many else HeldSteps(wanted=config.rate_steps, max_bytes=config.max_bytes // 4)

    @property
    def is_open(self) -> bool:
        """Whether a suspicion is being tested."""
        return self._case is not None

    def drop(self) -> None:
        """Drop all suspicions: the training was rolled back or loaded."""
        self._case, self._answered_at, self._put_off = None, -1, None
        self._snapshots.is_held = False

    def close(self, reason: str) -> Finding | None:
        """Report the open suspicion as untestable, because of `reason`; return None if there is nothing new to say."""
        case, self._put_off = self._case, None
        if case is None:
            return None
        self.drop()
        if case.is_reported:
            return None
        proof = _make_unknown(case.begins_at, reason)
        return dataclasses.replace(report_answer(case.finding, proof), severity=case.finding.severity)

    # --- findings in, findings out ----------------------------------------------------------------------------------

    def sift(self, findings: Sequence[Finding], step: int) -> list[Finding]:
        """Return the findings that need no proof; hold the others back until there is an answer."""
        kept = []
        for finding in findings:
            if finding.kind in self._exempt or not _is_suspicion(finding):
                if self._case is not None and self._case.finding.kind == finding.kind and "proof" in finding.evidence:
                    self.drop()  # nothing is left to test
                kept.append(finding)
            elif finding.step <= self._answered_at and self._is_answered(step):
                continue  # another rule reports what was already tested
            elif self._case is None:
                self._open(finding, step)
            else:
                self._case.join(finding)
        return kept

    def answer(self, reading: Reading, findings: Sequence[Finding], captures: Sequence[Capture]) -> list[Finding]:
        """Return `findings` after a step without those held back, plus those that now have an answer."""
        self._snapshots.second_try = None  # the last answer has been acted on by now, if at all
        self._note(reading, captures)
        out = []
        for finding in self.sift(findings, reading.step):
            is_tested = _is_spike(finding) and finding.kind not in self._exempt
            out.append(self._answer_spike(finding, reading.step, captures) if is_tested else finding)
        self._take_up(reading.step)
        concluded = self._advance(reading, captures)
        return out if concluded is None else [*out, concluded]

    def _open(self, finding: Finding, step: int, *, is_reported: bool = False) -> None:
        self._case = Case(finding, self._hold(), begins_at=step + 1, is_reported=is_reported)
        self._snapshots.is_held = True

    def _is_answered(self, step: int) -> bool:
        """Return whether the last answer still covers what happens now."""
        return self._answered_at >= 0 and step <= self._answered_at + SAME_EVENT

    def _take_up(self, step: int) -> None:
        """Take up a postponed suspicion once the rate is back; drop it if no comparison is possible any more."""
        if self._put_off is None or self._case is not None or step % LOOK_EVERY:
            return
        if self._references.find_fair(self._put_off) is not None:
            self._open(self._put_off, step, is_reported=True)
            self._put_off = None
        elif not self._references.is_waiting(self._put_off):
            self._put_off = None

    def _advance(self, reading: Reading, captures: Sequence[Capture]) -> Finding | None:
        """Collect this step for the open suspicion, and test once there are enough."""
        case = self._case
        if case is None or reading.step < case.begins_at:
            return None
        # Before the exchange below, which a rank without data would not answer.
        if self._ranks.why_apart is not None:
            return self.close(self._ranks.why_apart)
        case.num_skipped = case.num_skipped + 1 if reading.skipped else 0
        if not reading.skipped and reading.loss is not None and case.held is not self._start:
            case.held.add(captures, reading.loss)
        case.held.wanted = self._ranks.find_least(case.held.wanted)  # one may lack memory, or a repeatable batch
        if case.num_skipped >= self._config.num_batches:
            return self.close("the steps since are not finite")
        proof = self._try(case, reading.step) if case.held.is_complete else None
        if proof is None:
            return None
        self.drop()
        # After drop(), which resets it.
        self._answered_at = reading.step
        return self._conclude(case, proof)

    def _hold(self) -> HeldSteps:
        return HeldSteps(wanted=self._config.num_batches, max_bytes=self._config.max_bytes)

    def _note(self, reading: Reading, captures: Sequence[Capture]) -> None:
        """Keep first and recent losses; and the first batches, while the rate may still prove too high."""
        usable = not reading.skipped and reading.loss is not None and math.isfinite(reading.loss)
        is_quiet = self._case is None and self._put_off is None and not self._is_answered(reading.step)
        if usable and is_quiet:
            self._recent.append(float(reading.loss or 0.0))
        if usable and len(self._memory.first_losses) < NUM_FIRST:
            self._memory.first_losses.append(float(reading.loss or 0.0))
        if self._start is None:
            return
        if usable and reading.step == len(self._start.steps):
            self._start.add(captures, float(reading.loss or 0.0))
        is_needed = self._case is not None and find_kind(self._case.finding.kind).at_start
        if reading.step >= self._config.rate_steps and not is_needed:
            self._start = None

    # --- one suspicion ----------------------------------------------------------------------------------------------

    def _try(self, case: Case, step: int) -> Proof | None:
        """Test once; None while the answer is still open."""
        proof = self._prove(case, step) if case.trial is None else self._make_again(case, case.trial, step)
        self._memory.cost += self._comparison.take_cost()
        case.num_rounds += 1
        if proof.answer is Answer.UNHARMED and case.trial is None:
            if self._ranks.many:  # steps are not repeated there
                is_rate = find_kind(case.finding.kind).at_start
                return _make_unknown(step, "a lower rate is not tried on several ranks") if is_rate else proof
            # If earlier weights do badly too, "no worse" means little: would they have learned more since?
            case.trial = self._find_trial(case, proof)
            if case.trial is None:
                return proof
            self._prepare_trial(case)
            return self._try(case, step) if case.held.is_complete else None
        if proof.answer is not Answer.DAMAGED or case.trial is not None:
            return proof
        before, case.previous = case.previous, proof
        if before is not None and _is_lasting(before, proof):
            return proof
        if case.num_rounds >= MAX_ROUNDS:  # better each time: it is healing
            return dataclasses.replace(proof, answer=Answer.UNHARMED)
        case.held, case.begins_at = self._hold(), step + 1 + self._config.patience
        return None

    def _find_trial(self, case: Case, proof: Proof) -> Snapshot | None:
        """Return the state to repeat the held steps from; None if the question is already answered."""
        if find_kind(case.finding.kind).at_start:
            return self._references.find_initial()
        usual = statistics.median(self._recent) if self._recent else math.nan
        is_new = proof.mean_then > (self._config.ratio * usual if usual > 0 else usual)  # data, or an objective
        may_spend = self._may_spend(proof.step, self._config.rate_steps + self._allowance(proof.step) / 2)
        if not (is_new and may_spend):
            return None
        return self._references.find_fair(case.trouble)

    def _prepare_trial(self, case: Case) -> None:
        case.held.wanted = self._config.rate_steps
        is_start = find_kind(case.finding.kind).at_start and self._start is not None
        if is_start and self._start is not None and len(self._start.steps) > len(case.held.steps):
            case.held = self._start  # it starts at the very first step, so fewer new ones are needed

    def _prove(self, case: Case, step: int) -> Proof:
        captures = case.held.captures[-self._config.num_batches :]
        if self._references.is_ascent:  # first: there is nothing that the caller should do for a proof
            return _make_unknown(step, ASCENT)
        if len(captures) < NUM_QUICK:
            return _make_unknown(step, "no batch of these steps is known", PASS_FUNCTION)
        if not self._may_spend(step, 2 * len(captures) + 4):
            return _make_unknown(step, f"the budget of {self._config.budget_share:.0%} of all steps is spent")
        try:
            reference = self._references.find(case.trouble)
        except CannotTestError as error:
            return _make_unknown(step, error.reason, error.remedy)
        return self._comparison.compare(
            reference,
            captures,
            step,
            initial=self._references.find_initial(),
            began_at=self._began_at,
            is_repeated=case.previous is not None,
        )

    def _make_again(self, case: Case, reference: Snapshot, step: int) -> Proof:
        """Test whether the same steps do better from earlier weights, or from the initial ones at a lower rate."""
        steps, is_rate = case.held.steps, find_kind(case.finding.kind).at_start
        if is_rate and self._references.is_rate_falling:
            return _make_unknown(step, "the schedule lowers the learning rate anyway")
        if len(steps) < 4 * self._config.num_batches or not self._may_spend(step, len(steps) + 4):
            return _make_unknown(step, "the steps could not be repeated on enough batches")
        if not is_rate:
            return self._comparison.compare_fresh(steps, reference, step)
        advised = case.finding.evidence.get("lr_factor")
        factor = float(advised) if isinstance(advised, int | float) and 0 < advised < 1 else self._rate_factor
        first = next(iter(self._memory.first_losses), math.nan)
        return self._comparison.compare_rate(steps, reference, factor, step, first=first)

    def _conclude(self, case: Case, proof: Proof) -> Finding | None:
        finding = case.finding
        if proof.answer is Answer.DAMAGED:
            factor = self._references.find_factor(case.trouble)
            self._snapshots.condemn(self._references.find_way_back(case.trouble))
            return report_answer(finding, proof, lr_factor=factor)
        self._snapshots.second_try = None
        if self._references.find_fair(case.trouble) is None and self._references.is_waiting(case.trouble):
            self._put_off = case.trouble
        return None if case.is_reported else report_answer(finding, proof)

    # --- spikes -----------------------------------------------------------------------------------------------------

    def _answer_spike(self, finding: Finding, step: int, captures: Sequence[Capture]) -> Finding:
        proof = self._prove_spike(finding, step, captures)
        self._memory.cost += self._comparison.take_cost()
        if proof.answer is Answer.UNKNOWN:
            finding = dataclasses.replace(finding, severity=Severity.INFO)  # a single step, no sign of harm
        elif proof.answer is Answer.DAMAGED:
            self._open(_suspect_lasting(finding), step, is_reported=True)
            limit = finding.evidence.get("highest")  # of the loss; an outlying gradient has none
            # To initial weights any batch is above the limit: if the present ones do worse, they are to blame.
            is_trained = proof.reference != 0
            if is_trained and isinstance(limit, float) and not is_spike_of_weights(proof.now, proof.then, limit):
                finding = dataclasses.replace(finding, severity=Severity.INFO)  # until the test shows lasting harm
        return report_spike(finding, proof)

    def _prove_spike(self, finding: Finding, step: int, captures: Sequence[Capture]) -> Proof:
        if self._ranks.why_apart is not None:
            return _make_unknown(step, self._ranks.why_apart)
        # An exchange: one rank may have no batch, and all must come to the same answer.
        if not self._ranks.find_least(len(captures)):
            return _make_unknown(step, "this step's batch is not known", PASS_FUNCTION)
        if self._case is not None or not self._may_spend(step, SPIKE_COST + self._allowance(step) / 2):
            return _make_unknown(step, "it was not tested")  # keep half of the budget for findings that may be acted on
        try:
            reference = self._references.find(finding)
        except CannotTestError as error:
            return _make_unknown(step, error.reason, error.remedy)
        return self._comparison.compare_batch(reference, captures[-1], step, began_at=self._began_at)

    # --- numbers ----------------------------------------------------------------------------------------------------

    @property
    def _began_at(self) -> float:
        """The loss that the run began with; NaN until it is known."""
        first = self._memory.first_losses
        return statistics.median(first) if first else math.nan

    def _allowance(self, step: int) -> float:
        return self._config.first_budget + self._config.budget_share * step

    def _may_spend(self, step: int, cost: float) -> bool:
        return self._memory.cost + cost <= self._allowance(step)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the cost and results of the tests; an open suspicion is not saved."""
        return dataclasses.asdict(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict()`."""
        self.drop()
        # The first batches are not saved, and the run is past them.
        self._start = None
        known = {one.name for one in dataclasses.fields(Memory)}
        self._memory = Memory(**{name: value for name, value in state.items() if name in known})


def _is_suspicion(finding: Finding) -> bool:
    needs = find_kind(finding.kind).needs_proof and finding.severity is not Severity.INFO
    return needs and not find_kind(finding.kind).is_spike and "proof" not in finding.evidence


def _is_spike(finding: Finding) -> bool:
    return find_kind(finding.kind).is_spike and finding.severity is not Severity.INFO


def _suspect_lasting(spike: Finding) -> Finding:
    """Return the suspicion that follows a harmful spike: lasting damage is a separate finding."""
    what = spike.message.partition(", ")[0]
    return dataclasses.replace(
        spike,
        kind="unrecovered_loss",
        severity=Severity.ERROR,
        message=f"{what}, and the weights have not recovered",
        advice="Find out what happened at that step: its batch, the rate, or an overwritten weight.",
    )


def _is_lasting(before: Proof, now: Proof) -> bool:
    """Return whether the harm persists without healing, or is too large to heal from."""
    if now.reference == 0 or (now.first is not None and now.mean_now > now.first):
        return True
    return find_excess(now.now, now.then) >= HEALING * find_excess(before.now, before.then)


def _make_unknown(step: int, reason: str, remedy: str = "") -> Proof:
    return Proof(answer=Answer.UNKNOWN, step=step, reason=reason, remedy=remedy)
