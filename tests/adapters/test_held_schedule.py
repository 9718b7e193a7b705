"""HeldSchedule: a move of the learning rate waits until its own step is judged, and for no other."""

from __future__ import annotations

from dataclasses import dataclass, field

from steadygrad import StepRecord
from steadygrad.adapters.lightning import HeldSchedule


@dataclass
class LateGuard:
    """Judges a step on request, like a Guard with fused optimizers on CUDA: `step()` returns before `last` is set."""

    schedule: HeldSchedule
    last: StepRecord | None = None
    is_judged: bool = True
    moves: list[int] = field(default_factory=list)

    def make_step(self, number: int) -> None:
        self.is_judged = False
        self.schedule.ask(lambda: self.moves.append(number))

    def judge(self, number: int, *, skipped: bool) -> None:
        if not skipped:
            self.schedule.step()
        self.last, self.is_judged = make_record(number, skipped=skipped), True


def make_record(number: int, *, skipped: bool) -> StepRecord:
    return StepRecord(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        clip_coefficient=1.0,
        clipped=False,
        skipped=skipped,
        num_nonfinite=0,
        learning_rates=(0.1,),
        loss_scale=None,
        num_microbatches=1,
        num_dropped_microbatches=0,
        time_seconds=0.0,
    )


def make_guard() -> LateGuard:
    guard = LateGuard(HeldSchedule())
    guard.schedule.follow(guard)  # type: ignore[arg-type]
    return guard


def test_a_move_waits_until_its_step_is_judged() -> None:
    guard = make_guard()
    guard.make_step(0)
    assert guard.moves == []
    guard.judge(0, skipped=False)
    assert guard.moves == [0]


def test_a_skipped_step_never_moves_the_rate() -> None:
    guard = make_guard()
    guard.make_step(0)
    guard.judge(0, skipped=True)
    guard.make_step(1)
    guard.judge(1, skipped=False)
    assert guard.moves == [1]


def test_a_step_judged_at_once_moves_at_once_or_not_at_all() -> None:
    guard = make_guard()
    guard.judge(0, skipped=False)
    guard.schedule.ask(lambda: guard.moves.append(0))
    guard.judge(1, skipped=True)
    guard.schedule.ask(lambda: guard.moves.append(1))
    assert guard.moves == [0]
