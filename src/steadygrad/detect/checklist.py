"""What the rules check, in lines that a person reads: each with the facts that it needs and its kinds of findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Fact, Finding


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the list."""

    title: str
    facts: tuple[str, ...]
    """Names of the facts that it needs, one of them at least."""
    kinds: tuple[str, ...]


# A kind that no line names is shown under 'everything else', and only once it is found
CHECKS = (
    Check(
        "the loss, and what feeds it",
        ("LossScan",),
        (
            "wrong_loss_input",
            "unreachable_targets",
            "double_softmax",
            "silent_broadcast",
            "one_element_norm",
            "eps_gradient",
        ),
    ),
    Check(
        "labels, against tokens and mask",
        ("LabelScan",),
        (
            "shifted_labels",
            "padding_in_loss",
            "lost_ends",
            "swapped_mask",
            "sorted_labels",
            "constant_labels",
            "visible_labels",
            "labels_in_inputs",
        ),
    ),
    Check("samples and channels kept apart", ("LossScan",), ("mixed_samples", "mixed_channels", "single_row")),
    Check(
        "train and eval mode",
        ("ModeScan",),
        ("eval_while_training", "train_mode_validation", "dropout_in_evaluation", "norm_in_evaluation"),
    ),
    Check(
        "batches and their order",
        ("Reading",),
        (
            "repeated_batch",
            "repeated_order",
            "changed_dataset",
            "independent_labels",
            "outlier_input",
            "repeated_seed",
            "pixel_scale",
            "wrong_split",
        ),
    ),
    Check(
        "parameters and optimizer",
        ("ParameterScan", "ModelScan"),
        (
            *("unregistered_layers", "missing_gradient", "unchanged_parameter", "partial_overlap", "out_of_reach"),
            *("untied_weights", "not_frozen", "frozen_head", "lost_weights", "stale_save", "idle_average"),
            "stale_statistics",
            *("restored_weights", "partial_save", "equal_units", "idle_load", "wrong_group"),
        ),
    ),
    Check(
        "the order of calls, and the schedule",
        ("CallScan",),
        (
            *("divided_twice", "scaled_gradient", "cleared_gradient", "useless_clip", "vanished_rate"),
            *("stale_gradient", "foreign_schedule", "doubled_schedule", "forgotten_state"),
        ),
    ),
    Check(
        "number formats",
        ("CallScan",),
        ("lost_updates", "unheeded_autocast", "flushed_gradient", "redrawn_noise", "underflowing_epsilon"),
    ),
    Check("ranks", ("RankScan",), ("ranks_differ", "same_batch", "zero_input", "rank_waits")),
    Check(
        "losses and gradients",
        ("Reading",),
        ("nonfinite_loss", "nonfinite_gradient", "zero_loss", "zero_gradient", "rate_too_high", "vanishing_gradient"),
    ),
)


class CheckSheet(Remembering):
    """A rule that finds nothing and counts the facts, so that a check without facts is not called passed."""

    name = "check_sheet"

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()
        self.findings: list[Finding] = []

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Count a fact."""
        self.heard[type(fact).__name__] += 1
        return ()

    @property
    def num_steps(self) -> int:
        """Steps that were judged."""
        return self.heard["Reading"]

    def fill(self) -> list[tuple[str, bool | None, Sequence[Finding]]]:
        """Return each check with whether it passed, None if there was nothing to check, and what was found.

        >>> CheckSheet().fill()[0]
        ('the loss, and what feeds it', None, [])
        """
        rows: list[tuple[str, bool | None, Sequence[Finding]]] = []
        known: set[str] = set()
        for check in CHECKS:
            known |= set(check.kinds)
            found = [finding for finding in self.findings if finding.kind in check.kinds]
            is_checked = any(self.heard[name] for name in check.facts)
            rows.append((check.title, None if not (is_checked or found) else not found, found))
        others = [finding for finding in self.findings if finding.kind not in known]
        return [*rows, *([("everything else", False, others)] if others else [])]
