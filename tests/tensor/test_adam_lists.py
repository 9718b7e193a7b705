"""Our quickly made lists equal torch's: the same objects, in the same order, in every case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from steadygrad.act.adam_lists import KNOWN, QuickLists, can_gather_quickly

LISTS = len(KNOWN) - 2


def make(optimizer: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.randn(n + 1)) for n in range(5)]
    made = optimizer(params, lr=0.1, **{"fused": True, **settings})
    for p in params:
        p.grad = torch.randn_like(p)
    return params, made


def gather(optimizer: Any) -> list[Any]:
    lists: list[list[Any]] = [[] for _ in range(LISTS)]
    has_complex = optimizer._init_group(optimizer.param_groups[0], *lists)
    return [has_complex, *([id(item) for item in one] for one in lists)]


def lists_of(optimizer: Any) -> QuickLists:
    """One for each optimizer, as in a guard: its memory is part of the test."""
    if "quick" not in vars(optimizer):
        optimizer.quick = QuickLists(optimizer)
    return optimizer.quick


def gather_quickly(optimizer: Any) -> list[Any]:
    with lists_of(optimizer).lend():
        return gather(optimizer)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_the_lists_hold_the_same_objects_in_the_same_order(optimizer: Any) -> None:
    _, made = make(optimizer)
    made.step()

    assert gather_quickly(made) == gather(made)
    assert len(gather(made)[1]) == 5


def test_before_the_first_step_torch_creates_the_state() -> None:
    params, made = make()

    assert gather_quickly(made) == gather(made)
    assert set(made.state) == set(params)


@pytest.mark.parametrize("index", [0, 2, 4])
def test_a_parameter_without_a_gradient_is_left_out(index: int) -> None:
    params, made = make()
    made.step()
    params[index].grad = None

    assert gather_quickly(made) == gather(made)
    assert len(gather(made)[1]) == 4


def test_a_sparse_gradient_gets_torchs_own_error() -> None:
    params, made = make()
    made.step()
    params[1].grad = torch.ones(2).to_sparse()

    with pytest.raises(RuntimeError, match="sparse"):
        gather_quickly(made)


def test_amsgrad_keeps_its_maxima() -> None:
    _, made = make(amsgrad=True)
    made.step()

    assert gather_quickly(made) == gather(made)
    assert len(gather(made)[5]) == 5


def test_a_replaced_state_is_noticed_at_once() -> None:
    params, made = make()
    made.step()
    gather_quickly(made)

    made.state[params[3]] = {name: value.clone() for name, value in made.state[params[3]].items()}
    assert gather_quickly(made) == gather(made)

    made.state[params[3]]["exp_avg"] = torch.zeros(4)
    assert gather_quickly(made) == gather(made)

    made.load_state_dict(made.state_dict())
    assert gather_quickly(made) == gather(made)

    made.state.pop(params[0])
    assert gather_quickly(made) == gather(made)


def test_replaced_parameters_are_noticed_at_once() -> None:
    params, made = make()
    made.step()
    gather_quickly(made)

    made.param_groups[0]["params"].reverse()

    assert gather_quickly(made) == gather(made)
    assert gather(made)[1] == [id(p) for p in reversed(params)]


def test_training_is_bit_identical_and_nothing_stays_on_the_optimizer() -> None:
    results = []
    for quick in (False, True):
        torch.manual_seed(0)
        params, made = make(weight_decay=0.1)
        for _ in range(3):
            if quick:
                with lists_of(made).lend():
                    made.step()
            else:
                made.step()
        assert "_init_group" not in vars(made)
        results.append(params)

    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_only_torchs_adam_in_a_known_form_is_accelerated() -> None:
    class Mine(torch.optim.AdamW):
        """A user's subclass."""

    known = make()[1]
    compiled = make()[1]
    compiled.step = torch.compile(compiled.step, backend="eager")

    assert can_gather_quickly(known) == (torch.__version__ >= "2.7")
    assert not can_gather_quickly(make(Mine)[1])
    assert not can_gather_quickly(make(torch.optim.SGD)[1])
    assert not can_gather_quickly(compiled)
