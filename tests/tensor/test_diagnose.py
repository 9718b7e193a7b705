"""diagnose: it leaves no trace, survives odd programs, and describes what it found."""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad.diagnose import Capture, diagnose, diagnose_capture, diagnose_captures
from steadygrad.errors import UsageError


def break_at_zero(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(-1).sqrt().mean()


def bad_batch(rows: int = 6, width: int = 4) -> Tensor:
    x = torch.randn(rows, width)
    x[2] = 0.0
    return x


def linear() -> nn.Linear:
    return nn.Linear(4, 3, bias=False)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "flags": [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


# --- it leaves nothing behind ----------------------------------------------------------------------------------------


class Restless(nn.Module):
    """A forward that changes everything within reach."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("queue", torch.zeros(8, 4))
        self.memory = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        self.count += 1
        with torch.no_grad():
            self.fc.weight.mul_(0.5)
            self.queue[:2] = x[:2]
            self.memory.add_(1.0)
        x.mul_(2.0)
        self.eval()
        self.train()
        return self.drop(self.norm(self.fc(x)))


@pytest.mark.parametrize("ending", ["nan", "healthy", "raises"])
def test_weights_buffers_gradients_generators_and_batch_are_unchanged(ending: str) -> None:
    model = Restless()
    x = torch.randn(6, 4)
    model.fc.weight.grad = torch.full_like(model.fc.weight, 7.0)
    model.drop.eval()
    before, batch, memory = snapshot(model), x.clone(), model.memory.clone()

    def step(batch: Tensor) -> Tensor:
        out = model(batch)
        if ending == "raises":
            raise ValueError("the program's own")
        return (out * 0).sum().sqrt().log() if ending == "nan" else out.mean()

    if ending == "raises":
        with pytest.raises(ValueError, match="the program's own"):
            diagnose(step, x, model=model)
    else:
        assert (diagnose(step, x, model=model) is not None) == (ending == "nan")

    assert_unchanged(before, snapshot(model))
    assert torch.equal(x, batch)
    assert torch.equal(model.memory, memory)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_replayed_optimizer_is_unchanged(kind: Any) -> None:
    model = linear()
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    x = torch.randn(5, 4)
    for attempt in range(2):  # first without any state
        before, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
        assert diagnose(lambda x: model(x).square().mean(), x, optimizer=optimizer) is None
        assert_unchanged(before, snapshot(model))
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
        if attempt == 0:
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()


def test_a_function_that_steps_its_optimizer_leaves_no_trace() -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = bad_batch()
    before = snapshot(model)

    def step(x: Tensor) -> Tensor:
        loss = break_at_zero(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    cause = diagnose(step, x)

    assert cause is not None
    assert cause.op == "aten.sqrt"
    assert_unchanged(before, snapshot(model))
    assert len(optimizer.state) == 0


def test_the_gradients_of_a_second_model_are_unchanged() -> None:
    model, other = linear(), nn.Linear(3, 1)
    other.weight.grad = torch.ones(1, 3)

    cause = diagnose(lambda x: other(model(x)).sum() + break_at_zero(model, x), bad_batch(), model=model)

    assert cause is not None
    assert torch.equal(other.weight.grad, torch.ones(1, 3))
    assert other.bias.grad is None


def test_an_optimizer_step_inside_backward_is_suppressed() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepped = []

    def step(_: Tensor) -> None:
        stepped.append(1)
        optimizer.step()

    model.weight.register_post_accumulate_grad_hook(step)
    before = model.weight.detach().clone()

    assert diagnose(break_at_zero, model, bad_batch()) is not None

    assert not stepped
    assert torch.equal(model.weight, before)
    model(torch.ones(1, 4)).sum().backward()
    assert stepped == [1]  # and it steps again afterwards


def test_a_live_graph_can_run_backward_afterwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    alive = model(torch.randn(5, 4)).square().mean()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            model[0].weight.add_(0.0)
        return (model(x) * 0).sum().log()

    assert diagnose(step, torch.randn(5, 4), model=model) is not None
    alive.backward()


# --- what it must survive --------------------------------------------------------------------------------------------


def test_a_compiled_model_is_replayed_eagerly() -> None:
    model = linear()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(2, 4))

    cause = diagnose(break_at_zero, compiled, bad_batch(), model=compiled)
    torch._dynamo.reset()  # compiling affects the whole process

    assert cause is not None
    assert (cause.op, cause.phase, cause.module) == ("aten.sqrt", "backward", None)
    assert "replayed eagerly" in cause.note
    assert cause.reproducible == "yes, the same kind (software, not hardware)"


def test_a_compiled_model_used_by_the_function_is_replayed_too() -> None:
    """A compiled model has `__len__`, which raises if its module has none."""
    compiled = torch.compile(linear(), backend="eager")

    def step(x: Tensor) -> Tensor:
        return break_at_zero(compiled, x)

    cause = diagnose(step, bad_batch(), model=compiled)
    torch._dynamo.reset()

    assert cause is not None
    assert (cause.op, cause.phase) == ("aten.sqrt", "backward")


def test_data_parallel_is_replayed_as_its_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).square().sum(-1).sqrt()

    wrapped = nn.DataParallel(Net())

    cause = diagnose(lambda x: wrapped(x).mean(), bad_batch(), model=wrapped)

    assert cause is not None
    assert (cause.op, cause.module) == ("aten.sqrt", "")


def test_sparse_gradients_are_inspected() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with torch.no_grad():
        table.weight[3] = 0.0

    cause = diagnose(lambda ids: table(ids).square().sum(-1).sqrt().sum(), torch.tensor([1, 3, 5]))

    assert cause is not None
    assert (cause.op, cause.phase, cause.samples) == ("aten.sqrt", "backward", (1,))


def test_complex_tensors_are_inspected() -> None:
    model = linear()

    cause = diagnose(lambda x: (torch.fft.fft(model(x)) / x.sum(-1, keepdim=True)).abs().sum(), bad_batch())

    assert cause is not None
    assert cause.op == "aten.div"


def test_functional_transforms_do_not_stop_it() -> None:
    model = linear()

    def step(x: Tensor) -> Tensor:
        lengths = torch.func.vmap(lambda row: model(row).square().sum())(x)
        return lengths.sqrt().sum()

    cause = diagnose(step, bad_batch())

    assert cause is not None
    assert (cause.op, cause.phase) == ("aten.sqrt", "backward")


def test_several_ranks_are_refused_with_the_reason() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        cause = diagnose(break_at_zero, linear(), bad_batch())
    finally:
        torch.distributed.destroy_process_group()

    assert cause is not None
    assert (cause.kind, cause.phase) == ("unknown", "unknown")
    assert "2 ranks train together" in cause.note


def test_an_op_that_raises_is_named() -> None:
    model = linear()

    def step(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(model(x).T @ model(x) - 10 * torch.eye(3)).sum()

    cause = diagnose(step, torch.randn(5, 4))

    assert cause is not None
    assert cause.kind == "error"
    assert "cholesky" in (cause.op or "")
    assert cause.source == "return torch.linalg.cholesky(model(x).T @ model(x) - 10 * torch.eye(3)).sum()"
    assert "LinAlgError" in cause.symptom


def test_a_nan_that_makes_linear_algebra_raise_is_traced_to_its_origin() -> None:
    model = linear()

    def step(x: Tensor) -> Tensor:
        scaled = model(x) / x.sum(-1, keepdim=True)
        return torch.linalg.eigvalsh(scaled.T @ scaled).sum()

    cause = diagnose(step, bad_batch())

    assert cause is not None
    assert (cause.op, cause.phase, cause.kind) == ("aten.div", "forward", "nan")


# --- what it reports -------------------------------------------------------------------------------------------------


def test_the_text_is_complete() -> None:
    model = linear()

    def step(var: Tensor) -> Tensor:
        length = model(var).square().sum(-1)
        return torch.sqrt(length).mean()

    cause = diagnose(step, bad_batch())

    lines = str(cause).splitlines()
    assert lines[0] == "NaN gradient, born in the backward of aten.sqrt"
    fields = {line[2:10].strip(): line[11:] for line in lines[1:]}
    assert fields["line"].startswith("test_diagnose.py:")
    assert fields["line"].endswith("   return torch.sqrt(length).mean()")
    assert "1 zero of 6, float32" in str(cause)
    assert "length: min 0" in str(cause)
    assert fields["samples"] == "1 of 6 in the batch (index 2): only zeros in var"
    assert fields["again"] == "yes, bit for bit (software, not hardware)"
    assert fields["chain"].endswith("> gradient of weight")
    assert fields["fixes"]


def test_a_line_in_a_library_is_reported_with_its_caller() -> None:
    optax = pytest.importorskip("transformers.activations", reason="a library with its own torch code")
    model = linear()
    activation = optax.ReLUSquaredActivation()

    cause = diagnose(lambda x: activation(model(x) * 1e30).sum(), torch.ones(2, 4) * 1e3)

    assert cause is not None
    assert cause.file is not None
    assert "transformers" in cause.file
    assert cause.caller is not None
    assert cause.caller.startswith("test_diagnose.py:")


def test_both_ends_of_a_masked_row_are_named() -> None:
    model = linear()

    def step(x: Tensor, keep: Tensor) -> Tensor:
        scores = model(x).masked_fill(~keep, -math.inf)
        return scores.softmax(-1).sum()

    keep = torch.ones(6, 3, dtype=torch.bool)
    keep[4] = False

    cause = diagnose(step, torch.randn(6, 4), keep)

    assert cause is not None
    assert cause.op == "aten._softmax"
    assert [link.split(" at ")[0] for link in cause.chain] == ["aten.masked_fill", "aten._softmax", "loss"]
    assert cause.samples == (4,)


def test_the_magnitude_of_an_overflowing_cast_is_reported() -> None:
    model = linear()

    cause = diagnose(lambda x: model(x).half().float().sum(), torch.full((3, 4), 1e6))

    assert cause is not None
    assert (cause.kind, cause.op) == ("inf", "aten._to_copy")
    assert "e+0" in cause.inputs[0]


def test_terms_of_the_loss_are_reported_by_name_and_line() -> None:
    model = linear()

    def terms(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x).square().mean(), (model(x) * 0).sum().log()

    def named(x: Tensor) -> dict[str, Tensor]:
        fit, size = terms(x)
        return {"loss": fit + 0.1 * size, "fit": fit, "size": size}

    def summed(x: Tensor) -> Tensor:
        fit = model(x).square().mean()
        size = (model(x) * 0).sum().log()
        return 2 * fit + 0.1 * size - 3

    by_name, by_line = diagnose(named, torch.randn(3, 4)), diagnose(summed, torch.randn(3, 4))

    assert by_name is not None
    assert [term.split()[0] for term in by_name.terms] == ["loss", "size", "fit"]
    assert by_line is not None
    assert "size = (model(x) * 0).sum().log() Inf" in by_line.terms[0]
    assert "fit = model(x).square().mean()" in by_line.terms[1]


def test_a_bad_weight_is_reported_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight[0, 2] = math.nan

    cause = diagnose(lambda x: model(x).mean(), torch.randn(3, 4))

    assert cause is not None
    assert (cause.phase, cause.name, cause.module) == ("parameter", "1.weight", "1")
    assert str(cause).startswith("NaN loss, already in the parameter 1.weight")


@pytest.mark.parametrize(("poison", "kind"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_slice_of_a_dataset_is_described_by_its_contents(poison: float, kind: str) -> None:
    data, model = torch.randn(5, 6, 4), nn.Linear(4, 1)
    data[3, 2, 1] = poison

    cause = diagnose(lambda x: model(x).mean(), data[3])

    assert cause is not None
    assert (cause.kind, cause.phase, cause.samples) == (kind, "input", (2,))
    assert cause.explanation.startswith("the batch held NaN" if kind == "nan" else "the batch held Inf")


def test_a_bad_slice_is_blamed_and_not_the_values_written_into_it() -> None:
    data, model = torch.randn(5, 6, 4), nn.Linear(4, 1)
    data[3, 2, 1] = math.nan

    def training_step(x: Tensor) -> Tensor:
        x[0, 0] = 1.0
        return model(x).mean()

    cause = diagnose(training_step, data[3])

    assert cause is not None
    assert (cause.kind, cause.phase) == ("nan", "input")


def test_without_a_model_one_among_the_arguments_names_the_modules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(linear(), nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[0](x * 1e38).square()

    cause = diagnose(lambda m, x: m(x).sum(), Net(), torch.full((2, 4), 1e3))

    assert cause is not None
    assert cause.module == ""


# --- replaying a step ------------------------------------------------------------------------------------------------


def capture_of(fn: Any, *args: Any, model: nn.Module | None = None) -> Capture:
    return Capture.take(fn, args, {}, model=model)


def test_a_captured_step_is_replayed_with_its_random_numbers_and_autocast() -> None:
    model = linear()

    def step(x: Tensor) -> Tensor:
        chance = torch.rand(())
        out = model(x)
        assert out.dtype is torch.bfloat16
        return (out.float() * 0).sum() + torch.log((chance - threshold).relu())

    threshold, x = torch.rand(3).sort().values[1], torch.ones(3, 4)
    state = None
    for _ in range(50):  # a step that fails at random
        state = torch.get_rng_state()
        if torch.rand(()) < threshold:
            break
    assert state is not None
    torch.set_rng_state(state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture = capture_of(step, x, model=model)
    torch.manual_seed(123)

    cause = diagnose_capture(capture, expects="inf")

    assert cause is not None
    assert (cause.kind, cause.op) == ("inf", "aten.log")


def test_a_batch_changed_in_the_meantime_is_reported() -> None:
    model, x = linear(), bad_batch()
    capture = capture_of(break_at_zero, model, x, model=model)
    x.add_(0.0)

    cause = diagnose_capture(capture)

    assert cause is not None
    assert "changed in place after the step" in cause.note
    assert cause.reproducible is not None
    assert "bit for bit" not in cause.reproducible


def test_an_unrepeatable_failure_points_at_the_hardware() -> None:
    model = linear()

    cause = diagnose_capture(capture_of(lambda x: model(x).mean(), torch.randn(3, 4), model=model), expects="nan")

    assert cause is not None
    assert (cause.kind, cause.phase) == ("nan", "unknown")
    assert cause.reproducible is not None
    assert "hardware" in cause.reproducible


def test_a_step_that_keeps_changing_is_reported() -> None:
    model = linear()

    def chance() -> float:
        return 1.0 + int.from_bytes(os.urandom(2)) / 65536  # from a generator that a replay cannot restore

    def step(x: Tensor) -> Tensor:
        return break_at_zero(model, x) * chance()

    def healthy(x: Tensor) -> Tensor:
        return model(x).mean() * chance()

    cause, unrepeated = (
        diagnose(step, bad_batch()),
        diagnose_capture(capture_of(healthy, torch.randn(3, 4), model=model), expects="nan"),
    )

    assert cause is not None
    assert cause.reproducible is not None
    assert "other bits" in cause.reproducible
    assert unrepeated is not None
    assert unrepeated.reproducible is not None
    assert "not deterministic" in unrepeated.reproducible


def test_the_loss_scale_of_the_step_is_part_of_it() -> None:
    model = linear().half()
    capture = capture_of(lambda x: model(x).float().sum(), torch.ones(3, 4).half(), model=model)

    assert diagnose_capture(capture) is None
    cause = diagnose_capture(capture, scale=2.0**20)

    assert cause is not None
    assert (cause.kind, cause.phase) == ("inf", "backward")


def test_a_model_call_is_replayed_without_its_loss() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).square().sum(-1).sqrt()

    model = Net()
    capture = Capture.take(model, (bad_batch(),), {}, model=model, is_model_call=True)

    cause = diagnose_capture(capture)

    assert cause is not None
    assert (cause.op, cause.module) == ("aten.sqrt", "")
    assert "Only the model's forward was replayed" in cause.note


def test_an_exception_of_a_captured_step_is_reported_and_not_raised() -> None:
    model = linear()

    def step(x: Tensor) -> Tensor:
        raise KeyError("gone")

    cause = diagnose_capture(capture_of(step, torch.ones(1), model=model))

    assert cause is not None
    assert cause.phase == "unknown"
    assert "gone" in cause.note


def test_for_a_suspected_explosion_the_most_enlarging_derivative_is_named() -> None:
    model = nn.Linear(4, 1)

    def step(x: Tensor) -> Tensor:
        out = model(x)
        return F.mse_loss(out * 1e4, out.detach() * 1e4 + 1.0)

    capture = capture_of(step, torch.randn(8, 4), model=model)

    assert diagnose_capture(capture) is None
    cause = diagnose_capture(capture, suspect="exploding")

    assert cause is not None
    assert (cause.kind, cause.op, cause.phase) == ("exploding", "aten.mul", "backward")
    assert cause.growth == pytest.approx(1e4, rel=1e-3)


def test_the_bad_one_of_several_microbatches_is_named() -> None:
    model = linear()
    batches = [torch.randn(6, 4), bad_batch(), torch.randn(6, 4)]
    captures = [capture_of(break_at_zero, model, batch, model=model) for batch in batches]

    cause, capture = diagnose_captures(captures, expects="nan")

    assert capture is captures[1]
    assert cause is not None
    assert (cause.op, cause.samples) == ("aten.sqrt", (2,))
    assert cause.note == "In microbatch 1 of 3, counted from 0."


def test_it_is_reported_once_that_no_microbatch_fails_again() -> None:
    model = linear()
    captures = [capture_of(lambda x: model(x).mean(), torch.randn(3, 4), model=model) for _ in range(2)]

    cause, capture = diagnose_captures(captures, expects="inf")

    assert capture is captures[1]
    assert cause is not None
    assert (cause.kind, cause.phase) == ("inf", "unknown")
    assert diagnose_captures(captures) == (None, None)


def test_a_line_of_a_recipe_is_named_like_a_users_line() -> None:
    from steadygrad_recipes.seo.model import UltraOptimizedSEOMetricsModule

    model = UltraOptimizedSEOMetricsModule()
    model.feature_std.zero_()
    cause = diagnose(lambda x: model(x).sum(), torch.ones(2, len(model.feature_std)), model=model)
    assert cause is not None
    assert cause.op == "aten.div"
    assert cause.source == "known = (features - self.feature_mean) / self.feature_std"


@pytest.mark.parametrize("result", [lambda x: x.log(), lambda x: "text", lambda x: None])
def test_a_function_without_a_loss_or_gradient_is_refused_and_not_reported_as_healthy(result: Any) -> None:
    with pytest.raises(UsageError, match="the loss must be"):
        diagnose(result, torch.tensor([0.0, -1.0]))


def test_a_function_that_runs_backward_needs_no_loss() -> None:
    model = nn.Linear(2, 1)

    def step(x: Tensor) -> None:
        model(x).mean().backward()

    assert diagnose(step, torch.ones(3, 2), model=model) is None


class Moving(nn.Module):
    """Changes its buffer in one of the ways that Python and torch allow."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 1)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "rebinds":
            self.mean = self.mean * 0.9
        elif self.how == "in place":
            self.mean.mul_(0.9)
        elif self.how == "exchanges its data":
            self.mean.data = self.mean.data * 0.9
        elif self.how == "grows":
            self.mean = torch.cat([self.mean, self.mean])
        elif self.how == "registers another":
            self.register_buffer("late", torch.ones(2))
        elif self.how == "drops it":
            del self.mean
            self.register_buffer("mean", None)
        else:
            self.mean = x.detach()
        return self.layer(x)


@pytest.mark.parametrize("factor", [1.0, math.nan])
@pytest.mark.parametrize("draws", [False, True], ids=["", "draws its own data"])
@pytest.mark.parametrize(
    "how",
    [
        "rebinds",
        "in place",
        "exchanges its data",
        "grows",
        "registers another",
        "drops it",
        "keeps its input",
    ],
)
def test_every_buffer_is_the_same_object_afterwards(how: str, draws: bool, factor: float) -> None:
    """Also if the function draws from an iterator, when other objects within its reach are not inspected."""
    model, x = Moving(how), torch.randn(5, 4)
    data = itertools.repeat(x)
    mean, pointer, batch = model.mean, model.mean.data_ptr(), x.clone()

    def fn(x: Tensor) -> Tensor:
        loss: Tensor = model(next(data) if draws else x).mean() * factor
        return loss

    diagnose(fn, x, model=model)
    assert dict(model.named_buffers()).keys() == {"mean"}
    assert model.mean is mean
    assert model.mean.data_ptr() == pointer
    assert torch.equal(model.mean, torch.ones(3))
    assert torch.equal(x, batch)


# --- what it says is true --------------------------------------------------------------------------------------------


class DividedByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        ctx.save_for_backward(by)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.saved_tensors[0], None


def test_an_op_of_a_custom_backward_is_not_called_the_backward_of_an_op() -> None:
    model, by = nn.Linear(4, 1), torch.ones(6, 1)
    by[3] = 0.0

    cause = diagnose(lambda x: (DividedByHand.apply(model(x), by) * by).mean(), torch.randn(6, 4), model=model)

    assert cause is not None
    assert (cause.phase, cause.op, cause.node) == ("backward", "aten.div", "DividedByHandBackward")
    assert cause.headline == "NaN gradient, born in aten.div in a custom backward or hook"
    # The division itself failed, on what the line shows: nothing arrived from a further op, and no `where` is involved.
    assert cause.name == "division_by_zero"
    assert not any("incoming gradient" in text for text in cause.inputs)


def test_terms_on_one_line_are_told_apart_by_their_expressions() -> None:
    model = linear()

    def summed(x: Tensor) -> Tensor:
        out = model(x)
        return (out * 0).sum().log() + 0.5 * F.mse_loss(out, out.detach() + 1)

    cause = diagnose(summed, torch.randn(3, 4), model=model)

    assert cause is not None
    assert [term.partition(" ")[2] for term in cause.terms] == [
        "(out * 0).sum().log() Inf",
        "F.mse_loss(out, out.detach() + 1) 1",
    ]


def test_a_sum_inside_one_call_is_one_term() -> None:
    model, labels = linear(), torch.tensor([0, 1, 2, 0, 1, 2])

    def smoothed(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x).sqrt(), labels, label_smoothing=0.1)

    cause = diagnose(smoothed, torch.randn(6, 4), model=model)

    assert cause is not None
    assert cause.op == "aten.sqrt"
    assert cause.terms == ()


def test_a_zero_that_a_weight_made_is_not_called_a_probability_of_zero() -> None:
    model, chosen = linear(), torch.zeros(6, 1).long()

    def weighted(x: Tensor, weight: Tensor) -> Tensor:
        return -torch.log(model(x).softmax(-1).gather(1, chosen).squeeze(1) * weight).mean()

    weight = torch.ones(6)
    weight[1] = 0.0
    cause = diagnose(weighted, torch.randn(6, 4), weight, model=model)

    assert cause is not None
    assert cause.name == "log_of_zero"


def test_a_log_whose_derivative_alone_hurts_is_not_called_an_entropy() -> None:
    scale = nn.Parameter(torch.ones(3))

    def squashed(x: Tensor) -> Tensor:
        return ((x * scale).abs() * 2.0).log().tanh().mean()

    cause = diagnose(squashed, torch.tensor([[1.0, 2.0, 0.0]]))

    assert cause is not None
    assert cause.op == "aten.log"
    assert cause.name != "entropy_at_zero"
