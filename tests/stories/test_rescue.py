"""Real trainings that go wrong: unguarded they die or end far worse, guarded they end as if nothing had happened."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import make_damage_stories
from torch import nn
from torch.optim.swa_utils import AveragedModel
from trainings import (
    Recurrent,
    Run,
    Training,
    make_cnn,
    make_far_too_high_story,
    make_rate_stories,
    make_slow_story,
    make_stories,
    train_guarded,
    train_images,
    train_language,
    train_memory,
    train_plain,
)

from steadygrad import Action, FixedNorm, Guard, GuardConfig, Severity

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")

STORIES = {story.name: story for story in make_stories()}
CLIPS: dict[str, FixedNorm | None] = {"clipped": FixedNorm(max_norm=1.0), "unclipped": None}
TOLERANCE = 1.05
RATE_TOLERANCE = 1.1
"""A rate that is too high from the start is lowered to about the right one, not exactly to it."""


def clip_of(clip: FixedNorm | None) -> Callable[[nn.Module], Any] | None:
    """Return the same clipping for a plain loop."""
    return None if clip is None else lambda model: nn.utils.clip_grad_norm_(model.parameters(), clip.max_norm)


CLEAN: dict[tuple[int, bool], Run] = {}


def run_clean(training: Training, *, clipped: bool) -> Run:
    """Return the plain run without a fault; all stories of one training share it."""
    key = (id(training), clipped)
    if key not in CLEAN:
        CLEAN[key] = train_plain(training, clip=clip_of(CLIPS["clipped"] if clipped else None))
    return CLEAN[key]


@functools.cache
def run_unguarded(name: str) -> Run:
    return STORIES[name].train_plain()


@pytest.fixture(scope="module")
def run_guarded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Run, Path]]:
    """Return the story on a guard, once with each clipping, and its run directory."""

    @functools.cache
    def run(name: str, clip: str) -> tuple[Run, Path]:
        run_dir = tmp_path_factory.mktemp("guarded") / "run"
        guarded = STORIES[name].train_guarded(clip=CLIPS[clip], run_dir=run_dir)
        assert guarded.guard is not None
        guarded.guard.close()
        return guarded, run_dir

    return run


def read_incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


# Clipping does not matter for a damaged weight or a skipped step: the NaN batch is enough.
BOTH = ("NaN batch", "learning rate jumps, SGD", "learning rate jumps, AdamW", "RNN explodes")
CASES = [(name, clip) for name in STORIES for clip in CLIPS if name in BOTH or clip == "unclipped"]


@pytest.mark.parametrize(("name", "clip"), CASES, ids=map(", ".join, CASES))
def test_a_guard_saves_the_run_and_reports_what_happened(name: str, clip: str, run_guarded: Any) -> None:
    story = STORIES[name]
    clean = run_clean(story.clean, clipped=clip == "clipped")
    unguarded = run_unguarded(name)
    guarded, run_dir = run_guarded(name, clip)

    assert clean.loss < 0.4 * story.clean.guessing
    assert unguarded.died or unguarded.loss > 1.5 * clean.loss
    assert not guarded.died
    assert guarded.halted is None
    assert guarded.loss < TOLERANCE * clean.loss

    incidents = guarded.guard.incidents
    assert {f.kind for i in incidents for f in i.findings} >= story.finds
    assert {i.outcome.action for i in incidents} - {Action.NONE, Action.CLIP} == story.does
    written = read_incidents(run_dir)
    assert [(i["step"], i["finding"]["kind"], i["outcome"]["action"]) for i in written] == [
        (i.step, i.finding.kind, i.outcome.action.value) for i in incidents
    ]


@pytest.mark.parametrize("name", ["NaN batch", "weight becomes NaN", "learning rate jumps, AdamW"])
def test_clipping_alone_does_not_save_it(name: str) -> None:
    story = STORIES[name]
    clean, clipped = run_clean(story.clean, clipped=True), story.train_plain(clip_of(CLIPS["clipped"]))
    assert clipped.died or clipped.loss > 1.5 * clean.loss


def test_a_poisoned_sample_is_skipped_each_time_and_its_batch_named(run_guarded: Any) -> None:
    guard = run_guarded("poisoned sample in each epoch", "unclipped")[0].guard
    skipped = {i.step for i in guard.incidents if i.outcome.action is Action.SKIP}
    assert sorted(step // 40 for step in skipped) == list(range(6))  # 40 batches an epoch, once in each
    assert guard.stats()["num_skipped"] == 6
    (often,) = [f for f in guard.findings if f.kind == "frequent_actions"]
    assert often.step == sorted(skipped)[4]  # five skips, not five findings


RATES = {story.name: story for story in make_rate_stories()}
# Each training and each clipping, but not all pairs.
PAIRS = [("SGD", "unclipped"), ("AdamW", "clipped"), ("CNN", "unclipped"), ("RNN", "clipped")]


@pytest.mark.parametrize(("name", "clip"), [(f"learning rate 30x, {name}", clip) for name, clip in PAIRS])
def test_a_learning_rate_30_times_too_high_is_found_and_lowered_at_the_start(name: str, clip: str) -> None:
    story = RATES[name]
    clean = run_clean(story.clean, clipped=clip == "clipped")
    unguarded = story.train_plain(clip_of(CLIPS[clip]))
    assert clean.loss < 0.4 * story.clean.guessing
    assert unguarded.died or unguarded.loss > 1.5 * clean.loss

    guarded = story.train_guarded(clip=CLIPS[clip])

    assert guarded.halted is None
    assert guarded.loss < RATE_TOLERANCE * clean.loss
    assert guarded.guard is not None
    found = [i for i in guarded.guard.incidents if i.finding.kind == "rate_too_high"]
    assert [i.outcome.action for i in found] == [Action.ROLLBACK]
    assert found[0].finding.acted_at is not None
    assert found[0].finding.acted_at <= 40
    assert found[0].outcome.after["step"] == 0
    assert found[0].outcome.after["lr"] == pytest.approx(
        found[0].outcome.before["lr"] * (guarded.guard.stats()["learning_rate_factor"] or 0.0)
    )


def test_a_lowered_rate_continues_like_a_run_that_always_had_it_bit_for_bit() -> None:
    """None of the first forty batches is lost: the run equals one with the lower rate from the first step on."""
    story = RATES["learning rate 30x, CNN"]
    training = dataclasses.replace(story.faulty, make_model=functools.partial(make_cnn, dropout=0.3))
    model, optimizer = begin(training, factor=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ema = AveragedModel(model)
    fn, reached = functools.partial(training.loss, model), []
    config = GuardConfig(
        clip=None, on_incident=lambda _: reached.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    )
    guard = Guard(model, optimizer, config=config, scheduler=scheduler, ema=ema)
    for batch in training.batches[:40]:
        guard.step(fn, batch)

    (incident,) = guard.incidents
    assert incident.outcome.action is Action.ROLLBACK
    assert (incident.outcome.after["step"], incident.outcome.after["num_steps_made_again"]) == (0, 40)
    assert "repeated 40 of these steps from there" in incident.outcome.message
    plain, plain_optimizer = begin(training, factor=guard.stats()["learning_rate_factor"] or 0.0)
    for batch in training.batches[:40]:
        training.loss(plain, batch).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    ((weights, state),) = reached
    for name, value in plain.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for key, value in plain_optimizer.state_dict()["state"].items():
        assert torch.equal(value["momentum_buffer"], state["state"][key]["momentum_buffer"]), key
    assert state["param_groups"][0]["lr"] == 1.5  # the user's number; the factor only applies during a step
    assert scheduler.last_epoch == 40
    assert ema.n_averaged == 0  # the average was over weights trained with too high a rate


def begin(training: Training, *, factor: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of a training, at a share of its rate."""
    torch.manual_seed(training.seed)
    model = training.make_model().train()
    optimizer = training.make_optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return model, optimizer


