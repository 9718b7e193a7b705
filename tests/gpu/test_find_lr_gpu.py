"""guard.find_lr on CUDA, where steps are judged late and the optimizer skips inside its kernel: it leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steadygrad import Guard, GuardConfig

pytestmark = pytest.mark.gpu


def train(*, test_after: int | None, autocast: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda") if autocast == "fp16" else None
    x = torch.randn(256, 32)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16, shuffle=True)
    guard = Guard(model, optimizer, config=GuardConfig(autocast=autocast), scaler=scaler)

    def fn(batch: list[Tensor]) -> Tensor:
        return (model(batch[0].cuda()) - batch[1].cuda()).square().mean()

    for batch in guard.batches(loader):
        guard.step(fn, batch)
        if guard.num_steps == test_after:
            curve = guard.find_lr(fn, loader, start=1e-6, end=10.0, steps=40)
            assert curve.suggested > 0
    guard.close()
    moments = {f"moment {i}": s["exp_avg"] for i, s in enumerate(optimizer.state.values())}
    return {**model.state_dict(), **moments, "random": torch.cuda.get_rng_state()}


@pytest.mark.parametrize("autocast", ["fp32", "bf16", "fp16"])
def test_a_range_test_in_the_middle_of_an_epoch_changes_no_bit(autocast: str) -> None:
    plain, tested = train(test_after=None, autocast=autocast), train(test_after=5, autocast=autocast)
    for name, value in plain.items():
        assert torch.equal(value, tested[name]), name
