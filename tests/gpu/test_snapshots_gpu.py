"""Snapshots on CUDA: taking one never waits, and it holds the state of that moment although training continues."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad.act import pinned_memory
from steadygrad.act.pinned_memory import PinnedMemory
from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.config import SnapshotConfig
from steadygrad.state.collect import Source
from steadygrad.state.random_state import capture_random, restore_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
EAGER = SnapshotConfig(good_after=1)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise on any synchronising call except an event's wait."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each event that the host waited for, which the sync debug mode does not see."""
    seen: list[int] = []
    synchronize = torch.cuda.Event.synchronize

    def counting(self: torch.cuda.Event) -> Any:
        seen.append(1)
        return synchronize(self)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", counting)
    return seen


class Training:
    """Batch norm, dropout, fused AdamW, scheduler, scaler and EMA."""

    def __init__(self, width: int = 64, config: SnapshotConfig = EAGER, *, tensor_lr: bool = False) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, width))
        self.model = nn.Sequential(*layers).cuda()
        lr = torch.tensor(1e-2, device="cuda") if tensor_lr else 1e-2
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.99**step)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        extras = {"scheduler": self.scheduler, "scaler": self.scaler, "ema": self.ema}
        self.snapshots = Snapshots(self.model, [self.optimizer], extras=extras, config=config)

    def train(self, batches: list[Tensor]) -> None:
        for x in batches:
            self.scaler.scale((self.model(x) - x).square().mean()).backward()
            self.snapshots.before_optimizer()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.update_parameters(self.model)

    def look(self) -> dict[str, Tensor]:
        seen = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        seen |= {f"ema.{k}": v.clone() for k, v in self.ema.state_dict().items()}
        for i, entry in enumerate(self.optimizer.state.values()):
            seen |= {f"state.{i}.{k}": v.clone() for k, v in entry.items()}
        lr = self.optimizer.param_groups[0]["lr"]
        seen["lr"] = torch.as_tensor(lr).clone()
        seen["scale"] = torch.tensor(self.scaler.get_scale())
        seen["rng"] = torch.cuda.get_rng_state()
        return seen


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


def make_batches(count: int, width: int = 64) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    return [torch.randn(32, width, device="cuda", generator=generator) for _ in range(count)]


def test_taking_a_snapshot_never_waits(waits: list[int]) -> None:
    training = Training()
    batches = make_batches(4)
    training.train(batches)
    for step in range(4):  # pins its memory and fills the ring
        assert training.snapshots.take(step)
        training.train(batches[:1])
        torch.cuda.synchronize()
        training.snapshots.healthy_step(step)
    torch.cuda.synchronize()
    waits.clear()
    torch.cuda._sleep(200_000_000)
    asleep = torch.cuda.Event()
    asleep.record()

    with no_synchronisation():
        assert training.snapshots.take(5)
        training.snapshots.before_optimizer()

    assert not asleep.query(), "the host came back while the device was still asleep"
    assert waits == []


def test_later_changes_do_not_enter_a_snapshot() -> None:
    width = 4096  # large enough for the copy to be in progress while the weights are overwritten
    training = Training(width)
    training.train(make_batches(2, width))
    for step in (1, 2):
        before = training.look()
        torch.cuda.synchronize()
        assert training.snapshots.take(step)
        for buffer in training.model.buffers():
            buffer.zero_()  # like a forward: at once, not after before_optimizer()
        training.snapshots.before_optimizer()
        for tensor in (*training.model.parameters(), *training.ema.parameters()):
            tensor.data.fill_(math.nan)
        for entry in training.optimizer.state.values():
            for value in entry.values():
                value.fill_(math.nan)
        assert training.snapshots.healthy_step(step) == []
        assert training.snapshots.restore() == step
        assert_equal(training.look(), before)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_training_after_a_restore_equals_a_run_without_the_undone_batches(tensor_lr: bool) -> None:
    batches = make_batches(10)
    rolled = Training(tensor_lr=tensor_lr)
    rolled.train(batches[:4])
    rolled.snapshots.take(4)
    rolled.train(batches[4:7])
    rolled.snapshots.healthy_step(4)
    rolled.snapshots.restore()
    generators = capture_random([torch.device("cuda", 0)])
    rolled.train(batches[7:])
    result = rolled.look()
    clean = Training(tensor_lr=tensor_lr)
    clean.train(batches[:4])
    restore_random(generators)  # the draws for the undone batches are not repeated
    clean.train(batches[7:])
    assert_equal(result, clean.look())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["parameter", "moment", "buffer", "ema"])
def test_a_poisoned_snapshot_never_becomes_good(poison: float, where: str) -> None:
    training = Training()
    training.train(make_batches(2))
    training.snapshots.take(2)
    assert training.snapshots.healthy_step(2) == []
    targets: dict[str, Any] = {
        "parameter": training.model[0].weight.data,
        "moment": training.optimizer.state[training.model[0].weight]["exp_avg_sq"],
        "buffer": training.model[1].running_var,
        "ema": training.ema.module[0].bias.data,
    }
    targets[where].view(-1)[-1] = poison
    training.snapshots.take(3)
    assert len(training.snapshots.healthy_step(3)) == 1
    assert training.snapshots.newest_good == 2


