"""Rules about ranks that should hold the same weights and different data. Reported by the rank that sees it, and never
acted on. Cost: comparisons of two checksums, with each scan.
"""

from __future__ import annotations

from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.detect.once import OnceRule
from steadygrad.facts import Finding, InputScan, RankScan, RankWait, Severity
from steadygrad.words import spell_count

NUM_SAME = 3
"""Different batches that all ranks must have shared: one may be a warm-up."""
NUM_ZERO = 2
"""Scans in a row in which an input must be all zeros."""


class RanksDiffer(OnceRule[RankScan]):
    """Two ranks hold different weights although DistributedDataParallel averages their gradients.

    Bits are compared, on machines that round alike: equal weights and equal gradients stay equal.
    """

    name = "ranks_differ"
    hears = (RankScan,)

    def judge(self, fact: RankScan) -> Finding | None:
        """Return the finding, with the parameters that differ."""
        if not fact.differing or not fact.gradients_are_averaged:
            return None
        num = spell_count(len(fact.differing), "parameter")
        at_start = fact.step < 0  # the scan before the first step has the number -1
        return self.report(
            step=fact.step,
            message=f"{num} of {fact.num_compared} differ between rank {fact.rank} and rank {fact.other} "
            + ("before the first step: " if at_start else f"after step {fact.step}: ")
            + show(list(fact.differing)),
            advice="Load or change weights before DistributedDataParallel is created, which broadcasts them, and on "
            "all ranks alike."
            if at_start
            else "Call the DistributedDataParallel model itself, not its .module; create it after the last conversion "
            "of the model (.to, .float), which removes its hooks; clip and step in the same way on all ranks.",
            evidence={"parameters": list(fact.differing[:SHOWN]), "num_parameters": len(fact.differing)},
        )


class SameBatch(OnceRule[RankScan]):
    """All ranks train on the same batches: a DistributedSampler is missing, and more ranks gain nothing."""

    name = "same_batch"
    hears = (RankScan,)
    memory = ("_seen", "_is_refuted", "_told", "_first")

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._is_refuted, self._first = False, 0

    def judge(self, fact: RankScan) -> Finding | None:
        """Return the finding when `NUM_SAME` different batches were the same on all ranks, and none was not."""
        if not fact.batch or self._is_refuted:
            return None
        if not fact.same_batch or not fact.gradients_are_averaged:
            self._is_refuted = True
            return None
        self._first = self._first if self._seen else fact.step
        self._seen.add(fact.batch)
        if len(self._seen) < NUM_SAME:
            return None
        return self.report(
            step=self._first,
            message=f"all ranks trained on the same {len(self._seen)} batches, tensor for tensor",
            advice="Give the DataLoader a DistributedSampler, or each rank its own part of the data.",
            evidence={"num_batches": len(self._seen)},
        )


class ZeroInput(OnceRule[RankScan | InputScan]):
    """The largest input of a step is all zeros, on this rank alone or since some step: a copy that did not arrive."""

    name = "zero_input"
    hears = (RankScan, InputScan)
    memory = ("_on_rank", "_since", "_usual", "_told")

    def __init__(self) -> None:
        self._on_rank: list[int] = []
        self._since: list[int] = []
        self._usual = 0  # scans of the batch in which the input was not zero

    def judge(self, fact: RankScan | InputScan) -> Finding | None:
        """Return the finding when it has held in `NUM_ZERO` scans in a row."""
        return self._compare_ranks(fact) if isinstance(fact, RankScan) else self._compare_steps(fact)

    def _compare_ranks(self, scan: RankScan) -> Finding | None:
        # A step without a checksum neither counts nor ends the row of zeros
        if not scan.batch:
            return None
        self._on_rank = [*self._on_rank, scan.step] if scan.zero_input else []
        if len(self._on_rank) < NUM_ZERO:
            return None
        what = f"input {scan.zero_input} is all zeros on rank {scan.rank}, and not on rank {scan.other}"
        return self._describe(self._on_rank[0], what)

    def _compare_steps(self, scan: InputScan) -> Finding | None:
        floats = [stats for stats in scan.tensors.values() if stats.is_floating and stats.numel > 1]
        if not floats:
            return None
        largest = max(floats, key=lambda stats: stats.numel)
        is_zero = largest.num_zeros == largest.numel
        self._usual += not is_zero
        self._since = [*self._since, scan.step] if is_zero and self._usual >= NUM_ZERO else []
        if len(self._since) < NUM_ZERO:
            return None
        return self._describe(self._since[0], "the largest input is all zeros, and was not before")

    def _describe(self, step: int, what: str) -> Finding:
        return self.report(
            step=step,
            message=what,
            advice="Check how batches reach this device: a non_blocking copy from memory that is reused, a "
            "peer-to-peer transfer (NCCL_P2P_DISABLE=1 tests it), a worker that sends an empty buffer.",
        )


def describe_wait(fact: RankWait) -> Finding:
    """Return the finding about a rank that waits for others, with the place where each of them is."""
    places = [f"rank {rank} is {place}" for rank, place in sorted(fact.others.items())]
    silent = [rank for rank in range(fact.num_ranks) if rank != fact.rank and rank not in fact.others]
    places += [f"rank {rank} is not waiting for anything" for rank in silent]
    return Finding(
        kind="rank_waits",
        severity=Severity.WARNING,
        step=fact.step,
        message=f"rank {fact.rank} has waited for {fact.seconds:.0f} s {fact.place}; {'; '.join(places)}",
        advice=f"All ranks must make the same calls in the same order. The group gives up after "
        f"{fact.timeout_seconds:.0f} s.",
        evidence={"seconds": fact.seconds, "rank": fact.rank},
    )
