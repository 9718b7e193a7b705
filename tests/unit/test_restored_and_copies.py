"""Checks of restored weights and of copies: they never wait for the device, keep nothing alive, leave no trace."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad.measure.copies import APART, CopyWatch, find_copies
from steadygrad.measure.restored import LOOKS, RestoredWatch
from steadygrad.measure.transfer import Transfer
from steadygrad.state.trained_parameters import find_trained_parameters


class HostReads(TorchDispatchMode):
    """Counts calls that would make the host wait on CUDA."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_checking_restored_weights_reads_nothing_from_the_device() -> None:
    model = nn.Linear(4, 4)
    watch = RestoredWatch(find_trained_parameters(model, torch.optim.SGD(model.parameters(), 0.1)), Transfer())
    first = model.weight.detach().clone()

    with HostReads() as reads, torch.no_grad():
        watch.note_call(-1, is_training=True)
        model.weight += 1
        assert watch.end_step(LOOKS[0]) is None
        model.weight.copy_(first)
        watch.note_call(LOOKS[0], is_training=True)
        pending = watch.end_step(LOOKS[0] + 1)

    assert reads.num == 0
    assert pending is not None
    assert pending.read(LOOKS[0] + 1).is_restored


@pytest.fixture
def model() -> nn.Module:
    class Net(nn.Module):  # its own type: modules of other tests are not copies of it
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    return Net()


def watch_copies(model: nn.Module) -> CopyWatch:
    watch = CopyWatch(model)
    watch.search({name: p.detach().clone() for name, p in model.named_parameters()}, torch.clone)
    return watch


def test_a_noticed_copy_can_be_dropped_by_the_program(model: nn.Module) -> None:
    ema = copy.deepcopy(model)
    watch, gone = watch_copies(model), weakref.ref(ema)

    del ema
    gc.collect()

    assert gone() is None
    watch.close()


def test_a_noticed_copy_is_copied_without_a_trace(model: nn.Module) -> None:
    ema = copy.deepcopy(model)
    watch = watch_copies(model)
    assert len(ema._forward_pre_hooks) == 1

    torch.save(copy.deepcopy(ema).state_dict(), io.BytesIO())
    assert not copy.deepcopy(ema)._forward_pre_hooks

    watch.close()
    assert not ema._forward_pre_hooks
    assert not ema._forward_pre_hooks_with_kwargs


def test_a_second_training_notices_copies_after_the_first(model: nn.Module) -> None:
    ema = copy.deepcopy(model)
    watch_copies(model).close()

    watch = watch_copies(model)

    assert len(ema._forward_pre_hooks) == 1
    watch.close()


def test_a_noticed_copy_can_be_scripted() -> None:
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh())
    ema = copy.deepcopy(model)
    watch = watch_copies(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in torch
        torch.jit.script(ema)

    assert len(ema._forward_pre_hooks) == 1
    watch.close()


def test_only_a_model_of_the_same_form_with_separate_weights_is_a_copy(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    other.layer = nn.Linear(4, 5)
    twin = copy.deepcopy(model)
    shares = copy.copy(model)

    assert [one is twin for one in find_copies(model)] == [True]
    del other, shares


def test_a_copy_with_other_weights_is_ignored_at_once(model: nn.Module) -> None:
    ema = copy.deepcopy(model)
    watch = watch_copies(model)
    with torch.no_grad():
        model.layer.weight += 1
        ema.layer.weight += 0.5

        watch.num_steps = APART
        ema(torch.ones(1, 4))

    assert not ema._forward_pre_hooks
    assert watch.idle is None
