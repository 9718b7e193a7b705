"""A rollback is exact: the training after it equals one that never had the batches in between."""

from __future__ import annotations

import copy
import math
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from training import assert_same, make_batches, snapshot

from steadygrad.act.pinned_memory import PinnedMemory
from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.config import GuardConfig, SnapshotConfig
from steadygrad.errors import ConfigError, UsageError
from steadygrad.state.collect import Source
from steadygrad.state.random_state import capture_random, restore_random

Make = Callable[[Any], torch.optim.Optimizer]
EAGER = SnapshotConfig(good_after=1)
SMAPS = Path("/proc/self/smaps")

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


class Training:
    """A small training with everything that changes: batch norm, dropout, scheduler, scaler, EMA, three generators."""

    def __init__(self, make: Make, config: SnapshotConfig = EAGER) -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        layers = (nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))
        self.model = nn.Sequential(*layers)
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        self.rates = Rates([self.optimizer])
        extras = {"scheduler": self.scheduler, "scaler": self.scaler, "ema": self.ema, "rates": self.rates}
        self.snapshots = Snapshots(self.model, [self.optimizer], extras=extras, config=config)

    def train(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        for x, y in batches:
            noisy = x + random.gauss(0, 0.01) + float(numpy.random.normal(0, 0.01))
            self.scaler.scale(nn.functional.cross_entropy(self.model(noisy), y)).backward()
            self.snapshots.before_optimizer()
            with self.rates.held():
                self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.update_parameters(self.model)

    def look(self) -> dict[str, Tensor]:
        return snapshot(self.model, self.optimizer, self.ema, self.scaler, self.scheduler)


@every_optimizer
def test_training_after_a_restore_equals_a_run_without_the_undone_batches(make: Make) -> None:
    batches = make_batches(14)
    rolled = Training(make)
    rolled.train(batches[:5])
    assert rolled.snapshots.take(5)
    at_snapshot = rolled.look()
    rolled.train(batches[5:9])
    rolled.rates.scale_lr(0.5)
    rolled.snapshots.healthy_step(5)
    after = rolled.look()
    assert any(not torch.equal(after[k], at_snapshot[k]) for k in after), "it must have something to undo"
    assert rolled.snapshots.restore() == 5
    assert_same(rolled.look(), at_snapshot)
    assert rolled.look().keys() == at_snapshot.keys()
    generators = capture_random(())
    rolled.train(batches[9:])
    result = rolled.look()

    clean = Training(make)
    clean.train(batches[:5])
    restore_random(generators)  # the draws for the undone batches are not repeated
    clean.train(batches[9:])
    assert_same(result, clean.look())


def test_random_generators_belong_to_the_user_and_move_on() -> None:
    training = Training(OPTIMIZERS["SGD"])
    training.snapshots.take(0)
    training.train(make_batches(3))
    before = capture_random(())
    training.snapshots.healthy_step(0)
    training.snapshots.restore()
    after = capture_random(())
    assert before["python"] == after["python"]
    assert torch.equal(before["torch"], after["torch"])
    assert (before["numpy"][1] == after["numpy"][1]).all()


@every_optimizer
def test_optimizer_state_created_later_is_removed(make: Make) -> None:
    training = Training(make)
    at_start = training.look()
    assert training.snapshots.take(0)
    num_entries = [len(entry) for entry in training.optimizer.state.values()]
    training.train(make_batches(3))
    training.snapshots.healthy_step(0)
    training.snapshots.restore()
    assert [len(entry) for entry in training.optimizer.state.values()] == num_entries
    assert training.look().keys() == at_start.keys()
    assert_same(training.look(), at_start)


class Slow(torch.optim.SGD):
    """Keeps slow weights behind a custom `state_dict`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.slow: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        params = [p for group in self.param_groups for p in group["params"]]
        self.slow += [p.detach().clone() for p in params[len(self.slow) :]]
        for p, slow in zip(params, self.slow):
            slow.lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "slow"})
        self.slow = list(state["slow"])


@pytest.mark.parametrize("keeps_rates", [True, False])
def test_an_optimizers_custom_state_is_restored_even_if_a_group_was_added(keeps_rates: bool) -> None:
    model, later = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = Slow(model.parameters())
    snapshots = Snapshots(model, [optimizer], config=EAGER, owns_rate=lambda _: not keeps_rates)

    def step() -> None:
        (model(torch.ones(1, 3)) + later(torch.ones(1, 3))).square().sum().backward()
        optimizer.step()

    step()
    assert snapshots.take(0)
    then = copy.deepcopy(optimizer.slow)
    optimizer.add_param_group({"params": list(later.parameters()), "lr": 0.01})
    step()
    snapshots.healthy_step(0)
    assert snapshots.restore() == 0
    assert snapshots.misfits == []
    assert len(optimizer.slow) == len(then) == 2
    assert all(map(torch.equal, optimizer.slow, then))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    step()


def test_objects_keep_their_identity() -> None:
    training = Training(OPTIMIZERS["AdamW"])
    training.train(make_batches(2))
    training.snapshots.take(2)
    parameters, buffers = list(training.model.parameters()), list(training.model.buffers())
    moments = [value for entry in training.optimizer.state.values() for value in entry.values()]
    group = training.optimizer.param_groups[0]
    training.train(make_batches(2))
    training.snapshots.healthy_step(2)
    training.snapshots.restore()
    assert all(a is b for a, b in zip(parameters, training.model.parameters()))
    assert all(a is b for a, b in zip(buffers, training.model.buffers()))
    now = [value for entry in training.optimizer.state.values() for value in entry.values()]
    assert all(a is b for a, b in zip(moments, now))
    assert training.optimizer.param_groups[0] is group
    assert "params" in group


def test_a_snapshot_can_be_restored_repeatedly() -> None:
    training = Training(OPTIMIZERS["AdamW"])
    training.train(make_batches(4))
    training.snapshots.take(4)
    at_snapshot = training.look()
    training.snapshots.healthy_step(4)
    for _ in range(3):
        training.train(make_batches(3))
        assert training.snapshots.restore() == 4
        assert_same(training.look(), at_snapshot)


def test_the_factor_on_the_rates_is_restored_too() -> None:
    training = Training(OPTIMIZERS["SGD"])
    training.rates.scale_lr(0.5)
    training.train(make_batches(2))
    training.snapshots.take(2)
    lr = training.optimizer.param_groups[0]["lr"]
    training.rates.scale_lr(0.1)
    training.train(make_batches(2))
    training.snapshots.healthy_step(2)
    training.snapshots.restore()
    assert training.rates.factor == 0.5
    assert training.optimizer.param_groups[0]["lr"] == lr == 0.1 * 0.9**2


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW tensor lr"]], ids=["number", "tensor"])
def test_current_factors_can_be_kept_and_count_once(make: Make) -> None:
    training, plain = Training(make), Training(make)
    plain.train(make_batches(2))
    training.rates.scale_lr(0.5)
    training.train(make_batches(2))
    training.snapshots.take(2)
    training.train(make_batches(1))
    training.rates.scale_lr(0.5)
    training.train(make_batches(1))
    training.snapshots.healthy_step(2)
    with training.rates.keep_factors():
        training.snapshots.restore()
    assert training.rates.factor == 0.25
    unscaled = plain.optimizer.param_groups[0]["lr"]
    assert training.optimizer.param_groups[0]["lr"] == unscaled
    with training.rates.held():
        assert training.optimizer.param_groups[0]["lr"] == unscaled * 0.25


class Odd(nn.Module):
    """Tied and empty parameters, complex ones, a shared buffer, a sparse one, an absent one, a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.empty(0))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.short = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        shared = torch.ones(3)
        self.register_buffer("left", shared)
        self.register_buffer("right", shared)
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("expanded", torch.arange(3.0).expand(2, 3))


