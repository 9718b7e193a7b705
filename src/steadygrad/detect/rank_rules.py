"""Rules -> those that all ranks of a training must agree on, and those about what one rank alone has seen.

Batches and activations differ from rank to rank. A finding about them is reported by the rank that saw it and never
acted on: a rank that acts alone diverges from the others. A rule that needs one fact of this sort is of this sort, too:
as a common rule it would never hear it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from steadygrad.detect.base import Rule
from steadygrad.facts import ActivationScan, Fact, GraphScan, InputScan
from steadygrad.facts.program import ProgramFact
from steadygrad.facts.program_scans import ProgramScan

OWN_FACTS = (InputScan, ActivationScan, GraphScan, *get_args(ProgramFact), *get_args(ProgramScan))
# Named, because some take every fact; and views keep what each rank reports under these names
ABOUT_BATCHES = frozenset(
    {"nonfinite_input", "outlier_input", "all_labels_masked"}
    | {"eval_while_training", "train_mode_validation", "independent_labels", "eps_gradient"}
)


def split_rules(rules: Sequence[Rule]) -> tuple[list[Rule], list[Rule]]:
    """Return (rules about what is equal on all ranks, rules about a rank's own data)"""
    own = [one for one in rules if _is_own(one)]
    return [one for one in rules if one not in own], own


def split_facts(facts: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Return (facts that are equal on all ranks, facts about a rank's own data)"""
    return (
        [fact for fact in facts if not isinstance(fact, OWN_FACTS)],
        [fact for fact in facts if isinstance(fact, OWN_FACTS)],
    )


def _is_own(one: Rule) -> bool:
    return one.name in ABOUT_BATCHES or not set(OWN_FACTS).isdisjoint(getattr(one, "hears", ()))
