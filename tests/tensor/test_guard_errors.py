"""Invalid use is refused before the first step, or at the call, with a message that says what to do."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import assert_same, loss_of, make_batches, make_model, snapshot

import steadygrad
from steadygrad import (
    ConfigError,
    FixedNorm,
    Guard,
    GuardConfig,
    MeasureConfig,
    SteadygradError,
    UnsupportedError,
    UsageError,
    ZClip,
)
from steadygrad.config import Implementation


def make_guard(**settings: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, Guard]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, Guard(model, optimizer, **settings)


def assert_complete(error: BaseException, *parts: str) -> None:
    """Assert that the error is ours and its message has every part."""
    assert isinstance(error, SteadygradError)
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{missing} not in {error}"


# --- model and optimizer, before the first step ---------------------------------------------------------------------


def test_a_model_without_parameters_is_refused() -> None:
    elsewhere = nn.Linear(2, 2)
    with pytest.raises(UsageError) as caught:
        Guard(nn.ReLU(), torch.optim.SGD(elsewhere.parameters(), lr=0.1))
    assert_complete(caught.value, "ReLU has no parameters", "nothing to train")


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = make_model(), copy.deepcopy(make_model())
    with pytest.raises(UsageError) as caught:
        Guard(model, torch.optim.AdamW(other.parameters()))
    assert_complete(caught.value, "AdamW shares no parameter with Sequential", "another model", "parameters()")


def test_one_optimizer_of_another_model_among_good_ones_is_refused() -> None:
    model, other = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.RMSprop(other.parameters())]
    with pytest.raises(UsageError, match="RMSprop shares no parameter"):
        Guard(model, optimizers)


def test_a_model_whose_move_replaced_its_parameters_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("meta")  # like between two devices that cannot share a tensor: the module gets new Parameters
    with pytest.raises(UsageError) as caught:
        Guard(model, optimizer)
    assert_complete(caught.value, "SGD shares no parameter", "moved to another device later")


def test_a_move_that_keeps_the_parameters_is_accepted() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double()
    guard = Guard(model, optimizer)
    x, y = make_batches(1)[0]
    guard.step(loss_of(model), (x.double(), y))
    assert guard.last is not None
    assert not guard.last.skipped


@pytest.mark.parametrize(
    "model", [None, "model", lambda x: x, torch.ones(3)], ids=["None", "str", "function", "tensor"]
)
def test_a_model_that_is_not_a_module_is_refused(model: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Guard(model, torch.optim.SGD(make_model().parameters(), lr=0.1))
    assert_complete(caught.value, "must be a torch.nn.Module", type(model).__name__)


@pytest.mark.parametrize("optimizer", [None, "adam", [], [None], SimpleNamespace(step=print, param_groups=[])])
def test_an_optimizer_that_is_not_torchs_is_refused(optimizer: Any) -> None:
    with pytest.raises(UsageError, match="must be a torch optimizer or a list of them"):
        Guard(make_model(), optimizer)


def test_lbfgs_is_refused_by_name() -> None:
    model = make_model()
    with pytest.raises(UnsupportedError) as caught:
        Guard(model, torch.optim.LBFGS(model.parameters()))
    assert_complete(caught.value, "LBFGS", "closure", "first-order optimizer", "GradientHealthMonitor")


def pretend(name: str, module: str, *bases: type) -> type:
    """A class with the name and description of the real one, which is not installed here: only the name is checked."""
    return type(name, bases or (object,), {"__module__": module})


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("DeepSpeedEngine", "deepspeed.runtime.engine", ("Guard.from_deepspeed(engine)", "DistributedDataParallel")),
        (
            "PipelineEngine",
            "deepspeed.runtime.pipe.engine",
            ("Guard.from_deepspeed(engine)", "DistributedDataParallel"),
        ),
        ("GPTModel", "megatron.core.models.gpt", ("--check-for-nan-in-loss-and-grad", "DistributedDataParallel")),
    ],
)
@pytest.mark.parametrize("derived", [False, True], ids=["itself", "a subclass"])
def test_an_engine_is_refused_by_name_with_advice(
    name: str, module: str, expected: tuple[str, ...], derived: bool
) -> None:
    kind = pretend(name, module, nn.Linear)
    if derived:
        kind = pretend("MyEngine", "my.code", kind)
    model = kind(3, 2)
    with pytest.raises(UnsupportedError) as caught:
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_complete(caught.value, f"{kind.__name__} cannot be guarded", *expected)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("DeepSpeedZeroOptimizer", "deepspeed.runtime.zero.stage_1_and_2"),
        ("DistributedOptimizer", "megatron.core.optimizer.distrib_optimizer"),
    ],
)
def test_an_engines_optimizer_is_refused_by_name(name: str, module: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} cannot be guarded"):
        Guard(make_model(), pretend(name, module)())


def test_a_class_that_only_shares_a_name_is_not_refused() -> None:
    kind = pretend("DeepSpeedEngine", "my.experiments", nn.Linear)
    model = kind(3, 2)
    Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))


# --- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
@pytest.mark.parametrize("strategy", [FixedNorm, ZClip])
def test_a_nonpositive_clip_threshold_is_refused(strategy: type, max_norm: float) -> None:
    with pytest.raises(ConfigError) as caught:
        make_guard(config=GuardConfig(clip=strategy(max_norm=max_norm)))
    assert_complete(caught.value, f"{strategy.__name__}.max_norm", f"got {max_norm!r}", "Use 1.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a kernel where it cannot run")
def test_an_unsupported_kernel_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError) as caught:
        make_guard(config=GuardConfig(measure=MeasureConfig(implementation=Implementation.TRITON)))
    assert_complete(caught.value, "MeasureConfig.implementation is 'triton'", "Use 'auto'")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"config": "guard.yaml"}, ("must be a GuardConfig, got 'guard.yaml'", "GuardConfig.load(path)")),
        ({"config": {"clip": None}}, ("must be a GuardConfig", "GuardConfig.from_dict(values)")),
        ({"scaler": 3}, ("must be a torch.amp.GradScaler or None, got int",)),
        ({"run_dir": ""}, ("run_dir must be the path of a folder or None, got ''",)),
        ({"run_dir": 3}, ("run_dir must be the path of a folder or None, got 3",)),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        make_guard(**given)
    assert_complete(caught.value, *expected)


def test_a_scheduler_and_an_ema_without_a_step_are_refused() -> None:
    with pytest.raises(UsageError, match=r"scheduler must be .* got int"):
        make_guard(scheduler=3)
    with pytest.raises(UsageError) as caught:
        make_guard(ema=object())
    assert_complete(caught.value, "update_parameters(model)", "AveragedModel")


# --- the loss -------------------------------------------------------------------------------------------------------

BAD_RESULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a vector": (lambda model, x: model(x).square().mean(1), ("must be a scalar", "(8,)", "loss.mean()")),
    "an empty tensor": (lambda model, x: model(x)[:0].sum(0), ("must be a scalar", "(3,)")),
    "detached": (lambda model, x: model(x).mean().detach(), ("has no graph", "detached", "no_grad")),
    "a number": (lambda model, x: model(x).mean().item(), ("must be a tensor, got float", "not loss.item()")),
    "None": (lambda model, x: None, ("must be a tensor, got NoneType",)),
    "a dict without loss": (lambda model, x: {"a": 1, "b": 2}, ("dict without 'loss'", "a, b")),
    "a dict whose loss is a number": (lambda model, x: {"loss": 1.0}, ("must be a tensor, got float",)),
    "an empty tuple": (lambda model, x: (), ("must be a tensor, got tuple",)),
    "a tuple without a loss at the start": (lambda model, x: (model(x), 1), ("must be a scalar", "(8, 3)")),
    "an object whose loss is None": (lambda model, x: SimpleNamespace(loss=None), ("got NoneType",)),
}


@pytest.mark.parametrize(("result", "expected"), BAD_RESULTS.values(), ids=BAD_RESULTS.keys())
@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_result_without_a_loss_is_refused(result: Any, expected: tuple[str, ...], call: str) -> None:
    model, optimizer, guard = make_guard()
    before = snapshot(model, optimizer)
    x, _ = make_batches(1)[0]
    with pytest.raises(UsageError) as caught:
        getattr(guard, call)(lambda: result(model, x))
    assert_complete(caught.value, *expected)
    assert_same(before, snapshot(model, optimizer))
    assert guard.last is None


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (torch.zeros(3, requires_grad=True) * 1, ("must be a scalar", "(3,)", "loss.mean()")),
        (torch.tensor(1.0), ("has no graph",)),
        (1.0, ("must be a tensor, got float",)),
        ("loss", ("must be a tensor, got str",)),
        ({"loss": torch.tensor(1.0)}, ("must be a tensor, got dict",)),
    ],
)
def test_an_untrainable_loss_is_refused(loss: Any, expected: tuple[str, ...]) -> None:
    _, _, guard = make_guard()
    with pytest.raises(UsageError) as caught:
        guard.step(loss)
    assert_complete(caught.value, *expected)


def test_a_loss_after_its_backward_is_refused_and_the_next_step_is_complete() -> None:
    model, optimizer, guard = make_guard()
    batch = make_batches(1)[0]
    loss = loss_of(model)(batch)
    loss.backward()
    before = snapshot(model, optimizer)
    with pytest.raises(UsageError) as caught:
        guard.step(loss)
    assert_complete(caught.value, "backward has already run", "call guard.step() without the loss")
    assert_same(before, snapshot(model, optimizer))
    guard.step(loss_of(model)(batch))
    assert guard.num_steps == 1


def test_arguments_next_to_a_loss_are_refused() -> None:
    model, _, guard = make_guard()
    batch = make_batches(1)[0]
    with pytest.raises(UsageError, match="arguments were passed with a loss"):
        guard.step(loss_of(model)(batch), batch)


def test_a_refused_result_does_not_count_as_a_step() -> None:
    model, _, guard = make_guard()
    with pytest.raises(UsageError):
        guard.step(lambda: None)
    guard.step(loss_of(model), make_batches(1)[0])
    assert guard.last is not None
    assert (guard.last.step, guard.last.num_microbatches) == (0, 1)


def test_an_error_of_the_user_passes_through_unchanged() -> None:
    _, _, guard = make_guard()

    def broken(batch: Any) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        guard.step(broken, make_batches(1)[0])


# --- the gradients --------------------------------------------------------------------------------------------------


def test_a_step_without_any_gradient_is_refused() -> None:
    _, _, guard = make_guard()
    with pytest.raises(UsageError) as caught:
        guard.step()
    assert_complete(caught.value, "no parameter of the optimizer has a gradient", "Run backward before guard.step()")


def test_a_loss_that_reaches_no_parameter_of_the_optimizer_is_refused() -> None:
    _, _, guard = make_guard()
    stranger = torch.ones(3, requires_grad=True)
    with pytest.raises(UsageError, match="depends on the model's parameters"):
        guard.step(stranger.sum())


def test_a_guard_continues_after_a_step_without_gradients() -> None:
    model, _, guard = make_guard()
    with pytest.raises(UsageError):
        guard.step()
    guard.step(loss_of(model), make_batches(1)[0])
    assert guard.last is not None
    assert guard.last.step == 0


def make_frozen(dtype: torch.dtype) -> tuple[nn.Module, Guard]:
    """A model with a parameter of an unusual dtype, which the optimizer also holds."""
    model = make_model()
    model.register_parameter("table", nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False))
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_integer_parameter_that_never_gets_a_gradient_does_no_harm() -> None:
    model, guard = make_frozen(torch.int64)
    guard.step(loss_of(model), make_batches(1)[0])
    assert guard.last is not None
    assert not guard.last.skipped


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float8_e4m3fn])
def test_a_gradient_of_an_unsupported_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    model, guard = make_frozen(dtype)
    model.table.grad = torch.zeros(4, dtype=dtype)
    loss_of(model)(make_batches(1)[0]).backward()
    before = snapshot(model)
    with pytest.raises(UnsupportedError) as caught:
        guard.step()
    assert_complete(caught.value, "'table'", str(dtype), "float32, bfloat16, float16 or float64")
    assert_same(before, snapshot(model))


class DTensor(Tensor):
    """Only the name is checked: the real one needs a process group."""


def test_a_sharded_gradient_is_refused_by_name() -> None:
    model, _, guard = make_guard()
    loss_of(model)(make_batches(1)[0]).backward()
    assert model[2].weight.grad is not None
    model[2].weight.grad = model[2].weight.grad.as_subclass(DTensor)
    before = snapshot(model)
    with pytest.raises(UnsupportedError) as caught:
        guard.step()
    assert_complete(caught.value, "'2.weight'", "DTensor", "DistributedDataParallel")
    assert_same(before, snapshot(model))


# --- a closed guard -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda guard, model: guard.step(loss_of(model), make_batches(1)[0]),
        lambda guard, model: guard.step(loss_of(model)(make_batches(1)[0])),
        lambda guard, model: guard.step(),
        lambda guard, model: guard.backward(loss_of(model), make_batches(1)[0]),
        lambda guard, model: guard.validate(1.0),
        lambda guard, model: guard.end_epoch(),
    ],
    ids=["step fn", "step loss", "step", "backward", "validate", "end_epoch"],
)
def test_a_closed_guard_refuses_further_steps(call: Any) -> None:
    model, optimizer, guard = make_guard()
    guard.step(loss_of(model), make_batches(1)[0])
    guard.close()
    before = snapshot(model, optimizer)
    with pytest.raises(UsageError) as caught:
        call(guard, model)
    assert_complete(caught.value, "this guard is closed", "Create a new one")
    assert_same(before, snapshot(model, optimizer))


def test_a_closed_guard_can_be_read_and_closed_again() -> None:
    model, _, guard = make_guard()
    guard.step(loss_of(model), make_batches(1)[0])
    guard.close()
    guard.close()
    assert guard.stats()["num_steps"] == 1
    assert guard.health()["overall_healthy"]
    assert guard.state_dict()["step"] == 1


# --- states ---------------------------------------------------------------------------------------------------------


def test_a_state_of_an_unknown_version_is_refused() -> None:
    _, _, guard = make_guard()
    with pytest.raises(UsageError, match=r"does not know this Guard state: version 99"):
        guard.load_state_dict({**guard.state_dict(), "version": 99})


def test_an_invalid_state_or_number_is_refused_by_name() -> None:
    _, _, guard = make_guard()
    with pytest.raises(UsageError, match=r"does not know this Guard state: int"):
        guard.load_state_dict(3)  # type: ignore[arg-type]
    for loss in ("x", None, torch.zeros(2)):
        with pytest.raises(UsageError, match=r"guard.validate\(loss\) was given"):
            guard.validate(loss)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"guard.log\(accuracy=...\) was given 'x'"):
        guard.log(accuracy="x")  # type: ignore[arg-type]


def test_a_state_of_another_clip_strategy_is_refused() -> None:
    model, _, fixed = make_guard(config=GuardConfig(clip=FixedNorm()))
    model, _, adaptive = make_guard(config=GuardConfig(clip=ZClip()))
    adaptive.step(loss_of(model), make_batches(1)[0])
    state = {**fixed.state_dict(), "clip": {"norms": torch.zeros(3)}}
    with pytest.raises(UsageError, match="clip strategy"):
        adaptive.load_state_dict(state)


# --- several ranks --------------------------------------------------------------------------------------------------

RANK_PROGRAM = """
import sys
import torch
from torch import distributed, nn
from steadygrad import Guard, UnsupportedError

