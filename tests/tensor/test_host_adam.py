"""Small models on the CPU: Adam with fewer calls equals torch's bit for bit, and falls back when it must."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import adam as torchs
from torch.optim import optimizer as optimizers

from steadygrad import Guard
from steadygrad.act import host_adam
from steadygrad.act.host_adam import HostAdam

NUM_STEPS = 12


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 33), nn.BatchNorm1d(33), nn.Linear(33, 1))


def fill_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 5 - 3)


def list_state(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]


@pytest.fixture
def torchs_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of parameters of each call of torch's own Adam."""
    calls: list[int] = []
    own = torchs.adam

    def listen(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(params))
        own(params, *args, **kwargs)

    monkeypatch.setattr(torchs, "adam", listen)
    return calls


class Pair:
    """The same training twice: with torch alone, and with a HostAdam."""

    def __init__(self, make: Callable[[nn.Module], Any], make_model: Callable[[], nn.Module] = make_model) -> None:
        self.models = make_model(), make_model()
        self.optimizers = tuple(make(model) for model in self.models)
        self.quick = HostAdam(self.optimizers[1])

    def step(self, step: int) -> None:
        for model in self.models:
            fill_gradients(model, step)
        self.optimizers[0].step()
        self.quick.step(self.optimizers[1].step)

    def assert_equal(self) -> None:
        ours, expected = (list_state(m, o) for m, o in zip(self.models, self.optimizers, strict=True))
        assert len(ours) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0},
    {"betas": (0.5, 0.9), "eps": 1e-4},
    {"lr": 0.3},
    {"foreach": True},
    {"foreach": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_weights_moments_and_counters_equal_torchs_bit_for_bit(
    kind: Any, settings: dict[str, Any], torchs_calls: list[int]
) -> None:
    pair = Pair(lambda model: kind(model.parameters(), **settings))
    for step in range(NUM_STEPS):
        pair.step(step)
        pair.assert_equal()
    # The first step creates the moments, the second is compared.
    assert len(torchs_calls) == NUM_STEPS + 2


def test_each_group_has_its_own_settings(torchs_calls: list[int]) -> None:
    def make(model: Any) -> Any:
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": [*model[2].parameters(), *model[3].parameters()], "weight_decay": 0.3},
            {"params": model[4].parameters(), "betas": (0.8, 0.99)},
        ]
        return torch.optim.AdamW(groups)

    pair = Pair(make)
    for step in range(NUM_STEPS):
        pair.step(step)
    pair.assert_equal()
    assert len(torchs_calls) == 3 * (NUM_STEPS + 2)