def test_a_learning_rate_far_beyond_that_is_lowered_repeatedly() -> None:
    story = make_far_too_high_story()
    clean = run_clean(story.clean, clipped=False)
    assert clean.loss < 0.2 * story.clean.guessing
    assert story.train_plain().died

    guarded = story.train_guarded(clip=None)

    assert guarded.halted is None
    assert guarded.loss < RATE_TOLERANCE * clean.loss
    assert guarded.guard is not None
    assert {f.kind for i in guarded.guard.incidents for f in i.findings} >= story.finds
    assert {i.outcome.action for i in guarded.guard.incidents} - {Action.NONE, Action.CLIP} == story.does


def test_a_learning_rate_that_no_attempt_corrects_halts_with_a_report() -> None:
    story = make_far_too_high_story(factor=1e6)

    guarded = story.train_guarded(clip=None)

    assert guarded.halted is not None
    assert not guarded.died
    actions = [i.outcome.action for i in guarded.halted.incidents if i.finding.kind == "rate_too_high"]
    assert actions == [Action.ROLLBACK] * 3 + [Action.HALT]
    assert "3 times in 1000 steps a lower learning rate has not helped" in str(guarded.halted)


def test_an_rnn_that_starts_unstable_is_named_and_clipping_saves_it() -> None:
    # All of its steps: after half of them the guarded loss is 1.13 to 1.27 times the clean one, by the processor.
    story = make_slow_story()
    clean = run_clean(story.clean, clipped=True)
    assert story.train_plain().loss > 1.5 * clean.loss

    guarded = story.train_guarded(clip=CLIPS["clipped"])

    assert guarded.loss < RATE_TOLERANCE * clean.loss
    assert guarded.guard is not None
    assert {f.kind for f in guarded.guard.findings} >= story.finds
    assert min(f.step for f in guarded.guard.findings if f.kind == "exploding_gradient") == 0
    assert {i.outcome.action for i in guarded.guard.incidents} <= {Action.NONE, Action.CLIP}


