"""Every kind of finding that the library emits, with the properties that other stages ask about.

`needs_proof`: the finding speaks of finite numbers, so nothing is done about it unless the paired test shows that the
present weights are worse than earlier ones. Kinds of a user's own rules are not listed here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is known of a finding from its kind alone."""

    name: str
    about_step: bool = False
    """It says that one step was not finite; the reflex has already answered it."""
    fatal: bool = False
    """Training on is pointless when it cannot be healed."""
    needs_proof: bool = False
    """An action on it waits for the paired test."""
    is_spike: bool = False
    """It speaks of one step that stands out, which is the batch's doing unless the paired test shows otherwise."""


_ABOUT_STEP = ("nonfinite_loss", "nonfinite_gradient")
_FATAL = ("nonfinite_parameter", "nonfinite_buffer")
_SPIKES = ("loss_spike", "exploding_gradient")
_NEEDS_PROOF = (*("loss_explosion", "unrecovered_loss", "divergence", "rate_too_high", "rising_norm"),)
_REPORTED = (
    *("nonfinite_input", "nonfinite_validation", "nonfinite_epoch"),
    *("loss_plateau", "zero_loss", "replaced_loss", "overfitting", "instability_forecast"),
    *("high_gradient_norm", "vanishing_gradient", "dead_units"),
    *("missing_gradient", "stale_gradient", "adam_rms", "update_norm", "update_ratio", "unchanged_parameter"),
    *("outlier_input", "all_labels_masked", "dead_activation", "saturated_activation", "constant_output"),
    *("unregistered_layers", "silent_broadcast", "double_softmax", "anomaly_mode_left_on", "partial_overlap"),
    *("scaler_collapse", "frequent_clipping", "many_skips", "frequent_actions", "underflowing_epsilon"),
    *("exception", "resumed", "new_run", "checkpoint_failed", "infinite_state", "run_directory_lost", "asked_for"),
    *("uncopied_state", "added_gradients", "dropped_gradients"),
)

KINDS: dict[str, Kind] = {
    **{name: Kind(name=name, about_step=True) for name in _ABOUT_STEP},
    **{name: Kind(name=name, fatal=True) for name in _FATAL},
    **{name: Kind(name=name, needs_proof=True, is_spike=True) for name in _SPIKES},
    **{name: Kind(name=name, needs_proof=True) for name in _NEEDS_PROOF},
    **{name: Kind(name=name) for name in _REPORTED},
}
"""Name -> Kind."""


def find_kind(name: str) -> Kind:
    """The properties of a kind; those of a user's own rule have none."""
    return KINDS.get(name) or Kind(name=name)


def suggest_kind(name: str) -> str | None:
    """The known kind that a misspelt one was probably meant to be; None when nothing is close."""
    close = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.85)
    return close[0] if close else None