def test_unusual_tensors_are_restored() -> None:
    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not model.empty], lr=0.1)
    snapshots = Snapshots(model, [optimizer], config=EAGER)
    assert snapshots.take(0)
    before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    strides = model.image.stride()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    model.left.add_(1)
    model.graph = torch.ones(3, 3).to_sparse()
    model.absent = torch.ones(2)
    assert snapshots.healthy_step(0) == [], "a mask of -inf is not a fault"

    assert snapshots.restore() == 0

    assert torch.equal(model.graph.to_dense(), before.pop("graph").to_dense())
    for name, value in before.items():
        assert torch.equal(
            model.get_parameter(name) if name in dict(model.named_parameters()) else getattr(model, name), value
        )
    assert model.second.weight is model.first.weight
    assert model.left is model.right
    assert model.absent is None
    assert model.image.stride() == strides
    assert not optimizer.state


def test_an_optimizer_state_in_another_dtype_is_not_cast() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["average"] = torch.full((3,), 1 / 3)
    optimizer.state[weight]["nested"] = {"list": [torch.ones(2), 7], "text": "kept"}
    model = nn.ParameterList([weight])
    snapshots = Snapshots(model, [optimizer], config=EAGER)
    snapshots.take(0)
    optimizer.state[weight]["average"].zero_()
    optimizer.state[weight]["nested"]["list"][0].zero_()
    optimizer.state[weight]["later"] = 1
    snapshots.healthy_step(0)
    snapshots.restore()
    assert torch.equal(optimizer.state[weight]["average"], torch.full((3,), 1 / 3))
    assert torch.equal(optimizer.state[weight]["nested"]["list"][0], torch.ones(2))
    assert optimizer.state[weight]["nested"]["text"] == "kept"
    assert "later" not in optimizer.state[weight]


