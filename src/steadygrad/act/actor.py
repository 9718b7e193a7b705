"""Actor: Verdict -> Outcome, for what goes beyond the reflex: learning rate, weight decay, clip threshold, rollback.

A rollback restores the newest good snapshot and then skips a window of data: the batches between the snapshot and now
are not seen again, and the next few are refused, because what broke the run is often in neighbouring data
(PaLM went back about 100 steps and skipped 200 to 500 batches).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.act.window import Window
from steadygrad.clip import Clipper
from steadygrad.clip.fixed_norm import FixedNormClipper
from steadygrad.config import Policy
from steadygrad.facts import Action, Outcome, Reading, Verdict

RestoreCheckpoint = Callable[[], "tuple[int, list[str]] | None"]
"""Restores the newest good checkpoint; returns its step and what did not fit, None if there is none."""


class Actor:
    """Carries out verdicts, and keeps the snapshots that a rollback needs."""

    def __init__(
        self,
        policy: Policy,
        *,
        rates: Rates,
        snapshots: Snapshots,
        clipper: Clipper | None = None,
        window: Window | None = None,
        restore_checkpoint: RestoreCheckpoint = lambda: None,
    ) -> None:
        """Store the parts. A rollback opens `window`; without memory for snapshots it goes to a checkpoint."""
        self._restore_checkpoint = restore_checkpoint
        self._rates, self._snapshots, self._clipper = rates, snapshots, clipper
        self._window = window if window is not None else Window()
        rates.ramp_back(policy.ramp_back_steps)

    def carry_out(self, verdict: Verdict, reading: Reading | None, *, step: int) -> Outcome:
        """Carry out `verdict` and return the values before and after; `step` is the last step taken."""
        if verdict.action is Action.SCALE_LR and verdict.factor is not None:
            return self._rates.scale_lr(verdict.factor)
        if verdict.action is Action.SCALE_WEIGHT_DECAY and verdict.factor is not None:
            return self._rates.scale_weight_decay(verdict.factor)
        if verdict.action is Action.TIGHTEN_CLIP and verdict.factor is not None:
            return self._tighten(verdict.factor)
        if verdict.action is Action.ROLLBACK:
            return self._roll_back(step + 1, verdict.factor)
        if reading is not None:
            return describe_reflex(verdict.action, reading)
        return (
            Outcome(action=Action.HALT, message="training was halted") if verdict.action is Action.HALT else UNTOUCHED
        )

    def _tighten(self, factor: float) -> Outcome:
        """Lower the clip threshold from the next step on."""
        if not isinstance(self._clipper, FixedNormClipper):
            return Outcome(action=Action.NONE, message="this clip strategy has no fixed threshold to lower")
        before = self._clipper.threshold
        self._clipper.tighten(factor)
        after = self._clipper.threshold
        return Outcome(
            action=Action.TIGHTEN_CLIP,
            message=f"the clip threshold went from {before:.4g} to {after:.4g}",
            before={"max_norm": before},
            after={"max_norm": after},
        )

    def _roll_back(self, now: int, factor: float | None) -> Outcome:
        """Roll back. `factor`: None keeps changes made to the rates, 1 undoes them, less also lowers the LR."""
        if self._window.is_new:
            return Outcome(action=Action.NONE, message="this step has already been rolled back")
        lower = factor if factor is not None and factor < 1.0 else None
        # The schedule always goes back; rate changes made since then are undone only if they were part of the trouble.
        with contextlib.nullcontext() if factor == 1.0 else self._rates.keep_factors():
            restored = self._restore()
        if restored is None:
            if lower is not None:
                return self._rates.scale_lr(lower)  # the only thing left to try
            return Outcome(action=Action.NONE, message=f"could not roll back: {self._snapshots.describe()}")
        then, num_again, misfits = restored
        # Also marks the rollback as new: guard/rollback.py then clears what was remembered about the weights.
        self._window.open(self._snapshots.effective_skip(now))
        message = "; ".join(
            [
                f"rolled back from step {now} to the {self._name_source()} before step {then}",
                *([f"repeated {num_again} of these steps from there"] if num_again else []),
                *(f"left as it is: {misfit}" for misfit in misfits),
                self._window.describe(),
            ]
        )
        scaled = self._rates.scale_lr(lower) if lower is not None else None
        return Outcome(
            action=Action.ROLLBACK,
            message=message if scaled is None else f"{message}; {scaled.message}",
            before={"step": now, **(scaled.before if scaled else {})},
            after={
                "step": then,
                **({"num_steps_made_again": num_again} if num_again else {}),
                **(scaled.after if scaled else {}),
            },
        )

    def _restore(self) -> tuple[int, int, list[str]] | None:
        """Restore an earlier state; return its step, the steps made again from there, and what did not fit."""
        # On many ranks both calls are collectives. All ranks decided on the same Reading, so all get here.
        if self._snapshots.can_restore:
            then = self._snapshots.restore()
            return then, self._snapshots.num_again, self._snapshots.misfits
        restored = self._restore_checkpoint() if self._snapshots.is_too_large else None
        return None if restored is None else (restored[0], 0, restored[1])

    def _name_source(self) -> str:
        return "checkpoint" if self._snapshots.is_too_large else "state"

    def after_step(self, step: int, *, healthy: bool) -> list[str]:
        """Update rates and snapshots with how the step went; return why snapshots were dropped, if any were."""
        if not healthy:
            self._snapshots.unhealthy(step)
            return []
        self._rates.healthy_step()
        return self._snapshots.healthy_step(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the rate factors and how much of the window is left."""
        return {"rates": self._rates.state_dict(), "num_to_refuse": self._window.num_left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        self._rates.load_state_dict(state["rates"])
        self._window.num_left = int(state["num_to_refuse"])


# --- outcomes -----------------------------------------------------------------------------------------------------
# What the reflex did to a step: the Outcome that is recorded next to the Verdict.


UNTOUCHED = Outcome(action=Action.NONE, message="nothing was changed")


def describe_reflex(action: Action, reading: Reading) -> Outcome:
    """Return the Outcome of an action that the step itself has already carried out."""
    if action in (Action.SKIP, Action.HALT) and reading.skipped:
        return Outcome(action=action, message="the step was skipped, no weight was touched")
    if action is Action.HALT:
        return Outcome(action=action, message="training was halted")
    if action is Action.SANITIZE:
        return Outcome(action=action, message=f"{reading.num_nonfinite} gradient elements were replaced")
    if action is Action.CLIP:
        return Outcome(
            action=action,
            message=f"clipped to {reading.applied_norm:.4g}",
            before={"grad_norm": reading.grad_norm},
            after={"grad_norm": reading.applied_norm},
        )
    return UNTOUCHED
