"""When scans are made, and what those of the first steps queue: no step waits for the device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad import DetectConfig, Guard, GuardConfig, MeasureConfig
from steadygrad.measure.equal_units import EqualUnits
from steadygrad.measure.leaks import NUM_FIRST, LeakWatch
from steadygrad.measure.loss_graph import look_at_loss
from steadygrad.measure.loss_targets import find_loss_targets


class CountReads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_looking_for_a_label_among_the_inputs_waits_for_nothing() -> None:
    model, watch = nn.Linear(5, 2), LeakWatch()
    for step in range(NUM_FIRST):
        x, y = torch.randn(64, 5), torch.randint(2, (64,))
        loss = F.cross_entropy(model(x), y)
        labels = look_at_loss(loss).labels
        with CountReads() as reads:
            watch.note(step, loss, labels, (x,), {})
        assert reads.num == 0
    assert watch.has_news


def test_looking_at_targets_waits_for_nothing() -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.ReLU())
    loss = F.mse_loss(model(torch.randn(64, 5)), torch.randn(64, 1))
    with CountReads() as reads:
        assert len(list(find_loss_targets(loss))) == 1
    assert reads.num == 0


class Calendar:
    """A custom rule that only records which facts come from which steps."""

    name = "calendar"

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = defaultdict(list)

    def observe(self, fact: Any) -> Iterable[Any]:
        self.steps[type(fact).__name__].append(fact.step)
        if getattr(fact, "adam_rms", None):
            self.steps["adam_rms"].append(fact.step)
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("every", "rms", "weights"),
    [(100, [96, 196], [-1, 7, 92, 192]), (24, [24, 48], [-1, 7, 24, 48])],
    ids=["apart in long periods", "together in short ones"],
)
def test_the_parts_of_a_scan_are_steps_apart(every: int, rms: list[int], weights: list[int]) -> None:
    calendar, model = Calendar(), nn.Linear(4, 2)
    config = GuardConfig(measure=MeasureConfig(scan_every=every), detect=DetectConfig(rules=(calendar,)))
    with Guard(model, torch.optim.Adam(model.parameters()), config=config) as guard:
        for _ in range(2 * every + 2):
            guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))

    assert calendar.steps["InputScan"] == calendar.steps["ActivationScan"] == [every, 2 * every]
    assert calendar.steps["adam_rms"] == rms
    assert calendar.steps["ParameterScan"] == weights


def test_a_layer_is_of_equal_units_only_if_all_its_rows_are() -> None:
    model = nn.Sequential(nn.Linear(100, 8), nn.Linear(100, 8), nn.Linear(100, 8), nn.Linear(100, 8))
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[1].weight[:4, :64] = 0.1  # the sample alone
        model[2].weight.zero_()  # comes apart with the first gradient
    units = EqualUnits(model, model.parameters())

    units.begin()
    with torch.no_grad():
        for layer in model:
            layer.weight += torch.linspace(1, 2, 100)

    assert units.find() == units.find() == ("0.weight",)


class Seen(TorchFunctionMode):
    """Notes the names of the calls that are made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_sees_the_programs_calls_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.rand(2, 3, 16, 16))
    guard, seen, images = Guard(model, torch.optim.SGD(model.parameters(), 0.1)), Seen(), torch.rand(2, 3, 16, 16)

    def find_loss(images: Tensor) -> Tensor:
        with seen:
            return model(images).square().mean()

    with torch.no_grad():
        find_loss(images)
    plain, seen.names = seen.names, Counter()
    assert plain["conv2d"] == plain["square"] == 1
    for _ in range(5):  # what is looked at in the first steps
        guard.step(find_loss, images)
        assert seen.names == plain
        seen.names.clear()