# --- which snapshots are good --------------------------------------------------------------------------------------


def make_snapshots(config: SnapshotConfig, size: int = 8) -> tuple[nn.Linear, Snapshots]:
    model = nn.Linear(size, size)
    return model, Snapshots(model, [torch.optim.SGD(model.parameters(), lr=0.1)], config=config)


def test_a_snapshot_is_good_only_after_enough_healthy_steps_beyond_it() -> None:
    _, snapshots = make_snapshots(SnapshotConfig(good_after=3))
    snapshots.take(5)
    for step, good in ((4, None), (5, None), (6, None), (7, 5)):  # step 4 was before it and does not count
        snapshots.healthy_step(step)
        assert snapshots.newest_good == good


def test_a_bad_step_restarts_the_count_and_leaves_good_ones_good() -> None:
    _, snapshots = make_snapshots(SnapshotConfig(good_after=2))
    snapshots.take(1)
    snapshots.healthy_step(1)
    snapshots.healthy_step(2)
    snapshots.take(3)
    snapshots.healthy_step(3)
    snapshots.unhealthy(4)
    assert snapshots.newest_good == 1
    snapshots.healthy_step(5)
    assert snapshots.newest_good == 1
    snapshots.healthy_step(6)
    assert snapshots.newest_good == 3


def test_a_snapshot_taken_during_bad_steps_never_becomes_good() -> None:
    _, snapshots = make_snapshots(SnapshotConfig(good_after=1))
    snapshots.take(3)
    snapshots.unhealthy(2)  # judged late: step 2 failed before the snapshot was taken
    assert not snapshots.due(1000)
    assert not snapshots.take(4), "the last step was not healthy"
    for step in range(3, 9):
        snapshots.healthy_step(step)
    assert snapshots.newest_good is None
    assert snapshots.take(9)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["parameter", "moment", "buffer", "ema"])
def test_a_poisoned_snapshot_never_becomes_good(poison: float, where: str) -> None:
    training = Training(OPTIMIZERS["AdamW"], SnapshotConfig(good_after=1))
    training.train(make_batches(2))
    training.snapshots.take(2)
    assert training.snapshots.healthy_step(2) == []
    targets = {
        "parameter": training.model[0].weight.data,
        "moment": training.optimizer.state[training.model[0].weight]["exp_avg_sq"],
        "buffer": training.model[1].running_var,
        "ema": training.ema.module[0].bias.data,
    }
    targets[where].view(-1)[-1] = poison
    training.snapshots.take(3)
    reasons = training.snapshots.healthy_step(3)
    assert len(reasons) == 1
    assert "snapshot of step 3 was dropped" in reasons[0]
    assert training.snapshots.newest_good == 2