# --- damage that stays finite -----------------------------------------------------------------------------------------

DAMAGE = {story.name: story for change in (False, True) for story in make_damage_stories(with_data_change=change)}
# One for each way of finding damage; benchmarks/finite_damage.py runs them all.
FOUND_BY = {
    "rate x 30 for 40 steps, AdamW": "the second look, once the rate is back",
    "embedding rows permuted": "a spike that damages the weights for good",
    "BatchNorm scales x 20": "a jump that stays",
    "second moment x 1e-8, ten steps": "the same, where the loss is too rugged to have a slope",
    "attention matrices x 20, new data": "the same steps made again from earlier weights",
}


@pytest.mark.parametrize("name", FOUND_BY)
def test_finite_damage_is_proven_and_undone_by_the_defaults(name: str) -> None:
    story = DAMAGE[name]
    clean = run_clean(story.clean, clipped=False)
    assert story.train_plain().loss > 1.5 * clean.loss

    guarded = story.train_guarded(clip=GuardConfig().clip)

    assert guarded.loss < 1.12 * clean.loss
    assert guarded.guard is not None
    (back,) = [i for i in guarded.guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert back.finding.evidence["proof"] == "damaged"


# --- healthy controls ------------------------------------------------------------------------------------------------


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))


def restart(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=80)


def start_far_off() -> nn.Module:
    """The first norm is in the hundreds, as in many real runs."""
    model = Recurrent()
    with torch.no_grad():
        model.head.weight *= 30.0
    return model


HEALTHY: dict[str, Training] = {
    "transformer, warm-up": train_language(250, make_scheduler=warm_up),
    "transformer, rate 3x": train_language(250, make_optimizer=lambda p: torch.optim.AdamW(p, lr=9e-3)),
    "cnn": train_images(),
    "cnn, dropout, restarts": train_images(make_model=functools.partial(make_cnn, dropout=0.3), make_scheduler=restart),
    "rnn, first norm of hundreds": train_memory(make_model=start_far_off),
    "rnn, rate 10x": train_memory(make_optimizer=lambda p: torch.optim.Adam(p, lr=1e-2)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_bit_identical_and_gets_no_finding(name: str) -> None:
    training = HEALTHY[name]
    plain = run_clean(training, clipped=False)
    guarded = train_guarded(training, GuardConfig(clip=FixedNorm(max_norm=1e9)))
    assert guarded.guard is not None

    for key, value in plain.model.state_dict().items():
        assert torch.equal(value, guarded.model.state_dict()[key]), key
    assert [f for f in guarded.guard.findings if f.severity is not Severity.INFO] == []
    assert guarded.guard.incidents == []
    assert plain.loss < 0.5 * training.guessing
    if name == "rnn, first norm of hundreds":
        assert 100.0 < max(guarded.guard.stats()["max_gradient_norm"] or 0.0, 0.0) < math.inf
