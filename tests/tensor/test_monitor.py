"""GradientHealthMonitor and ActivationMonitor compared with plain float64 torch, and their documented messages."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad.errors import ConfigError, UsageError
from steadygrad.measure import Transfer
from steadygrad.monitor import ActivationMonitor, GradientHealthMonitor

KEYS = {
    "global_grad_norm",
    "max_grad_norm",
    "min_grad_norm",
    "mean_grad_norm",
    "has_nan",
    "has_inf",
    "layer_stats",
    "recommendations",
    "param_count",
    "params_with_grads",
}


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def after_backward(model: nn.Module, scale: float = 1.0) -> nn.Module:
    (model(torch.randn(8, 6)).square().sum() * scale).backward()
    return model


def with_gradients(*gradients: list[float]) -> nn.ParameterDict:
    """Return a model whose parameters p0, p1, ... have exactly these gradients."""
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.zeros(len(g))) for i, g in enumerate(gradients)})
    for parameter, gradient in zip(model.values(), gradients):
        parameter.grad = torch.tensor(gradient)
    return model


def reference_norms(model: nn.Module) -> dict[str, float]:
    return {
        name: torch.linalg.vector_norm(p.grad.to_dense().double()).item()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the length of each vector copied to the host."""
    lengths: list[int] = []
    send = Transfer.send

    def counting(self: Transfer, numbers: Tensor) -> Any:
        lengths.append(numbers.numel())
        return send(self, numbers)

    monkeypatch.setattr(Transfer, "send", counting)
    return lengths


# --- check_gradients ----------------------------------------------------------------------------------------------


def test_a_check_has_exactly_the_documented_keys() -> None:
    stats = GradientHealthMonitor(after_backward(make_model())).check_gradients()

    assert set(stats) == KEYS
    assert stats["param_count"] == stats["params_with_grads"] == 4


def test_norms_equal_plain_float64_torch() -> None:
    model = after_backward(make_model())
    norms = reference_norms(model)

    stats = GradientHealthMonitor(model).check_gradients()

    # fp32 sums of a hundred squares: a few units in the last place.
    close = lambda value: pytest.approx(value, rel=1e-6)  # noqa: E731
    assert stats["global_grad_norm"] == close(math.hypot(*norms.values()))
    assert stats["max_grad_norm"] == close(max(norms.values()))
    assert stats["min_grad_norm"] == close(min(norms.values()))
    assert stats["mean_grad_norm"] == close(sum(norms.values()) / 4)
    assert {name: layer["norm"] for name, layer in stats["layer_stats"].items()} == close(norms)


def test_layer_stats_describe_each_gradient() -> None:
    layer = GradientHealthMonitor(with_gradients([3.0, 0.0, -4.0, 0.0])).check_gradients()["layer_stats"]["p0"]

    assert layer == {
        "norm": 5.0,
        "rms": 2.5,
        "max_abs": 4.0,
        "zero_share": 0.5,
        "num_nonfinite": 0,
        "num_nan": 0,
        "shape": (4,),
    }


def test_without_detailed_logging_there_are_no_layer_stats() -> None:
    monitor = GradientHealthMonitor(after_backward(make_model()), enable_detailed_logging=False)

    assert monitor.check_gradients()["layer_stats"] == {}


def test_gradients_of_several_dtypes_and_layouts_are_measured_together() -> None:
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(50, 4, sparse=True),
            "narrow": nn.Linear(4, 8).bfloat16(),
            "wide": nn.Linear(8, 2).double(),
        }
    )
    hidden = model["narrow"](model["table"](torch.tensor([1, 7, 7])).bfloat16())
    model["wide"](hidden.double()).square().sum().backward()
    norms = reference_norms(model)

    stats = GradientHealthMonitor(model).check_gradients()

    assert stats["global_grad_norm"] == pytest.approx(math.hypot(*norms.values()), rel=1e-6)
    assert stats["layer_stats"]["table.weight"]["zero_share"] >= 48 / 50


def test_frozen_parameters_are_not_counted_and_missing_gradients_are_reported() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 1e9)
    model[2].bias.grad = torch.ones(3)

    stats = GradientHealthMonitor(model).check_gradients()

    assert (stats["param_count"], stats["params_with_grads"]) == (3, 1)
    assert stats["global_grad_norm"] == pytest.approx(math.sqrt(3))
    (note,) = stats["recommendations"]
    assert "2 of 3 parameters have no gradient: 0.bias, 2.weight." in note


