"""`list_modules` against torch's `named_modules`."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from steadygrad.state.modules import list_modules


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
