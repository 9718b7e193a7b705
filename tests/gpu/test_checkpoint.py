"""Checkpoints on CUDA: exact resume with fused optimizers, dropout and loss scaling; one copy to pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steadygrad import Guard, GuardConfig, ZClip
from steadygrad.checkpoint import CheckpointStore, NonFiniteStateError
from steadygrad.disk.staging import StagedFile

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*runs without fused=True")]


class Program:
    """A training on CUDA: dropout, BatchNorm, shuffling, accumulation, scheduler, EMA."""

    def __init__(self, run_dir: Path | None, seed: int, *, fused: bool, fp16: bool, device: str = "cuda") -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = nn.Sequential(
            nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 3)
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)  # not its buffers: torch 2.11 fails on integers
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
        self.loader = DataLoader(TensorDataset(x, y), 4, shuffle=True)
        scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=3) if fp16 else None
        config = GuardConfig(clip=ZClip(warmup=3), autocast="fp16" if fp16 else "bf16")
        self.guard = Guard(
            self.model,
            self.optimizer,
            config=config,
            scheduler=self.scheduler,
            scaler=scaler,
            ema=self.ema,
            run_dir=run_dir,
        )
        self.num_batches = 0

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = (part.to(self.device) for part in batch)
        return nn.functional.cross_entropy(self.model(x).float(), y) / 2

    def train(self, stop: int | None = None) -> None:
        count = self.guard.num_microbatches
        for _ in range(self.guard.epoch, 2):
            for batch in self.guard.batches(self.loader):
                self.guard.backward(self.loss, batch)
                count += 1
                if count % 2 == 0:
                    self.guard.step()
                self.num_batches += 1
                if self.num_batches == stop:
                    return
            self.guard.end_epoch()

    def tensors(self) -> dict[str, Tensor]:
        self.guard.flush()
        state = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        state |= {f"ema.{k}": v for k, v in self.ema.state_dict().items()}
        for i, slots in enumerate(self.optimizer.state.values()):
            state |= {f"{i}.{k}": v for k, v in slots.items()}
        return state


@pytest.mark.parametrize("fp16", [False, True], ids=["bf16", "fp16 with scaler"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("stop", [4, 13])
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, fused: bool, fp16: bool, stop: int) -> None:
    kind = {"fused": fused, "fp16": fp16}
    whole = Program(None, 1, **kind)
    whole.train()
    first = Program(tmp_path, 1, **kind)
    first.train(stop)
    save = first.guard.save()
    assert save is not None
    assert save.wait() is not None, save.error
    second = Program(tmp_path, 99, **kind)
    assert second.guard.resume() == save.step
    second.train()
    ours, theirs = whole.tensors(), second.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device == theirs[name].device, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize(("there", "here"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_save_from_one_device_resumes_on_another(tmp_path: Path, there: str, here: str, fused: bool) -> None:
    first = Program(tmp_path, 1, fused=fused, fp16=False, device=there)
    first.train(4)
    first.guard.save()
    first.guard.close()
    second = Program(None, 2, fused=fused, fp16=False, device=here)
    assert second.guard.resume(tmp_path) == 2
    theirs = second.tensors()
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor.cpu(), theirs[name].cpu()), name
        on_host = name.endswith((".step", "n_averaged")) and not fused
        assert on_host or name.endswith("n_averaged") or theirs[name].device.type == here, name
    second.train()
    assert second.guard.stats()["num_skipped"] == 0


def test_host_memory_is_pinned_and_reused() -> None:
    image = StagedFile()
    image.stage({"a": torch.randn(5000, device="cuda")}, {})
    assert all(segment.is_pinned() for segment in image._segments)
    addresses = [segment.data_ptr() for segment in image._segments]
    image.stage({"a": torch.randn(5000, device="cuda")}, {})
    assert [segment.data_ptr() for segment in image._segments] == addresses


def test_weights_may_change_as_soon_as_a_save_returns(tmp_path: Path) -> None:
    weight = torch.ones(32 << 20, device="cuda")
    with CheckpointStore(tmp_path) as store:
        for step in range(3):
            store.save({"model": {"w": weight}}, step=step)
            weight += 1.0
        for step in range(3):
            found = store.load(step)
            assert found is not None
            assert found.state["model"]["w"].eq(step + 1.0).all()


def test_a_nonfinite_moment_on_the_device_is_named(tmp_path: Path) -> None:
    moments = {f"m{i}": torch.randn(1000, device="cuda") for i in range(50)}
    moments["m31"][7] = torch.inf
    with pytest.raises(NonFiniteStateError) as caught:
        CheckpointStore(tmp_path).save({"optimizer": moments}, step=0)
    assert caught.value.tensors == {"optimizer.m31": 1}


def test_saving_every_step_does_not_change_the_training(tmp_path: Path) -> None:
    quiet = Program(None, 1, fused=True, fp16=False)
    quiet.train()
    saving = Program(tmp_path, 1, fused=True, fp16=False)
    step: Callable[..., Any] = saving.guard.step

    def step_and_save() -> None:
        step()
        saving.guard.save()

    saving.guard.step = step_and_save  # type: ignore[method-assign,assignment]
    saving.train()
    for name, tensor in quiet.tensors().items():
        assert torch.equal(tensor, saving.tensors()[name]), name