def test_without_any_gradient_norms_are_zero_and_the_advice_is_to_call_backward() -> None:
    stats = GradientHealthMonitor(make_model()).check_gradients()

    assert [stats[f"{kind}_grad_norm"] for kind in ("global", "max", "min", "mean")] == [0.0] * 4
    assert (stats["has_nan"], stats["has_inf"], stats["params_with_grads"]) == (False, False, 0)
    (advice,) = stats["recommendations"]
    assert "No parameter has a gradient" in advice
    assert "backward()" in advice


@pytest.mark.parametrize(
    ("gradient", "norm", "has_nan", "has_inf"),
    [
        ([1.0, math.nan], math.nan, True, False),
        ([1.0, -math.inf], math.inf, False, True),
        ([math.inf, math.nan], math.nan, True, True),
    ],
)
def test_nan_and_inf_are_counted_separately_and_together(
    gradient: list[float], norm: float, has_nan: bool, has_inf: bool
) -> None:
    stats = GradientHealthMonitor(with_gradients([3.0, 4.0], gradient)).check_gradients()

    assert (stats["has_nan"], stats["has_inf"]) == (has_nan, has_inf)
    assert stats["global_grad_norm"] == pytest.approx(norm, nan_ok=True)
    assert stats["max_grad_norm"] == pytest.approx(norm, nan_ok=True)
    assert stats["min_grad_norm"] == 5.0
    critical = [advice for advice in stats["recommendations"] if "CRITICAL" in advice]
    assert ["NaN" in advice for advice in critical] == [True] * has_nan + [False] * has_inf
    assert all("p1!" in advice for advice in critical)


def test_a_huge_finite_gradient_is_exploding_and_not_inf() -> None:
    stats = GradientHealthMonitor(with_gradients([1e25, 1e25])).check_gradients()

    assert not stats["has_inf"]
    assert stats["global_grad_norm"] == pytest.approx(math.sqrt(2) * 1e25)
    assert stats["recommendations"][0].startswith("⚠️ Exploding gradients detected (norm=1.4e+25)!")


def test_the_advice_has_the_documented_wording() -> None:
    stats = GradientHealthMonitor(with_gradients([125.43], [3.2e-8])).check_gradients()

    assert stats["recommendations"] == [
        "⚠️ Exploding gradients detected (norm=125.43)!\n   Consider: (1) Gradient clipping, (2) Reducing learning rate",
        "⚠️ Vanishing gradients detected (min norm=3.2e-08)!\n"
        "   Consider: (1) Using residual connections, (2) Changing activation functions",
    ]


def test_thresholds_are_strict_and_independent() -> None:
    model = with_gradients([0.5], [8.0])
    at = GradientHealthMonitor(model, vanishing_threshold=0.5, exploding_threshold=math.hypot(0.5, 8.0))
    beyond = GradientHealthMonitor(model, vanishing_threshold=0.51, exploding_threshold=8.0)

    assert at.check_gradients()["recommendations"] == []
    assert len(beyond.check_gradients()["recommendations"]) == 2


def test_a_parameter_without_elements_does_not_vanish() -> None:
    stats = GradientHealthMonitor(with_gradients([3.0, 4.0], [])).check_gradients()

    assert stats["min_grad_norm"] == 5.0
    assert stats["recommendations"] == []


def test_a_check_divides_its_numbers_by_the_loss_scale_but_not_the_gradients() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = model(torch.randn(8, 6)).square().sum()
    scaler.scale(loss).backward()
    scaled = [p.grad.clone() for p in model.parameters()]

    stats = GradientHealthMonitor(model).check_gradients(scaler=scaler)

    assert stats["global_grad_norm"] == pytest.approx(math.hypot(*reference_norms(model).values()) / 1024, rel=1e-6)
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), scaled))


def test_a_disabled_scaler_changes_nothing() -> None:
    monitor = GradientHealthMonitor(with_gradients([3.0, 4.0]))

    assert monitor.check_gradients(scaler=torch.amp.GradScaler("cpu", enabled=False))["global_grad_norm"] == 5.0


