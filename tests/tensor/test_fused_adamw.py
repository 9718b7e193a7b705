"""FusedAdamW: torch's AdamW to the last place, and random rounding that loses no update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import DEVICES

from steadygrad import Guard, UsageError
from steadygrad.optim import FusedAdamW, fused_adamw, reference

triton_adamw = pytest.importorskip("steadygrad.optim.triton_adamw")
DEVICE = DEVICES[-1]
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "seed": 7}
SIZES = [(1,), (33, 5), (4097,), (2, 3, 4)]


def make_lists(dtype: torch.dtype = torch.float32, step: float = 1.0) -> list[list[Tensor]]:
    torch.manual_seed(0)
    params, gradients, first = ([torch.randn(s, device=DEVICE).to(dtype) for s in SIZES] for _ in range(3))
    second = [torch.rand(s, device=DEVICE).to(dtype) for s in SIZES]
    return [params, gradients, first, second, [torch.full((), step, device=DEVICE) for _ in SIZES]]


def run_kernel(lists: list[list[Tensor]], *, rounds: bool = False, **settings: Any) -> None:
    update = triton_adamw.Update(lists[0], rounds=rounds, chunk=1024, block=256)
    update(lists, **{**SETTINGS, "found": None, "scale": None, **settings})


def count_ulps(one: Tensor, other: Tensor) -> int:
    wide = torch.int32 if one.dtype is torch.float32 else torch.int16
    return int((one.view(wide).long() - other.view(wide).long()).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1.0, 1000.0])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_kernel_is_the_reference(dtype: torch.dtype, step: float, scale: float | None) -> None:
    ours, theirs = make_lists(dtype, step), make_lists(dtype, step)
    divisor = None if scale is None else torch.tensor(scale, device=DEVICE)
    run_kernel(ours, scale=divisor)
    reference.update(theirs, **SETTINGS, scale=divisor, rounds=False)
    for one, other in zip(ours[0] + ours[2] + ours[3], theirs[0] + theirs[2] + theirs[3]):
        assert count_ulps(one, other) <= 1  # bfloat16 is cut, not rounded, by the interpreter
    assert all(map(torch.equal, ours[1], theirs[1])), "gradients stay as they are"


def test_the_reference_is_torchs_fused_adamw() -> None:
    ours, theirs = make_lists(step=4.0), make_lists(step=4.0)
    reference.update(ours, **SETTINGS)
    settings = {k: v for k, v in SETTINGS.items() if k not in ("betas", "seed")}
    torch._fused_adamw_(
        *theirs[:4], [], theirs[4], beta1=0.9, beta2=0.95, amsgrad=False, maximize=False, **settings
    )  # fmt: skip
    for one, other in zip(ours[0] + ours[2] + ours[3], theirs[0] + theirs[2] + theirs[3]):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_bad_step_leaves_no_trace() -> None:
    lists = make_lists()
    before = copy.deepcopy(lists)
    lists[1][2][5] = float("nan")
    run_kernel(lists, found=torch.ones((), device=DEVICE))
    for ours, theirs in zip(lists[0] + lists[2] + lists[3], before[0] + before[2] + before[3]):
        assert torch.equal(ours, theirs)
    run_kernel(before, found=torch.zeros((), device=DEVICE))
    assert not torch.equal(before[0][2], lists[0][2])


@pytest.mark.parametrize("where", ["kernel", "reference"])
def test_rounding_at_random_keeps_the_mean_and_only_takes_neighbours(where: str) -> None:
    size = 1 << 14
    param = torch.full((size,), 1.0, dtype=torch.bfloat16, device=DEVICE)  # neighbours: 1 and 1 - 2**-8
    zeros, ones = torch.zeros_like(param), torch.ones_like(param)
    lists = [[param], [ones], [zeros], [zeros.clone()], [torch.ones((), device=DEVICE)]]
    settings = {**SETTINGS, "lr": 1e-3, "weight_decay": 0.0}  # the first step moves by lr: a quarter of a unit
    if where == "kernel":
        triton_adamw.Update([param], rounds=True, chunk=4096, block=1024)(lists, **settings, found=None, scale=None)
    else:
        reference.update(lists, **settings)
    assert set(param.tolist()) == {1.0, 1.0 - 2**-8}
    assert float(param.double().mean()) == pytest.approx(1.0 - 1e-3, abs=4 * 2**-8 * 0.5 / size**0.5)
    assert not torch.equal(param[:512], param[512:1024]), "the two halves of a block share no random bits"


def train(optimizer: type[torch.optim.Optimizer], steps: int, **settings: Any) -> Tensor:
    """A bfloat16 model whose updates are far below a unit of its weights."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4).to(DEVICE, torch.bfloat16)
    goal = torch.randn(16, 4, device=DEVICE)
    made = optimizer(model.parameters(), lr=1e-4, weight_decay=0.0, **settings)
    for _ in range(steps):
        x = torch.randn(32, 16, device=DEVICE)
        loss = (model(x.bfloat16()).float() - x @ goal).square().mean()
        made.zero_grad()
        loss.backward()
        made.step()
    return model.weight.detach()


def test_updates_that_bfloat16_would_lose_are_made() -> None:
    start = train(torch.optim.AdamW, 0, fused=True)
    stuck = train(torch.optim.AdamW, 150, fused=True)
    moved = train(FusedAdamW, 150, stochastic_rounding=True)
    assert float((moved - start).abs().mean()) > 3 * float((stuck - start).abs().mean())


def test_the_kernel_runs_inside_the_optimizer_and_random_numbers_follow_the_counter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_adamw, "has_kernel", lambda devices: True)
    torch.manual_seed(0)
    model = nn.Linear(8, 3).to(DEVICE, torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), stochastic_rounding=True, seed=3)
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient.clone()
        optimizer.step()

    step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step()
    first = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step()
    assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())
    assert optimizer._updates, "the kernel was used"


def test_a_guard_takes_it_as_it_takes_torchs() -> None:
    def run(kind: type[torch.optim.Optimizer], **settings: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 3).to(DEVICE)
        guard = Guard(model, kind(model.parameters(), lr=1e-2, **settings))
        for i in range(12):
            x = torch.randn(16, 8, device=DEVICE)
            x = x * float("nan") if i == 7 else x
            guard.step(lambda x: model(x).square().mean(), x)
        assert [incident.step for incident in guard.incidents] == [7]
        return model.weight.detach()

    assert torch.allclose(run(FusedAdamW), run(torch.optim.AdamW, fused=True), rtol=1e-6, atol=1e-8)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="whole number"):
        FusedAdamW(nn.Linear(2, 2).parameters(), seed=-1)
