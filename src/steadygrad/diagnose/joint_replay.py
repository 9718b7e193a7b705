"""A bad step that no rank can replay alone -> one Cause, found by all ranks at once and the same on each.

Each rank replays its own batch and looks at its own ops; what it received from another rank, that one explains.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence

import torch

from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.diagnosis import unknown
from steadygrad.diagnose.investigator import Investigator
from steadygrad.diagnose.meeting import Meeting
from steadygrad.diagnose.unrepeated import HARDWARE
from steadygrad.facts import Cause
from steadygrad.measure.ranks import Ranks

Replay = Callable[[Meeting, bool], Cause | None]


def replay_jointly(
    investigator: Investigator,
    captures: Sequence[Capture],
    replay: Replay,
    *,
    ranks: Ranks,
    began_on: Sequence[int],
    device: torch.device,
) -> Cause | None:
    """Return the cause that one of the ranks found, those on which the step went bad first. Call it on every rank.

    `replay` gets the Meeting, and whether the step went bad on this rank.
    """
    # All ranks must make the same exchanges in the same order: the early return depends on what all have received.
    answers = ranks.gather((len(captures), investigator.find_obstacle(captures)))
    obstacle = next((why for _, why in answers if why), "")
    if obstacle or len({num for num, _ in answers}) > 1:
        return unknown(f"the ranks cannot replay it together: {obstacle or 'they have different microbatches'}")
    # Must not raise: the others wait in the next exchange.
    cause = replay(Meeting(ranks.gather), ranks.rank in began_on)
    causes: list[Cause | None] = ranks.gather(name_rank(cause, ranks, device))
    # The same list on every rank, so that all choose the same cause without another exchange.
    order = [*began_on, *(rank for rank in range(ranks.num) if rank not in began_on)]
    found = [cause for rank in order if (cause := causes[rank]) is not None]
    return next((cause for cause in found if cause.phase != "unknown"), found[0] if found else None)


def name_rank(cause: Cause | None, ranks: Ranks, device: torch.device) -> Cause | None:
    """Add the rank that replayed the step; and which machine, if the replay went well where the step did not."""
    if cause is None:
        return None
    place = f"Replayed on {ranks.name(ranks.rank)}."
    if HARDWARE in cause.note:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        place = f"Replayed on {ranks.name(ranks.rank)}, host {socket.gethostname()}, device {device} ({name})."
    return dataclasses.replace(cause, rank=ranks.rank, note=f"{place} {cause.note}".strip())
