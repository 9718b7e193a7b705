"""guard.find_lr: what it finds, and that it leaves no trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from steadygrad import AutoClip, FixedNorm, Guard, GuardConfig, Policy, RecordConfig
from steadygrad.errors import UsageError

SMALL: dict[str, Any] = {"start": 1e-5, "end": 10.0, "steps": 40}


class Training:
    """A small regression with everything a test could disturb: dropout, BatchNorm, moments, a schedule, an average."""

    def __init__(
        self, run_dir: Path | None = None, *, own_generator: bool = False, num_workers: int = 0, **settings: Any
    ):
        torch.manual_seed(3)
        random.seed(3)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        head, trunk = list(self.model[4].parameters()), list(self.model[:4].parameters())
        self.optimizer = torch.optim.AdamW([{"params": head}, {"params": trunk, "lr": 1e-3}], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.ema = AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(5) if own_generator else None
        data = TensorDataset(x, x.sum(1, keepdim=True))
        self.loader = DataLoader(data, 8, shuffle=True, generator=generator, num_workers=num_workers)
        self.guard = Guard(
            self.model,
            self.optimizer,
            config=GuardConfig(clip=AutoClip(), **settings),
            scheduler=self.scheduler,
            ema=self.ema,
            scaler=self.scaler,
            run_dir=run_dir,
        )
        self.losses: list[Tensor] = []

    def compute_loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        noise = random.random() * 1e-3
        loss = (self.model(x + noise) - y).square().mean()
        self.guard.log(noise=noise)
        return loss

    def train(self, after: dict[int, Callable[[Training], None]]) -> dict[str, Any]:
        for _ in range(2):
            for batch in self.guard.batches(self.loader):
                self.losses.append(self.guard.step(self.compute_loss, batch))
                after.get(self.guard.num_steps, lambda _: None)(self)
            self.guard.end_epoch()
        return self.describe()

    def describe(self) -> dict[str, Any]:
        """Return everything that could differ."""
        return {
            "losses": torch.stack(self.losses) if self.losses else torch.empty(0),
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "guard": self.guard.state_dict(),
            "random": (torch.get_rng_state(), random.getstate()),
            "modes": [module.training for module in self.model.modules()],
        }


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from flatten(item, f"{path}/{i}")
    else:
        yield path, value


def assert_same(one: Any, other: Any) -> None:
    a, b = dict(flatten(one)), dict(flatten(other))
    assert a.keys() == b.keys()
    for path, value in a.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, b[path]), path
        else:
            assert value == b[path] or (value != value and b[path] != b[path]), path


# --- no trace -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_training_with_range_tests_ends_like_one_without(
    tmp_path: Path, own_generator: bool, num_workers: int
) -> None:
    options: dict[str, Any] = {"own_generator": own_generator, "num_workers": num_workers}

    def look(training: Training) -> None:
        curve = training.guard.find_lr(training.compute_loss, training.loader, **SMALL)
        assert len(curve.points) > 10

    plain = Training(tmp_path / "a", **options).train({})
    tested = Training(tmp_path / "b", **options).train({3: look, 8: look})  # inside an epoch, and between two

    assert_same(plain, tested)


def test_nothing_has_changed_after_a_range_test_before_the_first_step() -> None:
    training = Training()
    training.model[1].eval()
    training.model[4].weight.grad = kept = torch.ones_like(training.model[4].weight)
    versions = [id(p) for p in training.model.parameters()]
    training.guard.find_lr(training.compute_loss, training.loader, **SMALL)
    after = training.describe()

    fresh = Training()
    fresh.model[1].eval()
    assert_same(fresh.describe(), after)
    assert training.optimizer.state == {}
    assert training.model[4].weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert [id(p) for p in training.model.parameters()] == versions


def test_an_error_in_the_users_function_also_leaves_the_training_unchanged() -> None:
    training = Training()
    before = training.describe()
    calls = 0

    def fails(batch: list[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ZeroDivisionError("the user's own")
        return training.compute_loss(batch)

    snapshot = {name: value.clone() for name, value in training.model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        training.guard.find_lr(fails, training.loader, **SMALL)
    assert_same(snapshot, training.model.state_dict())
    assert_same(before["random"], (torch.get_rng_state(), random.getstate()))
    training.guard.step(training.compute_loss, next(iter(training.loader)))


def test_the_record_has_one_line_about_a_range_test(tmp_path: Path) -> None:
    training = Training(tmp_path, record=RecordConfig(layers_every=1))
    training.guard.step(training.compute_loss, next(iter(training.loader)))
    curve = training.guard.find_lr(training.compute_loss, training.loader, **SMALL)
    training.guard.close()

    steps, layers, incidents = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("steps.jsonl", "layers.jsonl", "incidents.jsonl")
    )
    assert [row["step"] for row in steps] == [0]
    assert [row["step"] for row in layers] == [0]
    (line,) = incidents
    assert line["finding"]["kind"] == "learning_rate_test"
    assert line["finding"]["severity"] == "info"
    assert line["finding"]["evidence"]["suggested"] == curve.suggested
    assert [line for line in (tmp_path / "train.log").read_text().splitlines() if "step=0" not in line] == [
        line for line in (tmp_path / "train.log").read_text().splitlines() if "learning_rate_test" in line
    ]
    assert training.guard.incidents == []


def test_values_logged_in_a_range_test_are_not_in_the_next_record() -> None:
    training = Training()
    batch = next(iter(training.loader))
    training.guard.find_lr(training.compute_loss, training.loader, **SMALL)
    random.seed(1)
    expected = random.random() * 1e-3
    random.seed(1)
    training.guard.step(training.compute_loss, batch)
    assert training.guard.last is not None
    assert training.guard.last.extra == {"noise": expected}


# --- what it finds --------------------------------------------------------------------------------------------------


def quadratic(curvature: float = 50.0) -> tuple[Guard, Callable[[Any], Tensor], list[Tensor]]:
    """Plain gradient descent on a parabola: it diverges above a rate of 2 / curvature."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), config=GuardConfig(clip=None))
    return guard, lambda x: 0.5 * curvature * (model.weight - x).square().sum(), [torch.zeros(8)] * 3


