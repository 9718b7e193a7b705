"""torch.compile with a guard: our functions are never traced, even in steps with a look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steadygrad
from steadygrad import Guard, GuardConfig, MeasureConfig

OURS = str(Path(steadygrad.__file__).parent)


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"), reason="this torch cannot leave functions alone"
)
@pytest.mark.parametrize("in_place", [False, True])
def test_torch_compile_traces_none_of_our_hooks(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame

    traced: list[str] = []
    convert = convert_frame.ConvertFrameAssert.__call__

    def spy(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(frame.f_code.co_filename)
        return convert(self, frame, *args, **kwargs)

    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", spy)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    called: Any = model
    if in_place:
        model.compile(backend="eager")
    else:
        called = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guard(model, optimizer, config=GuardConfig(measure=MeasureConfig(scan_every=4))) as guard:
        for _ in range(10):
            guard.step(lambda x: called(x).square().mean(), torch.ones(2, 4))
    assert traced
    assert [name for name in traced if name.startswith(OURS)] == []


def test_guards_on_one_compiled_model_share_a_wrapper_and_the_last_one_removes_it() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    guards = [Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3)) for _ in range(2)]
    for _ in range(3):
        for guard in guards:
            guard.step(lambda x: model(x).square().mean(), torch.ones(2, 4))
            wrapper: Any = model._compiled_call_impl
            assert wrapper.call is compiled, "one wrapper, and the compiled call inside it"
    guards[0].close()
    assert model._compiled_call_impl is wrapper
    guards[1].step(lambda x: model(x).square().mean(), torch.ones(2, 4))
    guards[1].close()
    assert model._compiled_call_impl is compiled
