"""Inquiry: a step that was judged bad -> where it began, and what caused it.

Each of several ranks shares what it alone has seen, and the rank on which a bad step began replays it for all. Where
no rank can do so alone, because the weights are sharded or the step talks to other ranks, all ranks replay it together.
A replay starts from the buffers that the step started from, and puts them back afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from steadygrad.act.buffers import BufferKeeper
from steadygrad.detect.rank_rules import split_facts
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.diagnosis import TALKS
from steadygrad.diagnose.investigator import Investigator
from steadygrad.diagnose.joint_replay import name_rank, replay_jointly
from steadygrad.facts import Cause, Fact, Finding, InputScan, Reading
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Judgement
from steadygrad.judgement.raised import (
    describe_raised,
    is_explained_by,
    is_raised_by_torch,
    make_unfinished,
    may_be_of_numbers,
)
from steadygrad.measure.origin import Origin
from steadygrad.measure.periodic_scans import Looks
from steadygrad.measure.ranks import FromRanks, Ranks
from steadygrad.record.rank_file import RankFile


class Inquiry:
    """Consults the other ranks and has steps replayed."""

    def __init__(
        self,
        investigator: Investigator,
        *,
        watched: Watched,
        buffers: BufferKeeper,
        ranks: Ranks,
        judgement: Judgement,
        rank_file: RankFile | None,
        steps_every: int,
    ) -> None:
        """`rank_file` records this rank's own loss every `steps_every` steps."""
        self._investigator, self._watched, self._buffers, self._ranks = investigator, watched, buffers, ranks
        self._judgement, self._rank_file, self._steps_every = judgement, rank_file, steps_every

    def note_good(self, step: int) -> None:
        """Note a step that was made with finite numbers."""
        self._investigator.note_good(step)

    def consult_ranks(
        self, reading: Reading, facts: list[Fact], looks: Looks, from_ranks: FromRanks
    ) -> tuple[list[Fact], Origin]:
        """Share what this rank alone has seen, and learn where a bad step began; return the facts common to all."""
        if self._rank_file is not None and reading.step % self._steps_every == 0:
            self._rank_file.write_own(reading.step, from_ranks.own_loss)
        facts, own_facts = split_facts(facts)
        signs = [finding.message for finding in self._judgement.report_own(reading, own_facts)]
        # Collectives after a bad step; `reading` is the same on all ranks, so all of them get there or none.
        facts += self._share_bad_batches(reading, own_facts)
        return facts, self._watched.own_gradients.find_origin(reading, from_ranks, looks.own_finite, signs)

    def _share_bad_batches(self, reading: Reading, own_facts: Sequence[Fact]) -> list[Fact]:
        """Return the batches of all ranks that made this step bad: no rule may blame it on the learning rate."""
        if not reading.is_nonfinite or self._ranks.is_joining:
            return []
        mine = [fact for fact in own_facts if isinstance(fact, InputScan) and fact.is_nonfinite]
        return [scan for scans in self._ranks.gather(mine) for scan in scans]

    def find_cause(
        self, looks: Looks, origin: Origin | None, reading: Reading, findings: Sequence[Finding]
    ) -> Cause | None:
        """Return the cause of a bad step; with several ranks, the one where it began finds it and sends it to all."""
        ranks = self._ranks
        # Up to the exchange below, each test must come out alike on all ranks: one that returned alone would leave the
        # others waiting in it.
        if ranks.many and (origin is None or ranks.is_joining):
            return None
        if origin is not None and not origin.ranks and not self._investigator.needs_all_ranks:
            return None
        if not self._investigator.claim(reading, findings):
            return None
        if origin is None:
            return self._replay(looks.captures, reading, findings, access=looks.access)
        if self._watched.trained.is_fragmented:  # the engine's own hooks would take a replay for a step
            return None
        if self._investigator.needs_all_ranks:
            return self._replay_together(looks, origin, reading, findings)
        chosen = origin.ranks[0]
        cause = self._replay(looks.captures, reading, findings, access=looks.access) if ranks.rank == chosen else None
        # The others wait here while the chosen rank replays.
        common: Cause | None = ranks.gather(name_rank(cause, ranks, self._device))[chosen]
        if common is not None and TALKS in common.note:
            return self._replay_together(looks, origin, reading, findings)
        return common

    def explain(self, error: Exception, captures: Sequence[Capture], step: int) -> None:
        """Report an error of the user's function, if a replay finds a number that was not finite before it.

        Not one that the program itself has raised: it may catch it, and a replay would run its function once more.
        """
        if not (may_be_of_numbers(error) and is_raised_by_torch(error)) or not self._investigator.claim_error(step):
            return
        cause = self._replay(captures, make_unfinished(step), (), may_raise=True)
        if cause is not None and is_explained_by(cause):
            self._judgement.note(describe_raised(error, step), cause)

    def _replay_together(
        self, looks: Looks, origin: Origin, reading: Reading, findings: Sequence[Finding]
    ) -> Cause | None:
        return replay_jointly(
            self._investigator,
            looks.captures,
            lambda meeting, is_suspect: self._replay(
                looks.captures, reading, findings, meeting=meeting, is_suspect=is_suspect, access=looks.access
            ),
            ranks=self._ranks,
            began_on=origin.ranks,
            device=self._device,
        )

    @property
    def _device(self) -> torch.device:
        return self._watched.trained.named[0][1].device

    def _replay(
        self, captures: Sequence[Capture], reading: Reading, findings: Sequence[Finding], **how: Any
    ) -> Cause | None:
        # In this order: first the replay's own changes are undone, then the buffers of the forward since return.
        with self._buffers.as_saved(), self._buffers.unchanged(), self._watched.own_gradients.looking_away():
            cause = self._investigator.investigate(captures, reading, findings, **how)
        given = self._watched.periodic_scans.given_nonfinite
        return cause if cause is None or given is None else self._investigator.add_since_when(cause, given)