def test_the_limit_on_a_parabola_is_the_analytic_one() -> None:
    guard, fn, batches = quadratic()
    curve = guard.find_lr(fn, batches, start=1e-5, end=10.0, steps=200)

    assert curve.edge is not None
    assert 2 / 50 < curve.edge < 1.0
    assert curve.suggested < 2 / 50
    assert curve.suggested <= curve.largest_quiet < curve.edge
    assert curve.steepest is not None
    assert "loss" in curve.why_ended
    assert len(curve.points) < 200, "a rate that failed is not tried again"


def test_a_rate_that_gives_nan_is_the_limit_and_a_finding() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), config=GuardConfig(clip=None))
    curve = guard.find_lr(
        lambda x: model(x).exp().square().sum() + model(x).square().sum(), [torch.ones(4, 4)], **SMALL
    )

    assert curve.edge is not None
    assert curve.suggested < curve.edge / 3
    assert all(p.rate < curve.edge for p in curve.points[:-1])


def test_bad_data_is_not_attributed_to_the_rate() -> None:
    guard, fn, _ = quadratic()
    bad = torch.full((8,), math.nan)
    curve = guard.find_lr(fn, [torch.zeros(8), bad, torch.zeros(8)], start=1e-5, end=1e-3, steps=20)

    assert curve.edge is None
    assert len(curve.points) == 20


def test_a_loss_that_never_falls_keeps_the_rate() -> None:
    model = nn.Linear(3, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.02))
    curve = guard.find_lr(lambda x: (model(x) * 0).sum() + 1.0, [torch.ones(2, 3)], start=1e-3, end=1.0, steps=20)

    assert curve.steepest is None
    assert curve.suggested == 0.02
    assert "stays as it is" in curve.reason


def test_groups_keep_their_ratios_and_the_rate_is_the_highest() -> None:
    training = Training()
    seen: list[tuple[float, float]] = []

    def fn(batch: list[Tensor]) -> Tensor:
        seen.append((training.optimizer.param_groups[0]["lr"], training.optimizer.param_groups[1]["lr"]))
        return training.compute_loss(batch)

    curve = training.guard.find_lr(fn, training.loader, **SMALL)
    assert curve.base_rate == 1e-2
    assert [rates[0] for rates in seen] == pytest.approx([p.rate for p in curve.points])
    assert [low / high for high, low in seen] == pytest.approx([0.1] * len(seen))


def test_several_microbatches_make_up_one_step() -> None:
    training = Training()
    num_calls = 0

    def fn(batch: list[Tensor]) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return training.compute_loss(batch) / 2

    curve = training.guard.find_lr(fn, training.loader, microbatches=2, **SMALL)
    assert num_calls == 2 * len(curve.points)


def test_a_policy_that_halts_does_not_end_the_range_test() -> None:
    training = Training(policy=Policy(halt_at="warning"))
    curve = training.guard.find_lr(training.compute_loss, training.loader, start=1e-3, end=1e4, steps=60)
    assert curve.edge is not None or len(curve.points) == 60


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_curve_can_be_drawn(tmp_path: Path, ending: str) -> None:
    guard, fn, batches = quadratic()
    path = guard.find_lr(fn, batches, **SMALL).plot(tmp_path / f"rates.{ending}")
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


# --- wrong use ------------------------------------------------------------------------------------------------------


def test_wrong_use_gets_an_error_with_advice() -> None:
    guard, fn, batches = quadratic()
    for arguments, words in (
        ({"loader": iter(batches)}, "drawn only once.*Give the loader itself"),
        ({"loader": []}, "no batch.*Pass one with data"),
        ({"start": 1.0, "end": 0.1}, "start=1 and end=0.1.*Give 0 < start < end"),
        ({"steps": 3}, "steps=3.*Give at least 10"),
        ({"steps": 12}, "multiply the rate by .* Give at least 28 steps"),
        ({"microbatches": 0}, "microbatches=0.*1 or more"),
    ):
        given = {"loader": batches, **arguments}
        with pytest.raises(UsageError, match=f"(?s){words}"):
            guard.find_lr(fn, given.pop("loader"), **given)


def test_during_an_accumulation_it_is_refused() -> None:
    guard, fn, batches = quadratic()
    guard.backward(fn, batches[0])
    with pytest.raises(UsageError, match="1 microbatches of a step under way"):
        guard.find_lr(fn, batches)


def test_a_disabled_guard_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    guard, fn, batches = quadratic()
    with pytest.raises(UsageError, match="STEADYGRAD=off"):
        guard.find_lr(fn, batches)


def test_the_guards_own_clip_threshold_is_used() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    config = GuardConfig(clip=FixedNorm(max_norm=1e-3))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), config=config)
    curve = guard.find_lr(lambda x: (model(x) - 3).square().mean(), [torch.ones(4, 4)], **SMALL)
    assert all(point.clipped for point in curve.points[:5])