def test_a_poisoned_start_is_never_restored() -> None:
    model, snapshots = make_snapshots(SnapshotConfig())
    model.weight.data[0, 0] = math.nan
    snapshots.take(0)
    assert not snapshots.can_restore
    with pytest.raises(UsageError, match="no good snapshot to restore"):
        snapshots.restore()


def test_the_untrained_state_is_used_while_no_snapshot_is_good() -> None:
    model, snapshots = make_snapshots(SnapshotConfig(good_after=20))
    before = model.weight.detach().clone()
    snapshots.take(0)
    model.weight.data.add_(1)
    assert snapshots.newest_good is None
    assert snapshots.restore() == 0
    assert torch.equal(model.weight, before)


def test_a_later_state_that_is_not_good_is_not_used() -> None:
    _, snapshots = make_snapshots(SnapshotConfig(good_after=20))
    snapshots.take(7)
    snapshots.healthy_step(7)
    with pytest.raises(UsageError, match="20 healthy steps"):
        snapshots.restore()


def fill(snapshots: Snapshots, model: nn.Linear, steps: Iterable[int]) -> None:
    """Take a snapshot at each step, with the step's number as weights; each but the last becomes good."""
    for step in steps:
        model.weight.data.fill_(step)
        snapshots.take(step)
        if step != 9:
            snapshots.healthy_step(step)


def test_older_goes_further_back_each_time() -> None:
    model, snapshots = make_snapshots(SnapshotConfig(good_after=1, keep=5))
    fill(snapshots, model, (1, 2, 3, 9))
    assert snapshots.restore() == 3
    assert snapshots.restore() == 3
    assert snapshots.restore(older=True) == 2
    assert model.weight[0, 0] == 2
    assert snapshots.restore(older=True) == 1
    with pytest.raises(UsageError, match="no good snapshot older than the one of step 1"):
        snapshots.restore(older=True)
    assert model.weight[0, 0] == 1
    assert snapshots.restore() == 1, "newer ones are gone"


def test_a_restore_is_older_than_the_last_one_although_a_newer_snapshot_became_good() -> None:
    model, snapshots = make_snapshots(SnapshotConfig(good_after=1, keep=5))
    fill(snapshots, model, (1, 2))
    assert snapshots.restore() == 2
    fill(snapshots, model, (3,))
    assert snapshots.restore(older=True) == 1


# --- schedule and memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (SnapshotConfig(keep=2), 1, "up to 2 snapshots in host memory: a quarter of what is free is "),
        (SnapshotConfig(), 4, "up to 3 snapshots in host memory: a quarter of what is free shared by 4 ranks is "),
        (SnapshotConfig(max_bytes=3 << 20), 4, "up to 3 snapshots in host memory: SnapshotConfig.max_bytes is 3.0 MiB"),
    ],
)
def test_the_memory_limit_is_logged_at_the_start(
    caplog: pytest.LogCaptureFixture, config: SnapshotConfig, ranks: int, said: str
) -> None:
    caplog.set_level("INFO", logger="steadygrad")
    model = nn.Linear(2, 2)
    Snapshots(model, [torch.optim.SGD(model.parameters())], config=config, num_neighbours=ranks)
    assert said in caplog.text


def test_the_ring_keeps_the_newest_snapshots_and_always_the_last_good_one() -> None:
    model, snapshots = make_snapshots(SnapshotConfig(good_after=1, keep=3))
    fill(snapshots, model, range(1, 7))
    held = snapshots.bytes_held
    assert held == 3 * (8 * 8 * 4 + 64)  # weight and bias, each on 64 bytes
    assert snapshots.describe() == "3 snapshots in 960 bytes of host memory, newest good at step 6"
    for step in range(10, 20):  # none of them becomes good
        snapshots.take(step)
    assert snapshots.newest_good == 6
    assert snapshots.bytes_held == held, "memory is reused"


