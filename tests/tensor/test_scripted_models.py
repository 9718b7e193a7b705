"""Scripted and traced models, which refuse hooks by their own methods, are guarded like any other."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training import assert_same, loss_of, make_batches, make_model, snapshot

from steadygrad import Guard, Severity
from steadygrad.testing import poison_batches

pytestmark = [  # both are still in use
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
Batch = tuple[Tensor, Tensor]
BAD = 3


def script() -> nn.Module:
    return run_in(torch.jit.script(make_model(norm=True)))


def trace() -> nn.Module:
    return run_in(torch.jit.trace(make_model(norm=True), make_batches(1)[0][0]))


def run_in(model: nn.Module) -> nn.Module:
    """Call it a few times: then torch optimizes its code, which rounds its numbers differently."""
    state = copy.deepcopy(model.state_dict())
    for batch in make_batches(3):
        loss_of(model)(batch).backward()
    model.zero_grad()
    model.load_state_dict(state)
    return model


def train(
    model: nn.Module, batches: list[Batch], *, way: str | None = None, run_dir: Path | None = None
) -> Guard | None:
    """Train it plainly or, in one of three ways, with a Guard."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, run_dir=run_dir) if way else None
    fn = loss_of(model)
    for batch in batches:
        if guard is None:
            fn(batch).backward()
            optimizer.step()
        elif way == "function":
            guard.step(fn, batch)
        elif way == "loss":
            guard.step(fn(batch))
        else:
            fn(batch).backward()
            guard.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.flush()
    return guard


@pytest.mark.parametrize("way", ["function", "loss", "own backward"])
@pytest.mark.parametrize("make", [script, trace])
def test_a_bad_batch_leaves_no_trace_in_a_model_that_refuses_hooks(make, way: str) -> None:
    plain, guarded, batches = make(), make(), make_batches(12)
    train(plain, batches[:BAD] + batches[BAD + 1 :])
    guard = train(guarded, list(poison_batches(batches, at={BAD})), way=way)
    assert_same(plain.state_dict(), guarded.state_dict())
    assert {finding.step for finding in guard.findings if finding.severity != Severity.INFO} == {BAD}
    assert guard.incidents[0].cause.phase == "input"
    guard.close()


@pytest.mark.parametrize("way", ["function", "loss", "own backward"])
def test_a_healthy_scripted_model_trains_as_in_the_plain_loop(way: str, tmp_path: Path) -> None:
    plain, guarded, batches = script(), script(), make_batches(12)
    train(plain, batches)
    guard = train(guarded, batches, way=way, run_dir=tmp_path)
    assert_same(plain.state_dict(), guarded.state_dict())
    assert all(finding.severity == Severity.INFO for finding in guard.findings)
    guard.close()


def test_statistics_updated_between_steps_survive_a_skip_of_a_scripted_model() -> None:
    model, batches = script(), make_batches(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer) as guard:
        guard.step(loss_of(model)(batches[0]))
        model.load_state_dict(script().state_dict())
        with torch.no_grad():
            model(batches[1][0])
        before = snapshot(model)
        guard.step(loss_of(model)(next(poison_batches([batches[2]], at={0}))))
        assert_same(snapshot(model), before)


def test_files_and_copies_of_a_guarded_scripted_model_know_nothing_of_the_guard() -> None:
    model = script()
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        file = io.BytesIO()
        torch.jit.save(model, file)
        file.seek(0)
        for other in (torch.jit.load(file), copy.deepcopy(model)):
            assert not other._forward_pre_hooks
            assert not other._forward_hooks
