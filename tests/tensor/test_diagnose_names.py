"""What a cause calls the tensors of a step: the program's own names, or plain descriptions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard
from steadygrad.diagnose import diagnose
from steadygrad.facts import Cause

MODEL = nn.Linear(4, 1)
WEIGHTS = torch.tensor([1.0, math.nan, 1.0, 1.0, 1.0, 1.0])[:, None]


class Pair(NamedTuple):
    pixels: Tensor
    label: int


@dataclass
class Sample:
    pixels: Tensor


class Program:
    def __init__(self, bank: Tensor) -> None:
        self.bank = bank

    def training_step(self, batch: Tensor) -> Tensor:
        return MODEL(batch).mean()

    def __call__(self, batch: Tensor) -> Tensor:
        return MODEL(batch).mean()

    def use_bank(self, batch: Tensor) -> Tensor:
        return (MODEL(batch) + MODEL(self.bank)).mean()


def poisoned() -> Tensor:
    x = torch.randn(6, 4)
    x[2, 1] = math.nan
    return x


def compute_loss(inputs: Tensor, targets: Tensor) -> Tensor:
    return (MODEL(inputs) - targets).square().mean()


def find(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Cause:
    cause = diagnose(fn, *args, model=MODEL, **kwargs)
    assert cause is not None
    return cause


BAD, GOOD = poisoned(), torch.zeros(6, 1)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "name"),
    [
        (lambda x: MODEL(x).mean(), (BAD,), {}, "x"),
        (compute_loss, (BAD, GOOD), {}, "inputs"),
        (compute_loss, (BAD,), {"targets": GOOD}, "inputs"),
        (lambda batch: MODEL(batch["image"]).mean(), ({"image": BAD},), {}, "batch['image']"),
        (lambda batch: MODEL(batch[0]).mean(), ((BAD, 1),), {}, "batch[0]"),
        (lambda batch: MODEL(batch.pixels).mean(), (Pair(BAD, 1),), {}, "batch.pixels"),
        (lambda batch: MODEL(batch[0].pixels).mean(), ([Sample(BAD)],), {}, "batch[0].pixels"),
        (lambda *rest: MODEL(rest[0]).mean(), (BAD,), {}, "rest[0]"),
        (lambda **rest: MODEL(rest["image"]).mean(), (), {"image": BAD}, "rest['image']"),
        (functools.partial(compute_loss, targets=GOOD), (BAD,), {}, "inputs"),
        (functools.partial(compute_loss, BAD), (GOOD,), {}, "inputs"),
        (Program(GOOD).training_step, (BAD,), {}, "batch"),
        (Program(GOOD), (BAD,), {}, "batch"),
    ],
)  # fmt: skip
def test_a_bad_input_is_named_by_its_parameter(fn: Any, args: Any, kwargs: Any, name: str) -> None:
    cause = find(fn, *args, **kwargs)

    assert cause.name == name
    assert cause.headline == f"NaN loss, already in the input {name}"
    assert f"1 of 24 elements of {name} are NaN" in cause.explanation
    assert cause.fixes[0] == f"torch.nan_to_num({name})"
    assert not any("(x)" in fix for fix in cause.fixes if name != "x")


def test_arguments_are_numbered_if_the_function_shows_no_parameters() -> None:
    prediction, mean = torch.ones(6, 4, requires_grad=True), 1
    cause = find(torch._C._nn.mse_loss, prediction, target=BAD, reduction=mean)
    assert cause.headline == "NaN loss, already in the input target"

    cause = find(torch._C._nn.mse_loss, prediction, BAD, mean)
    assert cause.headline == "NaN loss, already in the second argument"
    assert "1 of 24 elements of the second argument are NaN" in cause.explanation
    assert cause.fixes[0] == "replace its NaN with torch.nan_to_num"


def test_a_captured_tensor_is_named_by_its_variable() -> None:
    images = poisoned()
    cause = find(lambda: MODEL(images).mean())
    assert cause.headline == "NaN loss, already in the input images"

    cause = find(lambda x: (MODEL(x) * WEIGHTS).mean(), torch.randn(6, 4))
    assert cause.headline == "NaN loss, already in the input WEIGHTS"
    assert cause.explanation.startswith("a tensor that the step uses and does not make held NaN")
    assert (cause.samples, cause.samples_note) == ((), "")  # its rows are not samples

    cause = find(Program(BAD).use_bank, torch.randn(6, 4))
    assert cause.headline == "NaN loss, already in the input self.bank"


def test_an_unnamed_tensor_is_described_as_created_outside() -> None:
    make = functools.cache(poisoned)
    make()

    cause = find(lambda: MODEL(make()).mean())

    assert cause.headline == "NaN loss, already in a tensor made outside the step"
    assert cause.fixes == ("replace its NaN with torch.nan_to_num",)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)
        with torch.no_grad():
            self.fc.weight[0, 2] = math.nan

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


TEACHER = Teacher()


def use_global(x: Tensor) -> Tensor:
    return (MODEL(x) - TEACHER(x)).mean()


class Distiller:
    def __init__(self) -> None:
        self.critics = {"teacher": [Teacher()]}
        self.centre = torch.full((1,), math.inf)

    def step(self, x: Tensor) -> Tensor:
        return (MODEL(x) - self.critics["teacher"][0](x)).mean()


def use_argument(x: Tensor, teacher: nn.Module) -> Tensor:
    return (MODEL(x) - teacher(x)).mean()


def use_attribute(distiller: Distiller, x: Tensor) -> Tensor:
    return (MODEL(x) - distiller.centre).mean()


def use_function(x: Tensor) -> Tensor:
    return use_global(x) * 2


teacher = Teacher()


@pytest.mark.parametrize(
    ("fn", "others", "name"),
    [
        (lambda x: (MODEL(x) - teacher(x)).mean(), (), "teacher.fc.weight"),
        (use_global, (), "TEACHER.fc.weight"),
        (use_function, (), "TEACHER.fc.weight"),
        (Distiller().step, (), "self.critics['teacher'][0].fc.weight"),
        (use_argument, (Teacher(),), "teacher.fc.weight"),
        (functools.partial(use_argument, teacher=Teacher()), (), "teacher.fc.weight"),
    ],
    ids=["variable", "global", "of a function", "self", "argument", "partial"],
)
def test_a_bad_weight_of_another_network_is_named(fn: Callable[..., Any], others: tuple[Any, ...], name: str) -> None:
    cause = find(fn, torch.randn(6, 4), *others)

    assert cause.headline == f"NaN loss, already in the parameter {name}"
    assert cause.module is None, "it is in no module of the model"
    assert cause.explanation.startswith(
        "a weight of another network that the step uses held NaN or Inf before the step"
    )


def test_a_bad_tensor_of_an_object_is_named() -> None:
    cause = find(use_attribute, Distiller(), torch.randn(6, 4))

    assert cause.headline == "Inf loss, already in the input distiller.centre"


def test_a_guard_does_not_claim_its_steps_damaged_another_networks_weight() -> None:
    guard = Guard(MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.0))
    healthy = nn.Linear(4, 1)
    guard.step(use_argument, torch.randn(6, 4), healthy)
    guard.step(use_argument, torch.randn(6, 4), Teacher())

    cause = guard.incidents[-1].cause
    guard.close()
    assert cause is not None
    assert (cause.name, cause.note) == ("teacher.fc.weight", "")


def test_model_inputs_are_named_as_on_the_shown_line() -> None:
    images = {"left": poisoned()}
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    loss = model(images["left"] * 2).mean()
    guard.step(loss)

    cause = guard.incidents[-1].cause
    guard.close()
    assert cause is not None
    assert cause.source == 'loss = model(images["left"] * 2).mean()'
    assert cause.headline == "step 0: NaN output, already in the input images['left'] * 2"
    assert cause.fixes[0] == "torch.nan_to_num(images['left'] * 2)"


def test_an_operand_is_named_by_its_whole_expression() -> None:
    def training_step(x: Tensor) -> Tensor:
        hidden = MODEL(x)
        return (hidden / (hidden.detach().relu().sum(dim=-1, keepdim=True).clamp(max=0.0) * 1.0)).mean()

    cause = find(training_step, torch.randn(6, 4))

    assert cause.inputs[0].startswith("hidden: ")
    assert cause.inputs[1].startswith("hidden.detach().relu().sum(dim=-1, keepdim=True).clamp(m")
    assert "elements of hidden.detach().relu()" in cause.explanation
    assert "(hidden.detach().relu().sum(dim=-1, keepdim=True).clamp(max=0.0) * 1.0" in cause.fixes[0]


def test_a_number_next_to_the_operand_is_not_confused_with_it() -> None:
    large = 1e38
    cause = find(lambda x: (1e38 * (MODEL(x) * 1e10)).mean(), torch.randn(6, 4))
    assert cause.inputs[0].startswith("MODEL(x) * 10000000000.0: ")

    cause = find(lambda x: (large * (MODEL(x) * 1e10)).mean(), torch.randn(6, 4))
    assert cause.inputs[0].startswith("the first operand: ")


def test_a_changed_batch_is_named() -> None:
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    images = poisoned()

    def training_step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(batch["image"].clone()).mean()
        batch["image"].zero_()
        return loss

    guard.step(training_step, {"image": images})

    cause = guard.incidents[-1].cause
    guard.close()
    assert cause is not None
    assert "batch['image'] of the batch changed in place after the step" in cause.note