rank, world_size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=world_size)
model = nn.Linear(3, 2)
{program}
distributed.destroy_process_group()
"""
SHARD = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
guard.step(lambda: model(torch.ones(4, 3)).mean())
print("alone:", guard.last.skipped)
model = distribute_module(model, init_device_mesh("cpu", (1,)))
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
try:
    guard.step(lambda: model.weight.square().sum().full_tensor())
    print("accepted")
except UnsupportedError as error:
    print("refused:", error)
"""


def run_ranks(program: str, world_size: int, meeting: Path) -> list[str]:
    """Return what each rank printed."""
    env = {**os.environ, "PYTHONPATH": str(Path(steadygrad.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    code = RANK_PROGRAM.replace("{program}", program)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(world_size), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(world_size)
    ]
    results = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, results
    return [out.strip() for out, _ in results]


needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed here")


@needs_distributed
def test_a_process_group_of_one_and_an_unsharded_model_are_accepted(tmp_path: Path) -> None:
    alone, sharded = run_ranks(SHARD, 1, tmp_path / "meeting")[0].splitlines()
    assert alone == "alone: False"
    assert sharded == "accepted"


def test_a_scaler_given_the_guard_says_what_to_write() -> None:
    model, _, guard = make_guard()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(make_batches(1)[0][0]).square().mean()).backward()

    with pytest.raises(AttributeError, match=r"Guard\(model, optimizer, scaler=scaler\).*guard\.step\(loss\)"):
        scaler.step(guard)  # type: ignore[arg-type]
    assert not hasattr(guard, "param_groups")


def test_an_optimizer_is_refused_as_a_scheduler() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    # It has step() too, and would move the weights a second time in every step.
    with pytest.raises(UsageError, match=r"scheduler must be .* got SGD"):
        Guard(model, optimizer, scheduler=optimizer)
