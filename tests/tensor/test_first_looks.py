"""What the looks at the first batches queue: no step waits for the device. Reads of it are counted on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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
