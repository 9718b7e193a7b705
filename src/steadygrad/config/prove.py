"""ProveConfig: how the paired test decides whether the current weights were harmed."""

from __future__ import annotations

from dataclasses import dataclass

from steadygrad.config.checks import require, require_booleans, require_positive


@dataclass(frozen=True, kw_only=True)
class ProveConfig:
    """How earlier weights are compared with the current ones when finite numbers look like trouble.

    The figures come from `benchmarks/harm.py` and `benchmarks/rescue.py`; docs/proof.md has the table.
    """

    enabled: bool = True
    """False: no test, so nothing that needs a proof is ever acted on."""
    num_batches: int = 8
    """Batches on which both sets of weights are compared."""
    patience: int = 8
    """Steps between a first test that says "damaged" and collecting batches for the second, which must agree."""
    ratio: float = 2.0
    """Multiple of the earlier weights' loss that the current ones must reach on every batch."""
    share: float = 0.25
    """Share of what the earlier weights had learnt since the start that the current ones must have lost."""
    excess: float = 0.2
    """Where only the initial weights are available: by what share of their loss the current ones must be worse."""
    lead: float = 0.1
    """Where a learning rate looks too high: by what share of the run's loss a lower one must be ahead. Where the data
    has changed: the share of what earlier weights learnt on it that the run must lack."""
    rate_steps: int = 40
    """... and for how many steps the lower one is tried."""
    fresh_ratio: float = 1.5
    """Where the data has changed: the factor by which earlier weights, trained on the same batches, must be ahead."""
    budget_share: float = 0.01
    """Share of a run's steps that all tests together may cost; each forward of a test counts as a step."""
    first_budget: int = 128
    """Steps that tests may cost at the start of a run, before that share amounts to anything."""
    max_bytes: int = 256 << 20
    """Size limit for all batches held for a test; beyond it they are kept in host memory, or fewer are kept."""

    def __post_init__(self) -> None:
        require_booleans(self)
        require_positive(self)
        require(self.num_batches >= 4, self, "num_batches", "be at least 4", "Use 8.")
        require(self.ratio > 1, self, "ratio", "be above 1", "Use 2.0.")
        require(self.budget_share <= 1, self, "budget_share", "be a share up to 1", "Use 0.01.")