def test_memory_is_pinned_reused_and_bounded() -> None:
    training = Training(512, SnapshotConfig(good_after=1, max_bytes=64 << 20))
    training.train(make_batches(1, 512))
    held = []
    for step in range(8):
        assert training.snapshots.take(step)
        torch.cuda.synchronize()
        training.snapshots.healthy_step(step)
        held.append(training.snapshots.bytes_held)
    assert held[-1] == held[-2] <= 64 << 20
    assert training.snapshots.restore() == 7


def test_scaling_a_tensor_rate_for_a_step_reads_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    lr = torch.tensor(0.125, device="cuda")
    optimizer = torch.optim.AdamW([weight], lr=lr, fused=True)
    rates = Rates([optimizer])
    rates.scale_lr(0.5)
    with no_synchronisation():
        lr.fill_(0.25)  # a schedule that writes its rates
        with rates.held():
            seen = lr.clone()
        lr.mul_(0.5)
        rates.ramp_back(4)
        rates.healthy_step()
        with rates.held():
            later = lr.clone()
    assert optimizer.param_groups[0]["lr"] is lr
    assert (seen.item(), later.item()) == (0.25 * 0.5, 0.25 * 0.5 * 0.625)
    assert lr.item() == 0.125


def test_memory_is_pinned_during_the_recording_of_a_cuda_graph() -> None:
    x = torch.randn(64, 64, device="cuda")
    (x @ x).sum()
    torch.cuda.synchronize()
    graph, memory = torch.cuda.CUDAGraph(), PinnedMemory(pinned=True)
    with torch.cuda.graph(graph, capture_error_mode="global"):  # the strictest mode: other threads count too
        memory.prepare([8 << 20] * 4)
        y = x @ x
        memory._finish()
    graph.replay()
    torch.testing.assert_close(y, x @ x)
    hosts = memory.make_room([Source(torch.empty(8 << 20, dtype=torch.uint8), late=False)] * 4)
    assert all(host.is_pinned() for host in hosts)


PROGRAM_ON_DEVICE_1 = """
import torch
from steadygrad.act.pinned_memory import PinnedMemory

weight = torch.ones(1 << 20, device="cuda:1")
for slowly in (False, True):
    memory = PinnedMemory(pinned=True)
    memory.prepare([64 << 20] * 4, slowly=slowly)
    memory._finish()
    assert len(memory._blocks) == 4
    memory._blocks[0][: 4 << 20].copy_(weight.view(torch.uint8), non_blocking=True)
    torch.cuda.synchronize(1)
    del memory
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "a context on a device that this process does not use"
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_pinning_touches_only_the_device_of_the_training() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM_ON_DEVICE_1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_snapshot_uses_the_prepared_memory() -> None:
    training = Training(512)
    prepared = training.snapshots._ring.spare[0]
    assert prepared.num_bytes > 0
    assert training.snapshots.take(0)
    assert training.snapshots._ring.held[0].pinned_memory is prepared
    assert sum(host.is_pinned() for host in training.snapshots._ring.held[0].hosts) > 4


def test_a_copy_staged_on_the_device_holds_the_state_of_that_moment() -> None:
    training = Training()
    training.train(make_batches(3))
    before = training.look()
    assert training.snapshots.take(3)
    assert not training.snapshots._copier._under_way, "the optimizer need not wait"
    training.train(make_batches(5))
    training.snapshots.healthy_step(3)
    torch.cuda.synchronize()
    training.snapshots.restore()
    after = training.look()
    assert_equal({k: v for k, v in after.items() if k != "rng"}, {k: v for k, v in before.items() if k != "rng"})


@pytest.mark.parametrize("is_ranked", [False, True], ids=["alone", "ranks"])
def test_training_never_waits_for_memory_being_pinned(monkeypatch: pytest.MonkeyPatch, is_ranked: bool) -> None:
    pin = pinned_memory.pin

    def pin_slowly(size: int, events: Sequence[torch.cuda.Event] = ()) -> Tensor:
        time.sleep(0.15)
        return pin(size, events)

    config = SnapshotConfig(good_after=1, every=10, keep=3)
    training = Training(width=2048, config=config)
    if is_ranked:
        training.snapshots._ring._agree = set
    taken, longest = [], 0.0
    for step in range(200):
        if step == 1:
            monkeypatch.setattr(pinned_memory, "pin", pin_slowly)
        begin = time.monotonic()
        if training.snapshots.due(step) and training.snapshots.take(step):
            taken.append(step)
        if step > 0:
            longest = max(longest, time.monotonic() - begin)
        training.train([torch.randn(8, 2048, device="cuda")])
        training.snapshots.healthy_step(step)
        time.sleep(0.02)
    assert longest < 0.12, "a block alone takes 0.15 s"
    assert len(taken) >= 2, taken
    assert not is_ranked or all(step % 5 == 0 for step in taken), "ranks take theirs at the same steps"