def test_memory_is_bounded_and_fewer_are_kept() -> None:
    one = (64 * 64 + 64) * 4
    model, snapshots = make_snapshots(SnapshotConfig(good_after=1, keep=3, max_bytes=2 * one + 100), size=64)
    fill(snapshots, model, range(1, 8))
    assert one * 2 <= snapshots.bytes_held <= 2 * one + 100
    assert "room for 2 of 3" in snapshots.describe()
    assert snapshots.restore() == 7
    assert snapshots.restore(older=True) == 6


def test_with_space_for_one_it_is_replaced() -> None:
    model, snapshots = make_snapshots(SnapshotConfig(good_after=1, keep=1))
    fill(snapshots, model, range(1, 5))
    assert snapshots.restore() == 4
    assert model.weight[0, 0] == 4


def test_if_none_fits_snapshots_are_off_and_this_is_reported() -> None:
    _, snapshots = make_snapshots(SnapshotConfig(max_bytes=100))
    assert not snapshots.take(0)
    assert not snapshots.due(1000)
    assert snapshots.bytes_held == 0
    assert "one would take 320 bytes" in snapshots.describe()
    with pytest.raises(UsageError, match=r"snapshots are off, because one would take .*max_bytes"):
        snapshots.restore()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_large_snapshots_on_the_cpu_ask_for_huge_pages() -> None:
    tensor = torch.randn(3 << 20)
    (host,) = PinnedMemory(pinned=False).make_room([Source(tensor, late=True)])
    # A mapping and its flags: 7f6fd1000000-7f6fd1c00000 rw-p ..., then lines of numbers, then VmFlags: rd wr ... hg
    mappings = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:([a-z ]*)", SMAPS.read_text(), re.MULTILINE | re.DOTALL
    )
    flags = [flags for start, end, flags in mappings if int(start, 16) <= host.data_ptr() < int(end, 16)]
    assert [" hg " in one for one in flags] == [True]
    host.copy_(tensor)
    assert torch.equal(host, tensor)


@pytest.mark.parametrize("slowly", [False, True])
def test_blocks_are_in_order_whatever_thread_pins_them(monkeypatch: pytest.MonkeyPatch, slowly: bool) -> None:
    threads = set()

    def pin(size: int, _events: object) -> Tensor:
        threads.add(threading.get_ident())
        time.sleep(0.02 if size == sizes[0] else 0.0)  # the first finishes last
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr("steadygrad.act.pinned_memory.pin", pin)
    monkeypatch.setattr("steadygrad.act.pinned_memory.PACE", 0.0)
    sizes = [(70 - i) << 21 for i in range(8)]  # each uses a whole block
    memory = PinnedMemory(pinned=True)
    memory.prepare(sizes, slowly=slowly)
    memory._finish()
    assert [block.numel() for block in memory._blocks] == sizes == memory._sizes
    assert (len(threads) == 1) == slowly


def test_a_block_that_cannot_be_pinned_raises_in_the_waiting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(size: int, _events: object) -> Tensor:
        if size < 66 << 21:
            raise MemoryError("no more pages")
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr("steadygrad.act.pinned_memory.pin", pin)
    memory = PinnedMemory(pinned=True)
    memory.prepare([(70 - i) << 21 for i in range(8)], slowly=False)
    with pytest.raises(RuntimeError, match="no more pages"):
        memory.make_room([])