@pytest.mark.parametrize("num_layers", [1, 40])
def test_a_check_reads_the_device_once_for_any_number_of_parameters(num_layers: int, sent: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(num_layers)))
    monitor = GradientHealthMonitor(after_backward(model))

    monitor.check_gradients()

    assert len(sent) == 1


def test_a_model_that_changes_after_construction_is_still_measured() -> None:
    model = make_model()
    monitor = GradientHealthMonitor(model)
    monitor.check_gradients()
    model.append(nn.Linear(3, 2)).double()
    model[0].requires_grad_(False)
    model(torch.randn(8, 6, dtype=torch.float64)).sum().backward()

    stats = monitor.check_gradients()

    assert set(stats["layer_stats"]) == {"2.weight", "2.bias", "3.weight", "3.bias"}
    assert stats["global_grad_norm"] == pytest.approx(math.hypot(*reference_norms(model).values()), rel=1e-12)


def test_history_and_counters_are_bounded_and_can_be_reset() -> None:
    model = with_gradients([3.0, 4.0])
    monitor = GradientHealthMonitor(model)
    for _ in range(1005):
        monitor.check_gradients()
    model["p0"].grad[0] = math.nan
    monitor.check_gradients()

    assert (monitor.num_checks, monitor.num_checks_with_nan, monitor.num_checks_with_inf) == (1006, 1, 0)
    assert len(monitor.history["global_norm"]) == 1000
    assert math.isnan(monitor.history["global_norm"][-1])
    monitor.reset_statistics()
    assert (monitor.num_checks, monitor.num_checks_with_nan, len(monitor.history["min_norm"])) == (0, 0, 0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_holds_its_monitor_can_be_copied(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = after_backward(make_model())
    model.monitor = GradientHealthMonitor(model)
    before = model.monitor.check_gradients()["global_grad_norm"]

    twin = duplicate(model)
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)

    assert twin.monitor.check_gradients()["global_grad_norm"] == 0.0
    assert model.monitor.check_gradients()["global_grad_norm"] == before
    assert twin.monitor.num_checks == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("grad_clip_threshold", 0.0),
        ("grad_clip_threshold", math.nan),
        ("vanishing_threshold", -1.0),
        ("vanishing_threshold", 200.0),
        ("exploding_threshold", "100"),
        ("log_frequency", 0),
        ("log_frequency", 1.5),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_value(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"GradientHealthMonitor\.{setting} must .*, got {value!r}\. Use "):
        GradientHealthMonitor(make_model(), **{setting: value})


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter: ReLU"):
        GradientHealthMonitor(nn.ReLU())
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module, got <class 'list'>"):
        GradientHealthMonitor([])  # type: ignore[arg-type]


# --- log_statistics -----------------------------------------------------------------------------------------------


class Board:
    """Keeps the values it gets, like a wandb run."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((values, step))


def test_the_printed_lines_are_the_documented_ones(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = GradientHealthMonitor(with_gradients([125.43], [3.2e-8]))
    stats = monitor.check_gradients() | {"max_grad_norm": 340.12, "mean_grad_norm": 45.67}

    monitor.log_statistics(stats, step=150)

    assert capsys.readouterr().out == (
        "Step 150 - Gradient Health: Global Norm=125.43, Max=340.12, Min=3.2e-08, Mean=45.67\n"
        "\n"
        "⚠️ Exploding gradients detected (norm=125.43)!\n"
        "   Consider: (1) Gradient clipping, (2) Reducing learning rate\n"
        "\n"
        "⚠️ Vanishing gradients detected (min norm=3.2e-08)!\n"
        "   Consider: (1) Using residual connections, (2) Changing activation functions\n"
    )


def test_a_healthy_run_prints_every_log_frequency_steps(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = GradientHealthMonitor(with_gradients([3.0, 4.0]), log_frequency=3)
    for _ in range(7):
        monitor.log_statistics(monitor.check_gradients())

    lines = capsys.readouterr().out.splitlines()

    assert lines == [
        f"Step {step} - Gradient Health: Global Norm=5.00, Max=5.00, Min=5.00, Mean=5.00" for step in (0, 3, 6)
    ]


@pytest.mark.parametrize("gradient", [1e-9, 101.0, math.nan, math.inf])
def test_problems_are_printed_at_every_step(gradient: float, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = GradientHealthMonitor(with_gradients([gradient]))
    for step in (1, 2):
        monitor.log_statistics(monitor.check_gradients(), step=step)

    out = capsys.readouterr().out

    assert out.count("Gradient Health") == 2
    assert out.count("Consider: ") >= 2


def test_idle_parameters_are_not_printed_at_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = with_gradients([3.0, 4.0], [1.0])
    model["p1"].grad = None
    monitor = GradientHealthMonitor(model)
    for step in (1, 100):
        monitor.log_statistics(monitor.check_gradients(), step=step)

    out = capsys.readouterr().out

    assert out.count("Gradient Health") == 1
    assert "Step 100 " in out
    assert "1 of 2 parameters have no gradient: p1." in out


def test_a_terminal_without_unicode_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monitor = GradientHealthMonitor(with_gradients([math.nan]))

    monitor.log_statistics(monitor.check_gradients(), step=1)

    terminal.flush()
    assert b"CRITICAL: NaN gradients detected in p0!" in terminal.buffer.getvalue()


def test_a_logger_gets_the_documented_keys_at_every_call() -> None:
    board, monitor = Board(), GradientHealthMonitor(with_gradients([3.0, 4.0], [math.inf]))

    monitor.log_statistics(monitor.check_gradients(), step=7, logger=board)

    ((values, step),) = board.rows
    assert step == 7
    top = {key: value for key, value in values.items() if key.startswith("grad/")}
    assert top == {
        "grad/global_norm": math.inf,
        "grad/max_norm": math.inf,
        "grad/min_norm": 5.0,
        "grad/has_nan": 0,
        "grad/has_inf": 1,
    }
    layers = {key for key in values if key.startswith("grad_layer/")}
    assert layers == {
        f"grad_layer/{name}/{key}"
        for name in ("p0", "p1")
        for key in ("norm", "rms", "max_abs", "zero_share", "num_nonfinite", "num_nan")
    }
    assert values["grad_layer/p0/norm"] == 5.0
    assert len(values) == len(top) + len(layers)


def test_a_logger_without_step_gets_the_numbers_too() -> None:
    class Plain:
        def log(self, values: dict[str, float]) -> None:
            self.values = values

    plain, monitor = Plain(), GradientHealthMonitor(with_gradients([3.0, 4.0]), enable_detailed_logging=False)

    monitor.log_statistics(monitor.check_gradients(), step=1, logger=plain)

    assert plain.values["grad/global_norm"] == 5.0


def test_a_failing_logger_is_reported_once_and_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        calls = 0

        def log(self, values: dict[str, float], step: int) -> None:
            self.calls += 1
            raise ConnectionError("no route to the server")

    failing, board, monitor = Failing(), Board(), GradientHealthMonitor(with_gradients([3.0, 4.0]))
    with caplog.at_level(logging.WARNING, logger="steadygrad"):
        for step in range(3):
            monitor.log_statistics(monitor.check_gradients(), step=step, logger=failing)
    monitor.log_statistics(monitor.check_gradients(), step=3, logger=board)

    assert failing.calls == 1
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "Failing.log failed at step 0 with ConnectionError('no route to the server')"
    ]
    assert len(board.rows) == 1


def test_an_object_without_log_is_refused() -> None:
    monitor = GradientHealthMonitor(with_gradients([3.0]))

    with pytest.raises(UsageError, match=r"needs an object with \.log\(dict, step=\.\.\.\), got str"):
        monitor.log_statistics(monitor.check_gradients(), logger="wandb")


# --- apply_gradient_clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.1, 1.0])
def test_clipping_equals_clip_grad_norm(dtype: torch.dtype, max_norm: float) -> None:
    model = make_model()
    after_backward(model, scale=50.0).to(dtype)
    twin = copy.deepcopy(model)
    for parameter, original in zip(twin.parameters(), model.parameters()):
        parameter.grad = original.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)

    norm = GradientHealthMonitor(model).apply_gradient_clipping(max_norm)

    # In bfloat16 torch rounds each norm and the coefficient to 8 bits; ours are float64.
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    assert norm == pytest.approx(expected.item(), rel=tolerance)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=0)


def test_gradients_below_the_threshold_stay_bit_identical() -> None:
    model = after_backward(make_model())
    before = [p.grad.clone() for p in model.parameters()]

    GradientHealthMonitor(model).apply_gradient_clipping(1e6)

    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before))


def test_clipping_uses_the_threshold_of_the_constructor_and_covers_sparse_gradients() -> None:
    model = nn.ModuleList([nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)])
    (100 * model[1](model[0](torch.tensor([1, 7, 7])))).sum().backward()
    before = reference_norms(model)

    norm = GradientHealthMonitor(model, grad_clip_threshold=0.5).apply_gradient_clipping()

    assert norm == pytest.approx(math.hypot(*before.values()), rel=1e-6)
    after = {name: value * 0.5 / norm for name, value in before.items()}
    assert reference_norms(model) == pytest.approx(after, rel=1e-5)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_clipping_never_spreads_a_nonfinite_value(poison: float) -> None:
    model = with_gradients([300.0, 400.0], [1.0, poison])

    norm = GradientHealthMonitor(model).apply_gradient_clipping(1.0)

    assert norm == pytest.approx(poison, nan_ok=True)
    assert model["p0"].grad.tolist() == [300.0, 400.0]
    assert model["p1"].grad.tolist() == pytest.approx([1.0, poison], nan_ok=True)


def test_clipping_without_gradients_returns_zero_and_a_bad_threshold_is_refused() -> None:
    monitor = GradientHealthMonitor(make_model())

    assert monitor.apply_gradient_clipping() == 0.0
    with pytest.raises(ConfigError, match=r"max_norm\) must be above 0, got -1"):
        monitor.apply_gradient_clipping(-1)


# --- get_gradient_flow_summary ------------------------------------------------------------------------------------


def test_the_flow_summary_groups_parameters_by_gradient_health() -> None:
    model = with_gradients([1e-9], [3.0, 4.0], [101.0], [math.inf], [math.nan])

    flow = GradientHealthMonitor(model).get_gradient_flow_summary()

    assert flow == {
        "layers_with_vanishing_grads": [("p0", pytest.approx(1e-9))],
        "layers_with_healthy_grads": [("p1", 5.0)],
        "layers_with_exploding_grads": [
            ("p2", 101.0),
            ("p3", math.inf),
            ("p4", pytest.approx(math.nan, nan_ok=True)),
        ],
    }


def test_the_flow_summary_reuses_the_last_check_without_another_read(sent: list[int]) -> None:
    model = with_gradients([3.0, 4.0])
    monitor = GradientHealthMonitor(model, enable_detailed_logging=False)
    monitor.check_gradients()
    model["p0"].grad.zero_()

    assert monitor.get_gradient_flow_summary()["layers_with_healthy_grads"] == [("p0", 5.0)]
    assert len(sent) == 1


# --- ActivationMonitor --------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Returns a given output."""

    def forward(self, x: Any) -> Any:
        return x


class CountHostReads(TorchDispatchMode):
    """Counts operations that make the host wait for one number."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_activation_statistics_equal_plain_float64_torch_over_all_batches() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
    batches = [torch.randn(size, 6) for size in (8, 5)]
    with ActivationMonitor(model) as monitor:
        outputs = torch.cat([model(batch).flatten() for batch in batches]).double()

    stats = monitor.get_statistics()["1"]

    assert stats == {
        "mean": pytest.approx(outputs.mean().item(), rel=1e-12),
        "std": pytest.approx(outputs.std(correction=0).item(), rel=1e-12),
        "max_abs": outputs.abs().max().item(),
        "sparsity": (outputs.abs() <= 1e-6).double().mean().item(),
        "saturation": None,
        "num_nonfinite": 0,
        "numel": 13 * 16,
        "num_calls": 2,
    }


def test_nonfinite_activations_are_counted_and_excluded_from_the_moments() -> None:
    model = Given()
    with ActivationMonitor(model) as monitor:
        model(torch.tensor([[1.0, math.nan, 3.0, -math.inf]]))

    stats = monitor.get_statistics()[""]

    assert (stats["num_nonfinite"], stats["mean"], stats["max_abs"]) == (2, 2.0, 3.0)
    assert stats["std"] == pytest.approx(1.0)
    assert monitor.detect_dead_neurons() == {"": 0.0}


def test_an_output_larger_than_a_chunk_counts_as_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadygrad.monitor.activations.PIECE", 64)
    values, model = torch.randn(37, 10), Given()
    values[:, 3] = 0
    with ActivationMonitor(model) as monitor:
        model(values)

    stats = monitor.get_statistics()[""]

    assert (stats["num_calls"], stats["numel"]) == (1, 370)
    assert stats["std"] == pytest.approx(values.double().std(correction=0).item())
    assert monitor.detect_dead_neurons() == {"": 0.1}


def test_hooks_read_nothing_and_a_query_reads_once(sent: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardtanh(), nn.Flatten(), nn.Linear(64, 2))
    batch = torch.randn(2, 3, 6, 6)
    plain, watched = CountHostReads(), CountHostReads()
    with plain:
        model(batch)
    with ActivationMonitor(model) as monitor, watched:
        model(batch)

    assert watched.num_reads == plain.num_reads
    assert sent == []
    for num_questions, ask in enumerate(
        (monitor.get_statistics, monitor.detect_dead_neurons, monitor.detect_saturated), start=1
    ):
        with CountHostReads() as asked:
            ask()
        assert (len(sent), asked.num_reads) == (num_questions, 0)


def test_a_unit_is_dead_if_no_batch_raises_it_above_the_threshold() -> None:
    model = Given()
    with ActivationMonitor(model) as monitor:
        model(torch.tensor([[0.0, 1e-3, 0.0, -2.0], [0.0, 0.0, 0.0, 0.0]]))
        model(torch.tensor([[0.0, 0.0, 5.0, 0.0]]))

    assert monitor.detect_dead_neurons() == {"": 0.25}
    assert monitor.detect_dead_neurons(threshold=1e-2) == {"": 0.5}
    assert monitor.detect_dead_neurons(threshold=10.0) == {"": 1.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_round_the_threshold(dtype: torch.dtype) -> None:
    above = torch.tensor([[0.0101]], dtype=dtype)
    threshold = above.item() - 1e-7  # the same number in `dtype`
    model = Given()
    with ActivationMonitor(model, zero_threshold=threshold) as monitor:
        model(above)

    assert monitor.get_statistics()[""]["sparsity"] == 0.0
    assert monitor.detect_dead_neurons(threshold) == {"": 0.0}


def test_dead_channels_of_a_convolution_are_found_after_its_relu() -> None:
    model = nn.Sequential(nn.Conv1d(2, 5, 3), nn.ReLU())
    with torch.no_grad():
        model[0].bias[:2] = -1e3
    with ActivationMonitor(model) as monitor:
        model(torch.randn(16, 2, 9))

    assert monitor.detect_dead_neurons() == {"0": 0.0, "1": 0.4}


def test_the_units_of_channels_last_activations_are_in_the_last_dimension() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with torch.no_grad():
        model[0].bias[0] = -1e3
    with ActivationMonitor(model) as monitor:
        model(torch.randn(16, 5, 6, 3))

    assert monitor.detect_dead_neurons()["1"] == 0.25


def test_a_relu_used_at_several_widths_counts_units_for_each() -> None:
    model = Given()
    with ActivationMonitor(model) as monitor:
        model(torch.tensor([[0.0, 1.0]]))
        model(torch.tensor([[0.0, 0.0, 1.0]]))

    assert monitor.detect_dead_neurons() == {"": 0.6}


@pytest.mark.parametrize(
    ("module", "drive"),
    [
        (nn.Tanh(), [9.0, -9.0, 0.1, 0.5]),
        (nn.Sigmoid(), [9.0, -9.0, 0.1, 0.5]),
        (nn.Hardtanh(-3.0, 5.0), [9.0, -9.0, 0.1, 0.5]),
        (nn.ReLU6(), [9.0, -9.0, 2.0, 4.0]),
    ],
)
def test_units_that_stay_at_a_limit_are_saturated(module: nn.Module, drive: list[float]) -> None:
    model = nn.Sequential(module)
    with ActivationMonitor(model) as monitor:
        model(torch.tensor([drive, [-drive[1], -drive[1], drive[2], drive[3]]]))
        model(torch.tensor([drive]))

    assert monitor.detect_saturated() == {"0": 0.5}
    assert monitor.get_statistics()["0"]["saturation"] == 0.5


def test_the_saturation_threshold_is_used_and_one_free_sample_frees_a_unit() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(2, 2))
    with ActivationMonitor(model) as monitor:
        model(torch.atanh(torch.tensor([[0.95, 0.995], [-0.95, 0.995]])))

        assert monitor.detect_saturated() == {"0": 0.5}
        assert monitor.detect_saturated(threshold=0.9) == {"0": 1.0}
        model(torch.zeros(1, 2))

    assert monitor.detect_saturated(threshold=0.9) == {"0": 0.0}


def test_a_custom_bounded_module_can_be_registered() -> None:
    model = Given()
    with ActivationMonitor(model, bounds={Given: (0.0, 10.0)}) as monitor:
        model(torch.tensor([[10.0, 5.0]]))

    assert monitor.detect_saturated() == {"": 0.5}


class WideTanh(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * super().forward(x)


class WideClamp(nn.Hardtanh):
    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * super().forward(x)


@pytest.mark.parametrize(
    ("module", "bounds", "saturation"),
    [
        (WideTanh(), {WideTanh: (-3.0, 3.0)}, 0.5),
        (WideTanh(), {nn.Tanh: (-30.0, 30.0), WideTanh: (-3.0, 3.0)}, 0.5),
        (WideTanh(), {nn.Tanh: (-30.0, 30.0)}, 0.0),
        (WideTanh(), {}, 1.0),
        (WideClamp(), {WideClamp: (-3.0, 3.0)}, 0.5),
        (WideClamp(), {}, 1.0),
        (nn.Hardtanh(), {nn.Hardtanh: (-3.0, 3.0)}, 0.0),
    ],
)
def test_the_range_of_the_nearest_class_counts_and_custom_ranges_come_first(
    module: nn.Module, bounds: dict[type[nn.Module], tuple[float, float]], saturation: float
) -> None:
    with ActivationMonitor(module, bounds=bounds) as monitor:
        module(torch.tensor([[9.0, 0.5]]))

    assert monitor.get_statistics()[""]["saturation"] == saturation


def test_removed_hooks_see_nothing_and_leave_nothing() -> None:
    model = make_model()
    monitor = ActivationMonitor(model)
    monitor.register_hooks()
    monitor.register_hooks()
    model(torch.randn(2, 6))
    monitor.remove_hooks()
    model(torch.randn(2, 6))

    assert {stats["num_calls"] for stats in monitor.get_statistics().values()} == {1}
    assert not any(module._forward_hooks for module in model.modules())
    monitor.reset_statistics()
    assert monitor.get_statistics() == monitor.detect_dead_neurons() == monitor.detect_saturated() == {}


def test_hooks_do_not_keep_the_output_or_its_graph_alive() -> None:
    model = make_model()
    with ActivationMonitor(model) as monitor:
        output = model(torch.randn(2, 6))
        reference = weakref.ref(output)
        del output

        assert reference() is None
        assert monitor.get_statistics()["2"]["num_calls"] == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hooks_do_not_keep_the_memory_of_an_output(dtype: type) -> None:
    memory = np.ones((4, 3), dtype=dtype)
    reference = weakref.ref(memory)
    model = Given()
    with ActivationMonitor(model) as monitor:
        model(torch.from_numpy(memory))
        del memory

        assert reference() is None
        assert monitor.get_statistics()[""]["num_calls"] == 1


def test_watching_changes_neither_outputs_nor_gradients() -> None:
    model, batch = make_model(), torch.randn(4, 6)
    plain = model(batch)
    plain.sum().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    with ActivationMonitor(model):
        watched = model(batch)
        watched.sum().backward()

    assert torch.equal(watched, plain)
    assert torch.equal(model[0].weight.grad, gradient)


@pytest.mark.parametrize(
    "output", [torch.tensor([1, 2]), torch.ones(2, dtype=torch.complex64), None, [], torch.ones(0)]
)
def test_outputs_without_real_numbers_are_ignored(output: Any) -> None:
    model = Given()
    with ActivationMonitor(model) as monitor:
        model(output)

    assert monitor.get_statistics() == {}


@pytest.mark.parametrize("wrap", [lambda x: (x, None), lambda x: [None, x], lambda x: {"n": 3, "y": x}])
def test_the_first_tensor_counts_if_a_module_returns_several_values(wrap: Callable[[Tensor], Any]) -> None:
    model = Given()
    with ActivationMonitor(model) as monitor:
        model(wrap(torch.full((2, 3), 7.0)))

    assert monitor.get_statistics()[""]["mean"] == 7.0


def test_statistics_work_in_no_grad_inference_mode_autocast_and_training() -> None:
    model = make_model()
    contexts = [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()]
    with ActivationMonitor(model) as monitor:
        for context in contexts:
            with context:
                model(torch.randn(2, 6))

    assert monitor.get_statistics()["2"]["num_calls"] == 4


def test_training_only_ignores_eval_mode() -> None:
    model = make_model()
    with ActivationMonitor(model, training_only=True) as monitor:
        model.eval()(torch.randn(2, 6))
        assert monitor.get_statistics() == {}
        model.train()(torch.randn(2, 6))

    assert monitor.get_statistics()["0"]["num_calls"] == 1


def test_a_parametrized_layer_is_a_leaf_and_its_parametrization_is_not() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    with ActivationMonitor(model) as monitor:
        model(torch.randn(2, 6))

    assert list(monitor.get_statistics()) == ["0"]


def test_a_failing_hook_is_reported_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    class Brittle(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.isfinite:
                raise RuntimeError("not today")
            return super().__torch_function__(func, types, args, kwargs)

    model = nn.Sequential(Given(), Given())
    with caplog.at_level(logging.WARNING, logger="steadygrad"), ActivationMonitor(model) as monitor:
        output = model(torch.ones(2, 2).as_subclass(Brittle))

    assert output.shape == (2, 2)
    (record,) = caplog.records
    assert "failed at module '0'" in record.getMessage()
    assert not any(module._forward_hooks for module in model.modules())
    assert monitor.get_statistics() == monitor.detect_dead_neurons() == {}


def test_a_compiled_model_runs_in_one_graph_with_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    batch = torch.randn(2, 6)
    with caplog.at_level(logging.WARNING, logger="steadygrad"), ActivationMonitor(compiled) as monitor:
        assert torch.equal(compiled(batch), model(batch))

    assert "Run the plain model" in caplog.text
    assert {stats["num_calls"] for stats in monitor.get_statistics().values()} == {1}  # the uncompiled call


def test_wrong_settings_of_an_activation_monitor_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero_threshold must not be negative, got -1"):
        ActivationMonitor(nn.ReLU(), zero_threshold=-1)
    with pytest.raises(ConfigError, match=r"bounds\[ReLU\] must be \(low, high\), got \(1, 0\)"):
        ActivationMonitor(nn.ReLU(), bounds={nn.ReLU: (1, 0)})
    with pytest.raises(ConfigError, match=r"detect_saturated\(threshold\) must lie in \(0, 1\], got 1.5"):
        ActivationMonitor(nn.ReLU()).detect_saturated(1.5)
    with pytest.raises(ConfigError, match=r"detect_dead_neurons\(threshold\) must not be negative, got nan"):
        ActivationMonitor(nn.ReLU()).detect_dead_neurons(math.nan)


class NamedLogger:
    """A logger that takes one number at a time."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def log(self, name: str, value: float) -> None:
        self.seen[name] = value


class MetricsLogger:
    """Like Lightning's loggers."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen |= metrics


@pytest.mark.parametrize("kind", [NamedLogger, MetricsLogger])
def test_log_statistics_supports_loggers_by_name_and_lightning_loggers(kind: type[Any]) -> None:
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    monitor, logger = GradientHealthMonitor(model), kind()

    monitor.log_statistics(monitor.check_gradients(), step=4, logger=logger)

    assert logger.seen["grad/global_norm"] > 0


def test_numbers_reach_a_summary_writer_of_tensorboard_at_their_step(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    monitor, writer = GradientHealthMonitor(model), tensorboard.SummaryWriter(tmp_path)

    monitor.log_statistics(monitor.check_gradients(), step=4, logger=writer)
    writer.close()

    (point,) = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("grad/global_norm")
    assert (point.step, point.value) == (4, pytest.approx(math.sqrt(3 * 2**2 + 2**2)))


def test_log_statistics_finds_the_active_wandb_run(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    monitor = GradientHealthMonitor(model)
    with wandb.init(mode="offline", dir=str(tmp_path), project="a") as run:
        for step in (0, 1):  # wandb completes a step when the next one begins
            monitor.log_statistics(monitor.check_gradients(), step=step)
        assert run.summary["grad/global_norm"] > 0
