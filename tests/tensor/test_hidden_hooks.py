"""What a program makes of a guarded model has no hook of ours: pickles, copies, compiled scripts."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from steadygrad import ActivationMonitor, Guard

HELD = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


def train(num_steps: int) -> tuple[nn.Module, Guard]:
    """A guarded model after some steps; in the first ones every layer is watched."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    guard = Guard(model, torch.optim.Adam(model.parameters()))
    for _ in range(num_steps):
        guard.step(lambda x: model(x).square().mean(), torch.ones(2, 4))
    return model, guard


def pickle_and_load(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


@pytest.mark.parametrize("num_steps", [0, 1, 20])
@pytest.mark.parametrize("make", [copy.deepcopy, pickle_and_load])
def test_copies_and_pickles_have_plain_dicts_without_a_hook_of_ours(
    make: Callable[[nn.Module], nn.Module], num_steps: int
) -> None:
    model, guard = train(num_steps)

    made = make(model)

    guard.close()
    held = [vars(module)[name] for module in made.modules() for name in HELD]
    assert all(type(one) is OrderedDict and not one for one in held)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_a_guarded_model_can_be_scripted(num_steps: int) -> None:
    model, guard = train(num_steps)

    scripted = torch.jit.script(model)

    guard.close()
    x = torch.ones(2, 4)
    assert torch.equal(scripted(x), model(x))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_a_trace_of_a_guarded_and_monitored_model_records_the_model_alone(num_steps: int) -> None:
    model, guard = train(num_steps)
    x = torch.ones(2, 4)
    with ActivationMonitor(model):
        traced = torch.jit.trace(model, x)  # torch traces it twice, and compares

    guard.close()
    plain = torch.jit.trace(model, x)
    kinds = [[node.kind() for node in one.inlined_graph.nodes()] for one in (traced, plain)]
    assert kinds[0] == kinds[1]


def test_a_hook_of_the_programs_own_is_copied_and_can_be_removed() -> None:
    model, guard = train(1)
    handle = model.register_forward_hook(print, with_kwargs=True)

    made = copy.deepcopy(model)
    handle.remove()
    guard.close()

    assert list(made._forward_hooks.values()) == [print]
    assert list(made._forward_hooks_with_kwargs) == list(made._forward_hooks)
    assert not model._forward_hooks