@pytest.mark.parametrize("slowly", [False, True])
def test_a_process_that_ends_while_memory_is_pinned_ends_well(slowly: bool) -> None:
    """Python ends daemon threads inside their calls of C++, which aborts the process ("terminate called")."""
    program = f"""
import torch
from steadygrad.act import pinned_memory
pinned_memory.pin = lambda size, _events: torch.randn(size // 8).mul_(2).exp_().sum()[None]
memory = pinned_memory.PinnedMemory(pinned=True)
memory.prepare([(70 + i) << 21 for i in range(200)], slowly={slowly})
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_grown_state_is_also_pinned_during_training(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    add = PinnedMemory._add
    pinning: list[tuple[int, bool]] = []

    def add_and_note(memory: PinnedMemory, sizes: list[int], *args: Any, **kwargs: Any) -> None:
        if sizes:
            pinning.append((step, threading.current_thread() is threading.main_thread()))
        add(memory, sizes, *args, **kwargs)

    monkeypatch.setattr(PinnedMemory, "_add", add_and_note)
    monkeypatch.setattr("steadygrad.act.pinned_memory.pin", lambda size, _events: empty(size, dtype=torch.uint8))
    monkeypatch.setattr("steadygrad.act.pinned_memory.PACE", 0.0)
    monkeypatch.setattr("steadygrad.act.snapshots.look", lambda *_: None)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **kwargs: empty(*sizes, **kwargs))
    step = 0
    model = nn.Linear(2048, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    grown = nn.Module()  # gains a tensor later, like an optimizer that averages weights
    snapshots = Pinned(
        model, [optimizer], extras={"grown": grown}, config=SnapshotConfig(good_after=1, every=10, keep=3)
    )
    taken = []
    for step in range(40):
        if snapshots.due(step) and snapshots.take(step):
            taken.append(step)
        model(torch.ones(2, 2048)).sum().backward()
        optimizer.step()
        if step == 3:
            grown.register_buffer("average", torch.zeros(4096, 4096))
        snapshots.healthy_step(step)
        while step and snapshots._ring.is_preparing:
            time.sleep(0.001)
    assert len(taken) > 2
    assert [when for when, is_main in pinning if is_main] == []
    assert any(when > 3 for when, _ in pinning), "the larger state needed memory"


def test_optimizer_state_added_later_counts() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    snapshots = Snapshots(model, [optimizer], config=SnapshotConfig(max_bytes=40_000))
    assert snapshots.take(0)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    for step in range(30):
        snapshots.healthy_step(step)
    assert not snapshots.take(30)
    assert snapshots.off is not None
    assert snapshots.bytes_held == 0


def test_disabled_snapshots_use_no_memory() -> None:
    _, snapshots = make_snapshots(SnapshotConfig(enabled=False))
    assert not snapshots.due(0)
    assert not snapshots.take(0)
    assert "enabled is False" in snapshots.describe()


def test_a_short_run_has_a_useful_ring() -> None:
    _, snapshots = make_snapshots(SnapshotConfig())
    taken = []
    for step in range(2000):
        if snapshots.due(step):
            assert snapshots.take(step)
            taken.append(step)
        snapshots.healthy_step(step)
        if step >= 40:
            assert step - (snapshots.newest_good or 0) <= 20 + max(10, step // 4), "never far to go back"
    assert taken[:4] == [0, 10, 20, 30]
    assert 8 <= sum(step < 200 for step in taken) <= 16
    assert {b - a for a, b in zip(taken[-5:], taken[-4:])} == {100}
    assert [snapshots.effective_skip(step) for step in (0, 200, 2000, 10_000)] == [1, 10, 100, 200]


def test_an_extra_that_refers_to_the_optimizer_does_not_copy_it() -> None:
    class Holds:
        """Its state refers to the optimizer, which must not be copied."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.loaded: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"optimizer": self.optimizer, "values": {1, 2}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    extra = Holds(optimizer)
    snapshots = Snapshots(model, [optimizer], extras={"extra": extra}, config=EAGER)
    snapshots.take(0)
    snapshots.healthy_step(0)
    snapshots.restore()
    assert extra.loaded["optimizer"] is optimizer
    assert extra.loaded["values"] == {1, 2}


@pytest.mark.parametrize("field", ["every", "keep", "good_after", "max_bytes", "skip_batches"])
def test_an_invalid_setting_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=f"SnapshotConfig.{field}"):
        SnapshotConfig(**{field: 0})