@pytest.mark.parametrize(
    "settings",
    [{"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(0.01)}, {"fused": True}],
    ids=repr,
)
def test_other_variants_of_adam_use_torchs_step(settings: dict[str, Any], torchs_calls: list[int]) -> None:
    pair = Pair(lambda model: torch.optim.AdamW(model.parameters(), **settings))
    for step in range(4):
        pair.step(step)
    pair.assert_equal()
    assert len(torchs_calls) == 8


def test_a_missing_gradient_and_different_step_counts_use_torchs_step(torchs_calls: list[int]) -> None:
    pair = Pair(lambda model: torch.optim.AdamW(model.parameters()))
    for step in range(4):
        pair.step(step)
    for model in pair.models:
        fill_gradients(model, 4)
        next(model.parameters()).grad = None
    del torchs_calls[:]
    pair.optimizers[0].step()
    pair.quick.step(pair.optimizers[1].step)
    assert len(torchs_calls) == 2
    for step in range(5, 8):  # one parameter is now a step behind
        pair.step(step)
    pair.assert_equal()
    assert len(torchs_calls) == 8


def test_weights_that_share_memory_are_updated_one_after_the_other(torchs_calls: list[int]) -> None:
    def make() -> nn.Module:
        model = make_model()
        twin = nn.Parameter(torch.empty(33, 7))
        twin.data = model[0].weight.data  # type: ignore[index, union-attr]
        model.register_parameter("twin", twin)
        return model

    pair = Pair(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3), make)
    for step in range(5):
        pair.step(step)
        pair.assert_equal()
    assert len(torchs_calls) == 10, "the copies of the comparison share nothing, so it fails"


def test_moved_weights_are_compared_again(torchs_calls: list[int]) -> None:
    pair = Pair(lambda model: torch.optim.AdamW(model.parameters()))
    for step in range(4):
        pair.step(step)
    for model in pair.models:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    del torchs_calls[:]
    for step in range(4, 8):
        pair.step(step)
    pair.assert_equal()
    assert len(torchs_calls) == 5


def test_a_torch_with_a_different_adam_uses_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torchs._single_tensor_adam

    def compute_otherwise(*args: Any, eps: float, **kwargs: Any) -> None:
        own(*args, eps=eps * 2.0, **kwargs)

    monkeypatch.setattr(torchs, "_single_tensor_adam", compute_otherwise)
    pair = Pair(lambda model: torch.optim.AdamW(model.parameters(), eps=1e-3, foreach=False))
    for step in range(NUM_STEPS):
        pair.step(step)
    pair.assert_equal()


def make_large_model() -> nn.Module:
    """One tensor larger than a batch, some of more than half a batch, and many small ones."""
    torch.manual_seed(0)
    wide = nn.Conv2d(300, 300, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(wide, *(nn.Linear(400, 401) for _ in range(3)), *(nn.Linear(30, 33) for _ in range(40)))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}], ids=repr)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_large_model_is_updated_in_batches_to_the_same_bits(
    kind: Any, settings: dict[str, Any], num_threads: int, torchs_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def listen(lists: Any) -> None:
        batches.append(sum(p.numel() for p in lists.params))
        update(lists)

    update = host_adam._update
    monkeypatch.setattr(host_adam, "_update", listen)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        pair = Pair(lambda model: kind(model.parameters(), **settings), make_large_model)
        for step in range(4):
            pair.step(step)
            pair.assert_equal()
    finally:
        torch.set_num_threads(before)
    assert len(torchs_calls) == 4 + 2
    # The compared sample, then two steps: the convolution, its bias with a linear layer, the next one, the rest.
    assert len(batches) == 1 + 2 * 4
    assert sum(batches[1:]) == 2 * sum(p.numel() for p in pair.models[0].parameters())


def test_weights_that_share_their_last_elements_use_torchs_step(torchs_calls: list[int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        shared, model = torch.randn(400, 500), nn.Module()
        # From its 251st row on, the second reaches into the first: behind the elements that are compared.
        model.first = nn.Parameter(shared[:, :100])
        model.second = nn.Parameter(shared.as_strided((300, 100), (499, 1), 350))
        return model

    pair = Pair(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3), make)
    for step in range(5):
        pair.step(step)
        pair.assert_equal()
    assert len(torchs_calls) == 10, "the samples are equal, but the tensors overlap behind them"


def test_an_unreadable_state_uses_torchs_step(torchs_calls: list[int]) -> None:
    pair = Pair(lambda model: torch.optim.AdamW(model.parameters()))
    for step in range(3):
        pair.step(step)
    for optimizer in pair.optimizers:
        for state in optimizer.state.values():
            state["step"] = int(state["step"])
    del torchs_calls[:]
    for model in pair.models:
        fill_gradients(model, 3)
    with pytest.raises(RuntimeError, match="singleton tensors"):  # the error is torch's
        pair.optimizers[0].step()
    with pytest.raises(RuntimeError, match="singleton tensors"):
        pair.quick.step(pair.optimizers[1].step)
    assert len(torchs_calls) == 2


# --- hooks of the program on its optimizer ----------------------------------------------------------------------------


def run_guarded(attach: Callable[[Any, list[str]], Any], num_steps: int = 5) -> list[str]:
    """Return what was called in steps of a Guard, beginning with the fourth."""
    model, heard = make_model(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters())
    with Guard(model, optimizer) as guard:
        batch = torch.randn(16, 7)
        for step in range(3 + num_steps):
            if step == 3:
                handle = attach(optimizer, heard)
            guard.step(lambda x: model(x).square().mean(), batch)
        if hasattr(handle, "remove"):
            handle.remove()
    return heard


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_on_the_step_are_called(when: str, is_global: bool) -> None:
    def attach(optimizer: Any, heard: list[str]) -> Any:
        def hook(*_: Any) -> None:
            heard.append(when)

        if is_global:
            return getattr(optimizers, f"register_optimizer_step_{when}_hook")(hook)
        return getattr(optimizer, f"register_step_{when}_hook")(hook)

    assert run_guarded(attach) == [when] * 5


def test_a_replaced_step_method_is_called() -> None:
    def attach(optimizer: Any, heard: list[str]) -> None:
        own = optimizer.step

        def step() -> None:
            heard.append("called")
            own()

        optimizer.step = step

    assert run_guarded(attach) == ["called"] * 5


def test_a_profile_includes_the_optimizers_step() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Guard(model, optimizer) as guard:
        for _ in range(4):
            guard.step(lambda x: model(x).square().mean(), torch.randn(16, 7))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            guard.step(lambda x: model(x).square().mean(), torch.randn(16, 7))
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


def test_the_wrapper_of_a_scheduler_is_accepted_without_a_warning(torchs_calls: list[int]) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    quick, rates = HostAdam(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            fill_gradients(model, step)
            quick.step(optimizer.step)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001, 0.001, 0.0001])
    assert len(torchs_calls) == 2
