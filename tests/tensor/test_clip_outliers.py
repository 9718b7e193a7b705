"""OutlierClip: norms usual for the run are not clipped at any distance from the median; unusual ones are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from steadygrad import Guard, GuardConfig, OutlierClip
from steadygrad.clip.outliers import NO_LIMIT, OutlierClipper


def find_clipped(norms: Sequence[float], clipper: OutlierClipper | None = None) -> list[int]:
    """Return the clipped steps of a run with these norms."""
    clipper = OutlierClipper(OutlierClip()) if clipper is None else clipper
    clipped = []
    for step, norm in enumerate(norms):
        clipper.prepare(step)
        assert clipper.constant_norm is not None
        if clipper.constant_norm / (norm + 1e-6) < 1.0:  # as the kernels do
            clipped.append(step)
        clipper.hear(step, norm)
    return clipped


def swing(step: int) -> float:
    """Noise between a fifth and five, as in norms of single episodes."""
    return 5.0 ** math.sin(1.7 * step)


STEADY = [1.0 + 0.3 * math.sin(step) for step in range(200)]


def test_spikes_are_clipped_one_after_the_other() -> None:
    spikes = range(100, 180, 8)
    assert find_clipped([300.0 if step in spikes else norm for step, norm in enumerate(STEADY)]) == list(spikes)


def test_tiny_norms_are_not_outliers() -> None:
    assert find_clipped([1e-12 * norm for norm in STEADY]) == []


def test_norms_growing_with_the_episodes_are_not_outliers() -> None:
    """An actor-critic: 4 for 150 episodes of ten moves, then 400 within another sixty, swinging all the time."""
    norms = [4.0 * swing(step) * 100.0 ** min(1.0, max(0.0, (step - 150) / 60)) for step in range(300)]
    assert max(norms) > 100 * sorted(norms[:150])[75]
    assert find_clipped(norms) == []


def test_a_lasting_level_becomes_usual() -> None:
    clipped = find_clipped([*STEADY, *(1000.0 * norm for norm in STEADY)])
    assert clipped == list(range(200, 200 + len(clipped)))
    assert 32 <= len(clipped) <= 34


def test_the_norms_of_the_first_steps_stay_usual() -> None:
    """Most samples are learnt and their norms fall to almost nothing; a rare one has the norm that all had at first."""
    norms = [max(0.002, math.exp(-step / 40)) * (1 + 0.3 * math.sin(step)) for step in range(600)]
    assert find_clipped([2.0 if step % 97 == 96 else norm for step, norm in enumerate(norms)]) == []


def test_rare_events_are_learnt_as_without_a_guard() -> None:
    """One sample a step, and one in forty is positive: its norm is hundreds of times that of the others by then."""

    def train(config: GuardConfig | None) -> tuple[nn.Module, Guard | None]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer, direction = torch.optim.Adam(model.parameters(), 1e-3), torch.randn(10)
        guard = None if config is None else Guard(model, optimizer, config=config)
        for _ in range(3000):
            x = torch.randn(1, 10)
            y = (x @ direction > 7.5).float()
            loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)
            if guard is not None:
                guard.step(loss)
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model, guard

    plain, _ = train(None)
    guarded, guard = train(GuardConfig())
    assert guard is not None
    assert guard.stats()["num_clipped"] == 0
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), guarded.parameters()))


def test_nothing_is_clipped_before_enough_norms_are_known() -> None:
    clipper = OutlierClipper(OutlierClip(warmup=32))
    assert find_clipped([1.0, 1e6] * 16, clipper) == []
    assert clipper.constant_norm == NO_LIMIT


def test_a_loaded_clipper_clips_like_the_saved_one() -> None:
    norms = [*STEADY[:150], *(500.0 for _ in range(20))]
    saved = OutlierClipper(OutlierClip())
    find_clipped(norms, saved)
    loaded = OutlierClipper(OutlierClip())
    loaded.load_state_dict(saved.state_dict())
    for clipper in (saved, loaded):
        for step in range(170, 185):
            clipper.prepare(step)
            clipper.hear(step, 500.0)
    assert loaded.constant_norm == saved.constant_norm
    assert loaded.state_dict() == saved.state_dict()