def test_the_settings_are_read_from_plain_values() -> None:
    config = GuardConfig.from_dict({"snapshots": {"every": 50, "enabled": False}})
    assert config.snapshots == SnapshotConfig(every=50, enabled=False)
    assert GuardConfig.from_dict(config.to_dict()) == config
    assert copy.deepcopy(config) == config


def test_a_large_state_is_not_copied_more_often_at_the_start_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    config, optimizers = SnapshotConfig(every=100), [torch.optim.SGD(model.parameters())]
    snapshots = Snapshots(model, optimizers, config=config)
    snapshots.take(0)
    assert snapshots.effective_every(0) < 100
    monkeypatch.setattr("steadygrad.act.snapshots.DENSE_BYTES", 1)
    snapshots = Snapshots(model, optimizers, config=config)
    snapshots.take(0)
    assert snapshots.effective_every(0) == 50, "first at half a period, away from the periodic scans"
    snapshots.take(50)
    assert snapshots.effective_every(50) == 100


class Pinned(Snapshots):
    """Snapshots that behave as if on a device: they believe that blocks are pinned."""

    _is_pinned = property(lambda _: True, lambda _, __: None)  # type: ignore[assignment]

    def _is_kept_in_blocks(self, source: Source) -> bool:
        return source.fits


@pytest.mark.parametrize("is_ranked", [False, True], ids=["alone", "ranks"])
def test_a_snapshot_waits_for_its_memory_but_training_does_not(
    monkeypatch: pytest.MonkeyPatch, is_ranked: bool
) -> None:
    empty, finish, goes_on = torch.empty, PinnedMemory._finish, threading.Event()
    waits: list[int] = []

    def pin(size: int, _events: object) -> Tensor:
        goes_on.wait(2)
        return empty(size, dtype=torch.uint8)

    def finish_and_tell(memory: PinnedMemory) -> None:
        if memory.is_preparing and step > 0:
            waits.append(step)
        finish(memory)

    monkeypatch.setattr("steadygrad.act.pinned_memory.pin", pin)
    monkeypatch.setattr("steadygrad.act.pinned_memory.PACE", 0.0)
    monkeypatch.setattr("steadygrad.act.snapshots.look", lambda *_: None)  # the copy checks them too
    monkeypatch.setattr(PinnedMemory, "_finish", finish_and_tell)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **kwargs: empty(*sizes, **kwargs))
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    config = SnapshotConfig(good_after=1, every=10, keep=2)
    goes_on.set()
    snapshots = Pinned(model, [optimizer], config=config, agree=set if is_ranked else None)
    taken = []
    for step in range(60):
        if step in (1, 33):  # slow from the second snapshot on; fast again after step 33
            goes_on.clear() if step == 1 else goes_on.set()
        if snapshots.due(step) and snapshots.take(step):
            taken.append(step)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        snapshots.healthy_step(step)
        while step >= 33 and snapshots._ring.is_preparing:
            time.sleep(0.001)
    assert waits == []
    assert taken == ([0, 40, 50] if is_ranked else [0, 34, 44, 54])


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan], ids=["squares overflow", "inf", "nan"])
def test_only_nonfinite_values_disqualify_a_snapshot(value: float) -> None:
    model = nn.Linear(4, 4)
    snapshots = Snapshots(model, [torch.optim.SGD(model.parameters())], config=EAGER)
    nn.init.constant_(model.weight, value)
    assert snapshots.take(1)
    assert bool(snapshots.healthy_step(1)) is not math.isfinite(value)
    assert (snapshots.newest_good == 1) is math.isfinite(value)


def test_a_parameter_that_was_finite_once_is_not_excused_any_more() -> None:
    model = nn.Linear(2, 2)
    snapshots = Snapshots(model, [torch.optim.SGD(model.parameters())], config=EAGER)
    snapshots.excuse(lambda: {"weight"})
    assert snapshots.take(0)
    assert snapshots.healthy_step(0) == []
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    assert snapshots.take(1)
    assert snapshots.healthy_step(1) == ["the snapshot of step 1 was dropped, it is not finite: parameter weight"]
