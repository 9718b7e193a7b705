"""Policy: what to do about a finding, how often, and what to try next when it does not help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steadygrad.config.checks import (
    as_enum,
    is_number,
    require,
    require_booleans,
    require_positive,
)
from steadygrad.errors import ConfigError
from steadygrad.facts import Action, Severity
from steadygrad.facts.kinds import KINDS, suggest_kind


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do about findings, how often, and what to try next when it does not help.

    One non-finite step is skipped; three in a row lower the learning rate; ten roll back; the third rollback halts.
    Finite numbers are acted on only with proof that the current weights are worse than earlier ones.

    >>> Policy.patient().change_hyperparameters
    False
    """

    act: bool = True
    """False: only watch. Non-finite steps are still kept from the weights, as `GuardConfig.on_nonfinite` says."""
    require_proof: bool = True
    """True: act on finite numbers only after the paired test has shown that the weights were harmed. False: act at
    once, by the table of `Policy.eager()`. Your own responses in `actions` need no proof."""
    change_hyperparameters: bool = True
    """Whether learning rate and weight decay may be changed; if not, the next action is taken instead."""
    halt_at: Severity | None = None
    """End the run at the first finding this severe."""
    actions: Mapping[str, Action] = field(default_factory=dict)
    """Your own responses to findings above info, by kind: `{"loss_spike": Action.ROLLBACK}`; `none` only reports it."""
    nonfinite_steps_to_scale_lr: int = 3
    """Non-finite steps in a row that lower the learning rate."""
    nonfinite_steps_to_rollback: int = 10
    """Non-finite steps in a row that roll back."""
    lr_factor: float = 0.5
    """What the learning rate is multiplied by after non-finite steps and epochs, and on divergence."""
    explosion_lr_factor: float = 0.1
    """... and after a loss explosion."""
    start_lr_factor: float = 0.05
    """... and when it is too high from the first steps on, which also rolls back to the start. Where weights ran away,
    the factor depends on how far: `StartThresholds.usual_move` or `adam_move`."""
    weight_decay_factor: float = 1.5
    """What the weight decay is multiplied by on overfitting."""
    clip_factor: float = 0.5
    """What the threshold of FixedNorm is multiplied by where your own response is `tighten_clip`."""
    rollbacks_to_halt: int = 3
    """The rollback that halts instead, when none of those before it helped for 100 steps."""
    max_lr_changes: int = 3
    """Changes of the learning rate in `budget_steps`; after that a rollback replaces a further one. A run ruined by too
    high a rate also restarts with a lower one at most this many times, and then halts."""
    max_weight_decay_changes: int = 3
    """Changes of the weight decay in `budget_steps`; further ones are not made."""
    max_clip_changes: int = 3
    """Changes of the clip threshold in `budget_steps`; further ones are not made."""
    max_skips: int = 250
    """Skipped steps in `budget_steps`; one more halts: a run that skips a quarter of its data hides a defect."""
    budget_steps: int = 1000
    """Length in steps of the window in which the budgets count."""
    cooldown_steps: int = 100
    """Steps after a change of learning rate or weight decay during which it is not changed again."""
    ramp_back_steps: int | None = None
    """Healthy steps over which a lowered learning rate climbs back to its schedule; None: it stays lowered."""
    early_stopping_patience: int | None = None
    """Validations without a better loss after which training should stop; None: never."""
    early_stopping_min_delta: float = 0.0
    """How much lower a validation loss must be to count as better."""

    def __post_init__(self) -> None:
        if self.halt_at is not None:
            object.__setattr__(self, "halt_at", as_enum(Severity, self.halt_at, "Policy.halt_at"))
        require_booleans(self)
        example = 'Write actions={"loss_spike": Action.ROLLBACK}.'
        require(isinstance(self.actions, Mapping), self, "actions", "be a mapping of kind to Action", example)
        answers = {k: as_enum(Action, v, f"Policy.actions[{k!r}]") for k, v in dict(self.actions).items()}
        object.__setattr__(self, "actions", answers)
        for kind, action in answers.items():
            meant = None if kind in KINDS else suggest_kind(kind)
            if meant is not None:
                raise ConfigError.about(
                    "Policy", "actions", f"[{kind!r}] names no kind of finding. Did you mean {meant!r}?"
                )
            if action in (Action.CLIP, Action.SKIP, Action.SANITIZE):
                raise ConfigError.about(
                    "Policy",
                    "actions",
                    f"[{kind!r}] cannot be {action.value!r}: it happens before a step is judged. "
                    "Use GuardConfig.clip or GuardConfig.on_nonfinite, or Action.ROLLBACK.",
                )
        require_positive(self, but=("early_stopping_min_delta",))
        delta = self.early_stopping_min_delta
        require(is_number(delta) and delta >= 0, self, "early_stopping_min_delta", "not be negative", "Use 0.0.")
        for name in ("lr_factor", "explosion_lr_factor", "start_lr_factor"):
            require(getattr(self, name) < 1, self, name, "be below 1", "It lowers the learning rate.")
        require(self.clip_factor < 1, self, "clip_factor", "be below 1", "It lowers the clip threshold.")
        require(self.weight_decay_factor > 1, self, "weight_decay_factor", "be above 1", "Use 1.5.")
        require(
            self.nonfinite_steps_to_scale_lr < self.nonfinite_steps_to_rollback,
            self,
            "nonfinite_steps_to_scale_lr",
            "be below nonfinite_steps_to_rollback",
            "Use 3 and 10.",
        )

    @classmethod
    def observe(cls) -> Policy:
        """Only watch."""
        return cls(act=False)

    @classmethod
    def eager(cls) -> Policy:
        """Correct at the first symptom, without proof: a loss ten times higher divides the learning rate by ten.

        The correction table of the classic training guides. It changes healthy runs whose loss is meant to rise.
        """
        return cls(require_proof=False)

    @classmethod
    def strict(cls) -> Policy:
        """Halt at the first finding above info."""
        return cls(halt_at=Severity.WARNING)

    @classmethod
    def patient(cls) -> Policy:
        """Skip and roll back, but never change a hyperparameter."""
        return cls(change_hyperparameters=False)
