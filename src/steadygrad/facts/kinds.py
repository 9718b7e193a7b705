"""Every kind of finding that the library emits, with the properties that other stages use.

`needs_proof`: the finding is about finite numbers, so no action is taken unless the paired test shows that the present
weights are worse than earlier ones. Kinds of a user's own rules are not listed here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Properties of a finding that follow from its kind alone."""

    name: str
    about_step: bool = False
    """It reports one non-finite step, which the reflex has already handled."""
    fatal: bool = False
    """Further training is pointless unless it can be repaired."""
    needs_proof: bool = False
    """An action on it waits for the paired test."""
    is_spike: bool = False
    """It reports one outlying step, blamed on its batch unless the paired test shows otherwise."""
    at_start: bool = False
    """It reports that training never began to learn, so it is compared with the initial weights."""
    is_shown: bool = False
    """It is printed even as an info: what happened to files that the user may look for."""
    of_settings: bool = True
    """Another learning rate could have prevented it; other kinds concern the data, the program or the run."""

    @property
    def of_size(self) -> bool:
        """Whether it is about the size of a step, which a clip has limited."""
        return self.name in _OF_SIZE


_ABOUT_STEP = ("nonfinite_loss", "nonfinite_gradient", "nonfinite_rate")
_OF_SIZE = ("loss_spike", "exploding_gradient", "high_gradient_norm", "rising_norm", "adam_rms", "update_norm")
_FATAL = ("nonfinite_parameter", "nonfinite_buffer")
_SPIKES = ("loss_spike", "exploding_gradient")
_NEED_PROOF = ("loss_explosion", "unrecovered_loss", "divergence", "rising_norm")
_AT_START = ("rate_too_high",)
_OF_SETTINGS = (
    *("nonfinite_validation", "nonfinite_epoch", "zero_loss", "replaced_loss", "overfitting", "instability_forecast"),
    *("no_better_than_guessing", "exploded_start"),
    *("dead_units", "dead_activation", "saturated_activation", "constant_output"),
    *("adam_rms", "update_norm", "update_ratio", "scaler_collapse", "underflowing_epsilon", "exception"),
)
_NOT_OF_SETTINGS = (
    *("nonfinite_input", "outlier_input", "all_labels_masked"),  # the data
    *("unregistered_layers", "silent_broadcast", "double_softmax", "anomaly_mode_left_on", "partial_overlap"),
    *(
        "missing_gradient",
        "zero_gradient",
        "stale_gradient",
        "unchanged_parameter",
        "added_gradients",
        "dropped_gradients",
    ),
    *(
        "divided_twice",
        "scaled_gradient",
        "cleared_gradient",
        "useless_clip",
        "vanished_rate",
        "foreign_schedule",
        "doubled_schedule",
        "forgotten_state",
    ),  # calls and schedule
    *("out_of_reach", "untied_weights", "not_frozen", "frozen_head", "lost_weights"),  # model, optimizer
    *("stale_save", "idle_average", "stale_statistics", "restored_weights", "partial_save", "equal_units", "idle_load"),
    *("wrong_group", "pixel_scale", "wrong_split"),
    *("ranks_differ", "same_batch", "zero_input", "rank_waits"),  # ranks
    *("lost_updates", "unheeded_autocast", "flushed_gradient", "redrawn_noise"),  # number formats
    *(
        "wrong_loss_input",
        "unreachable_targets",
        "one_element_norm",
        "mixed_samples",
        "mixed_channels",
        "shifted_labels",
        "padding_in_loss",
        "lost_ends",
    ),
    *("swapped_mask", "eval_while_training", "train_mode_validation", "dropout_in_evaluation", "repeated_batch"),
    *("norm_in_evaluation",),
    *("repeated_order", "sorted_labels", "independent_labels", "changed_dataset", "single_row"),
    *("eps_gradient", "constant_labels", "visible_labels", "labels_in_inputs", "repeated_seed"),
    *("loss_plateau", "vanishing_gradient", "high_gradient_norm"),  # too small a rate causes these
    *("frequent_clipping", "many_skips", "frequent_actions", "asked_for"),  # what was done
    *("resumed", "checkpoint_failed", "infinite_state", "run_directory_lost", "uncopied_state"),
)

KINDS: dict[str, Kind] = {
    **{name: Kind(name=name, about_step=True) for name in _ABOUT_STEP},
    **{name: Kind(name=name, fatal=True) for name in _FATAL},
    **{name: Kind(name=name, needs_proof=True, is_spike=True) for name in _SPIKES},
    **{name: Kind(name=name, needs_proof=True) for name in _NEED_PROOF},
    **{name: Kind(name=name, needs_proof=True, at_start=True) for name in _AT_START},
    **{name: Kind(name=name) for name in _OF_SETTINGS},
    **{name: Kind(name=name, of_settings=False) for name in _NOT_OF_SETTINGS},
    "new_run": Kind(name="new_run", is_shown=True, of_settings=False),
}
"""Name -> Kind."""


def find_kind(name: str) -> Kind:
    """Return the properties of a kind; kinds of a user's own rules have none."""
    return KINDS.get(name) or Kind(name=name)


def suggest_kind(name: str) -> str | None:
    """Return the known kind that a misspelt one probably means; None if nothing is close."""
    close = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.85)
    return close[0] if close else None
