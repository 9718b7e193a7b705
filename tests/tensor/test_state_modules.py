"""Modules, parameters and buffers are listed as torch lists them, and walked once where that is asked for."""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import nn

from steadygrad.state.modules import list_buffers, list_modules, list_parameters, walk_once


class Odd(nn.Module):
    """A part that is there twice, one that was removed, one that holds its parent's sibling."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.first = nn.ModuleDict({"deep": nn.ModuleList([shared, nn.Tanh()])})
        self.again = shared
        self.removed = nn.Identity()
        self.removed = None
        self.last = nn.ModuleList([self.first["deep"], nn.Dropout()])


def test_modules_are_listed_as_torch_lists_them() -> None:
    transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for model in (Odd(), nn.Linear(2, 2), transformer, scripted):
        listed = list_modules(model)
        expected = list(model.named_modules())
        assert [name for name, _ in listed] == [name for name, _ in expected]
        if not isinstance(model, torch.jit.ScriptModule):  # which makes its parts' wrappers each time
            assert all(one is other for (_, one), (_, other) in zip(listed, expected, strict=True))
    odd = Odd()
    odd.circle = nn.ModuleList([odd])
    assert [name for name, _ in list_modules(odd)] == [name for name, _ in odd.named_modules()]


class Tied(Odd):
    """Weights and buffers that stand in two places, and such as are None."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.again[0].weight
        self.norm, self.bare = nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False, track_running_stats=False)
        self.register_buffer("mean", self.norm.running_mean)
        self.register_parameter("none", None)


def test_parameters_and_buffers_are_listed_as_torch_lists_them() -> None:
    for model in (Tied(), nn.Linear(2, 2), nn.Transformer(8, 2, 2, 2, 16, batch_first=True)):
        for listed, expected in (
            (list_parameters(model), model.named_parameters()),
            (list_buffers(model), model.named_buffers()),
        ):
            pairs = list(zip(listed, expected, strict=True))
            assert all(name == other and one is same for (name, one), (other, same) in pairs)


def test_inside_walk_once_a_model_is_walked_once() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU())
    with walk_once():
        with walk_once():
            first = list_modules(model)
        assert list_modules(model) is first
        assert [name for name, _ in list_modules(other)] == ["", "0"]


def test_after_walk_once_a_model_is_walked_anew_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with contextlib.suppress(ValueError), walk_once():
        list_modules(model)
        raise ValueError
    model.append(nn.ReLU())
    assert [name for name, _ in list_modules(model)] == ["", "0", "1"]
