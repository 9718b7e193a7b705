"""Judge: a Finding -> a Verdict, with escalation, budgets and cool-downs. Pure: no torch, no clock, no side effect.

Order of authority: `on_nonfinite`, which the reflex has already carried out; the severity at which the policy halts;
the table. A rung that the budget or the policy forbids gives way to the next one. When none is left, a rollback that is
no longer allowed halts the run, and everything else stays at what the reflex did. What a verdict asks for counts as
done. An `info` is never acted on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from steadygrad.config import Policy
from steadygrad.decide.reflex import decide
from steadygrad.decide.table import Ladder, Rung, build_table
from steadygrad.facts import Action, Answer, Finding, Reading, Severity, Verdict
from steadygrad.facts.kinds import find_kind

HYPERPARAMETERS = (Action.SCALE_LR, Action.SCALE_WEIGHT_DECAY, Action.TIGHTEN_CLIP)
"""Actions that change a hyperparameter, and have a cool-down: their effect takes a while to show."""

RESTART = "restart"
"""Budget for rolling back, with a lower rate, a run that is no longer finite: a different attempt, with nothing to
lose. So it counts as a change of the rate, on a separate count."""

HELPED = 100
"""Steps of training after which a rollback has helped: later trouble is new trouble, and not a reason to give up."""


class Judge:
    """Decides what to do about findings, and remembers what was done before."""

    def __init__(self, policy: Policy | None = None, *, on_nonfinite: Action = Action.SKIP) -> None:
        self._policy = policy if policy is not None else Policy()
        self._on_nonfinite = on_nonfinite
        self._table = build_table(self._policy)
        # Action is a StrEnum, so an action and its text are the same key.
        self._budgets: dict[str, int] = {
            Action.SKIP: self._policy.max_skips,
            Action.SCALE_LR: self._policy.max_lr_changes,
            Action.SCALE_WEIGHT_DECAY: self._policy.max_weight_decay_changes,
            Action.TIGHTEN_CLIP: self._policy.max_clip_changes,
            Action.ROLLBACK: self._policy.rollbacks_to_halt - 1,
            RESTART: self._policy.max_lr_changes,
        }
        self._taken: dict[str, list[int]] = {str(what): [] for what in self._budgets}
        self._bad_step = -2  # so that step 0 does not continue a row
        self._num_bad = 0
        self._now = 0

    def decide(self, finding: Finding, *, reading: Reading | None = None) -> Verdict:
        """Return what to do about one Finding; `reading` is that of the judged step, None when there is none."""
        self._now = max(self._now, finding.step if reading is None else reading.step)
        reflex = decide(finding, reading, self._on_nonfinite)
        halt_at = self._policy.halt_at
        if reflex.action is Action.HALT:
            return reflex
        if halt_at is not None and finding.severity.rank >= halt_at.rank:
            return Verdict(action=Action.HALT, reason=f"the policy halts at the first {halt_at.value}")
        if finding.severity is Severity.INFO or not self._policy.act:
            return reflex
        ladder = self._table.get(finding.kind, ())
        if finding.kind == "nonfinite_buffer" and reading is not None and reading.spoilt_buffers:
            return reflex  # they were put back with the step
        if find_kind(finding.kind).about_step:
            return self._answer_step(finding.step, ladder, reflex)
        why = f"{finding.kind} at step {finding.step}"
        if not self._needs_proof(finding):
            return self._climb(ladder, reflex, why, _find_factor(finding))
        if finding.evidence.get("proof") == Answer.NONFINITE:
            return self._climb(ladder, reflex, why, _find_factor(finding), budget=RESTART)
        if finding.evidence.get("proof") != Answer.DAMAGED:
            return Verdict(
                action=reflex.action, reason="finite numbers are acted on only with proof, and there is none"
            )
        return self._answer_proven(ladder, reflex, why, _find_factor(finding))

    def _needs_proof(self, finding: Finding) -> bool:
        """Whether harm must be proven first because the numbers are finite; the user's own answers need no proof."""
        own = finding.kind in self._policy.actions
        return self._policy.require_proof and not own and find_kind(finding.kind).needs_proof

    def _answer_proven(self, ladder: Ladder, reflex: Verdict, why: str, advised: float | None) -> Verdict:
        """Go back to earlier weights, proven better on the same batches; the second time with a lower rate as well.

        When the budget is spent, only report, never halt: the numbers are finite, and a person can decide.
        """
        taken = self._list_recent(Action.ROLLBACK)
        if len(taken) >= self._budgets[Action.ROLLBACK]:
            reason = f"{why}, but there were {len(taken)} rollbacks in {self._policy.budget_steps} steps"
            return Verdict(action=reflex.action, reason=reason)
        again = bool(taken) and self._policy.change_hyperparameters
        verdict = self._climb(ladder, reflex, why, advised)
        if (
            verdict.action is not Action.ROLLBACK
            or verdict.factor is not None
            or not self._policy.change_hyperparameters
        ):
            return verdict
        factor = advised if advised is not None else self._policy.lr_factor if again else None
        return dataclasses.replace(verdict, factor=factor)

    # --- the ladders ------------------------------------------------------------------------------------------------

    def _answer_step(self, step: int, ladder: Ladder, reflex: Verdict) -> Verdict:
        """Answer one non-finite step: its loss and its gradient are one event."""
        if step == self._bad_step:  # the other finding of the same step, already counted
            return reflex
        self._num_bad = self._num_bad + 1 if step == self._bad_step + 1 else 1
        self._bad_step = step
        if reflex.action is Action.SKIP:
            if self._is_spent(Action.SKIP):
                spent = f"{self._policy.max_skips} steps were skipped within {self._policy.budget_steps}, and one more"
                return Verdict(action=Action.HALT, reason=spent)
            self._take(Action.SKIP)
        done = (Action.SKIP, Action.NONE)  # by the reflex
        due = tuple(rung for rung in ladder if rung.after == self._num_bad and rung.action not in done)
        verdict = self._climb(due, reflex, f"{self._num_bad} non-finite steps in a row")
        if verdict.action is Action.ROLLBACK:
            self._num_bad = 0  # a new stretch of bad steps starts after this
        return verdict

    def _climb(
        self, ladder: Ladder, reflex: Verdict, why: str, advised: float | None = None, *, budget: str | None = None
    ) -> Verdict:
        """Take the first rung that nothing forbids; `advised` is the rule's own factor for the learning rate.

        `budget`: what to count instead of the action itself.
        """
        forbidden = ""
        for rung in ladder:
            counted = rung.action if budget is None else budget
            forbidden = self._find_objection(rung, counted)
            if not forbidden:
                factor = self._choose_factor(rung, advised)
                self._take(counted)
                return Verdict(action=rung.action, reason=why, factor=factor)
            # Not for a rollback that the policy forbids because it lowers the rate: that one is passed over.
            if rung.action is Action.ROLLBACK and self._is_spent(counted):
                return Verdict(action=Action.HALT, reason=f"{why}, and {forbidden}")
            if self._is_cooling(rung.action):
                break  # the last change has not had time to work: do not repeat it or go further
        return Verdict(action=reflex.action, reason=f"{why}, but {forbidden}") if forbidden else reflex

    def _choose_factor(self, rung: Rung, advised: float | None) -> float | None:
        """Choose the factor. A rollback undoes rate changes only once: if that did not help, they stay lowered."""
        if rung.action is not Action.ROLLBACK or rung.factor is None:
            return rung.factor
        if _lowers_rates(rung):
            return rung.factor if advised is None else advised
        if self._taken[Action.ROLLBACK.value] or self._taken[RESTART]:
            return None
        if self._taken[Action.SCALE_LR.value]:
            self._taken[Action.SCALE_LR.value].pop()  # undone, so it neither counts nor starts a cool-down
        return rung.factor

    # --- budgets ----------------------------------------------------------------------------------------------------

    def _find_objection(self, rung: Rung, counted: str) -> str:
        """Return why this rung must not be taken now; empty when it may be."""
        changes = rung.action in HYPERPARAMETERS or _lowers_rates(rung)
        if changes and not self._policy.change_hyperparameters:
            return "the policy changes no hyperparameters"
        if self._is_spent(counted):
            return self._describe_budget(counted)
        if self._is_cooling(rung.action):
            return f"the last {rung.action.value} is less than {self._policy.cooldown_steps} steps ago"
        return ""

    def _is_spent(self, counted: str) -> bool:
        if counted not in self._budgets:
            return False
        recent = self._list_recent(counted)
        num = self._count_vain(recent) if counted == Action.ROLLBACK else len(recent)
        return num >= self._budgets[counted]

    def _list_recent(self, counted: str) -> list[int]:
        recent = [step for step in self._taken[counted] if self._now - step < self._policy.budget_steps]
        # Dropped for good: steps only grow, also across a rollback.
        self._taken[counted] = recent
        return recent

    def _describe_budget(self, counted: str) -> str:
        count = self._budgets[counted]
        if counted == Action.ROLLBACK:
            return f"none of the last {count} rollbacks helped: the trouble was back within {HELPED} steps"
        if counted == RESTART:
            return f"{count} times in {self._policy.budget_steps} steps a lower learning rate has not helped"
        return f"the budget of {count} x {counted} in {self._policy.budget_steps} steps is spent"

    def _count_vain(self, rollbacks: list[int]) -> int:
        """Count the most recent rollbacks that did not help."""
        num, later = 0, self._now
        for step in reversed(rollbacks):
            if later - step >= HELPED:
                break
            num, later = num + 1, step
        return num

    def _is_cooling(self, action: Action) -> bool:
        steps = self._taken.get(action.value)
        return action in HYPERPARAMETERS and bool(steps) and self._now - max(steps or [0]) < self._policy.cooldown_steps

    def _take(self, counted: str) -> None:
        if counted in self._budgets:
            self._taken[counted].append(self._now)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what was done so far and the current stretch of bad steps, if any."""
        return {
            "taken": {action: list(steps) for action, steps in self._taken.items()},
            "bad_step": self._bad_step,
            "num_bad": self._num_bad,
            "now": self._now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        for action in self._taken:
            self._taken[action] = [int(step) for step in state["taken"].get(action, ())]
        self._bad_step, self._num_bad = int(state["bad_step"]), int(state["num_bad"])
        self._now = int(state["now"])


def _lowers_rates(rung: Rung) -> bool:
    """Whether this rung rolls back with a lower learning rate."""
    return rung.action is Action.ROLLBACK and rung.factor is not None and rung.factor < 1.0


def _find_factor(finding: Finding) -> float | None:
    """Return the rule's own factor for the learning rate; None when it has none."""
    factor = finding.evidence.get("lr_factor")
    return float(factor) if isinstance(factor, int | float) and 0 < factor < 1 else None
