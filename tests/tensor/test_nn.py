"""Activations, advice, GradientStabilizer and gradient noise: what they compute, and what they refuse."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from steadygrad import Guard
from steadygrad.errors import ConfigError
from steadygrad.nn import (
    GradientNoise,
    GradientStabilizer,
    ImprovedActivations,
    add_gradient_noise,
    get_activation_function_recommendations,
)

ACTIVATIONS = {
    "gelu": F.gelu,
    "swish": F.silu,
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(x.clamp(max=0))),
    "scaled_tanh": lambda x: 1.7159 * torch.tanh(x),
}

# --- activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_an_activation_is_its_formula_with_true_gradients(name: str) -> None:
    activation = getattr(ImprovedActivations, name)
    x = torch.linspace(-4, 4, 9, dtype=torch.float64).add(0.03).requires_grad_()
    torch.testing.assert_close(activation(x), ACTIVATIONS[name](x))
    assert gradcheck(activation, [x])


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_activation_is_finite_over_the_whole_range(name: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max / 2
    x = torch.tensor([-top, -1e4, -100.0, 0.0, 100.0, 1e4, top], dtype=dtype, requires_grad=True)
    value = getattr(ImprovedActivations, name)(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value.dtype == dtype
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_activations_take_their_parameters() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(ImprovedActivations.swish(x, beta=2.0), x * torch.sigmoid(2 * x))
    torch.testing.assert_close(ImprovedActivations.leaky_relu(x, 0.2), F.leaky_relu(x, 0.2))
    torch.testing.assert_close(ImprovedActivations.scaled_tanh(x, slope=2 / 3), 1.7159 * torch.tanh(x * 2 / 3))


@pytest.mark.parametrize("problem", ["vanishing", "exploding", "dead_neurons"])
def test_advice_names_activations_and_knows_the_layer(problem: str) -> None:
    plain = get_activation_function_recommendations("mlp", problem)
    assert any("LU" in line or "tanh" in line for line in plain)
    assert get_activation_function_recommendations("TransformerEncoderLayer", problem)[1:] == plain
    with pytest.raises(ConfigError, match="must be one of vanishing, exploding, dead_neurons, got 'slow'"):
        get_activation_function_recommendations("mlp", "slow")


# --- GradientStabilizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_layer_and_batch_norm_are_torchs_over_the_last_dimension(shape: tuple[int, ...]) -> None:
    x = 5 + 3 * torch.randn(shape)
    torch.testing.assert_close(GradientStabilizer("layer_norm", 4)(x), F.layer_norm(x, (4,)))
    rows = x.reshape(-1, 4)
    expected = (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(GradientStabilizer("batch_norm", 4)(x).reshape(-1, 4), expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_of_one_sample_uses_what_it_has_learnt() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(4)(torch.randn(1, 4))
    stabilizer = GradientStabilizer("batch_norm", 4)
    for _ in range(50):
        stabilizer(5 + 3 * torch.randn(64, 4))
    before = copy.deepcopy(stabilizer.state_dict())
    x = torch.randn(1, 4, requires_grad=True)
    out = stabilizer(x)
    out.sum().backward()
    torch.testing.assert_close(out, stabilizer.eval()(x))
    assert all(torch.equal(before[name], value) for name, value in stabilizer.state_dict().items())


def test_spectral_norm_bounds_the_largest_singular_value() -> None:
    layer = nn.Linear(6, 5)
    with torch.no_grad():
        layer.weight.mul_(50)
    assert torch.linalg.matrix_norm(layer.weight, 2) > 10
    stabilizer = GradientStabilizer("spectral_norm", layer=layer)
    for _ in range(200):  # power iteration: one step a forward
        stabilizer(torch.randn(2, 6))
    assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1.0, rel=1e-4)


def test_weight_norm_separates_length_from_direction() -> None:
    layer = nn.Linear(6, 5)
    x = torch.randn(3, 6)
    before = layer(x)
    stabilizer = GradientStabilizer("weight_norm", layer=layer)
    torch.testing.assert_close(stabilizer(x), before)
    assert len(list(stabilizer.parameters())) == 3  # length, direction, bias
    stabilizer(x).square().sum().backward()
    direction = layer.parametrizations.weight.original1
    # A direction's gradient never changes its length.
    torch.testing.assert_close((direction * direction.grad).sum(1), torch.zeros(5), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["weight_norm", "spectral_norm"])
def test_without_a_layer_the_weight_norms_start_as_the_identity(method: str) -> None:
    x = torch.randn(3, 4)
    stabilizer = GradientStabilizer(method, 4)
    torch.testing.assert_close(stabilizer(x), x)
    stabilizer(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stabilizer.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "group_norm"}, "method must be one of layer_norm, batch_norm, weight_norm, spectral_norm"),
        ({"method": "layer_norm"}, "needs hidden_dim got hidden_dim=None"),
        ({"method": "weight_norm"}, "needs hidden_dim, or layer=, got hidden_dim=None"),
        ({"method": "layer_norm", "hidden_dim": 4, "layer": nn.Linear(4, 4)}, "takes no layer, got Linear"),
        ({"method": "weight_norm", "layer": nn.ReLU()}, "needs a layer with a weight matrix, got ReLU"),
    ],
)
def test_a_stabilizer_that_cannot_work_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientStabilizer(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "num_zero"), [("weight_norm", 1), ("weight_norm", 3), ("spectral_norm", 3)])
def test_a_weight_without_direction_is_refused_because_torch_makes_nan_of_it(method: str, num_zero: int) -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[:num_zero] = 0
    plain = getattr(nn.utils.parametrizations, method)(copy.deepcopy(layer))
    assert plain(torch.ones(1, 4)).isnan().any()
    with pytest.raises(ConfigError, match=f"{num_zero} of 3 rows of the weight of Linear are zero"):
        GradientStabilizer(method, layer=layer)


# --- gradient noise -------------------------------------------------------------------------------------------------


def make_model(value: float = 0.0) -> nn.Module:
    model = nn.Linear(200, 100)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_variance_of_the_noise_fades_as_the_paper_says() -> None:
    for step in (0, 1, 99):
        model = make_model()
        std = add_gradient_noise(model, noise_std=0.5, gamma=0.55, step=step)
        assert std == pytest.approx(math.sqrt(0.25 / (1 + step) ** 0.55))
        assert model.weight.grad is not None
        # 20 000 samples: the deviation scatters by 0.5 %, the mean by std / 141.
        assert model.weight.grad.std().item() == pytest.approx(std, rel=0.025)
        assert abs(model.weight.grad.mean().item()) < 5 * std / 141


def test_noise_depends_on_seed_and_step_only_and_leaves_other_generators_alone() -> None:
    models = [make_model() for _ in range(4)]
    state = torch.get_rng_state()
    add_gradient_noise(models[0], 0.1, step=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    add_gradient_noise(models[1], 0.1, step=3)
    add_gradient_noise(models[2], 0.1, step=4)
    add_gradient_noise(models[3], 0.1, step=3, seed=1)
    first, again, later, other = (torch.cat([g.flatten() for g in gradients(m)]) for m in models)
    assert torch.equal(first, again)
    assert abs(torch.corrcoef(torch.stack([first, later, other])).triu(1)).max() < 0.05


def test_a_resumed_noise_goes_on_exactly() -> None:
    noise = GradientNoise(0.1, seed=5)
    for _ in range(3):
        noise.add(make_model())
    resumed = GradientNoise(0.1)
    resumed.load_state_dict(noise.state_dict())
    ahead, behind = make_model(), make_model()
    assert noise.current_std == resumed.current_std
    assert noise.add(ahead) == resumed.add(behind)
    assert all(torch.equal(a, b) for a, b in zip(gradients(ahead), gradients(behind)))


def test_noise_is_added_once_rounded_in_half_precision_and_to_stored_values_of_sparse_gradients() -> None:
    half = nn.Linear(50, 50).bfloat16()
    for parameter in half.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    add_gradient_noise(half, 0.1)
    assert half.weight.grad is not None
    assert half.weight.grad.dtype is torch.bfloat16
    assert half.weight.grad.float().std().item() == pytest.approx(0.1, rel=0.1)

    table = nn.Embedding(10, 300, sparse=True)
    table(torch.tensor([1, 4])).sum().backward()
    add_gradient_noise(table, 0.1)
    assert table.weight.grad is not None
    dense = table.weight.grad.to_dense()
    assert (dense[0] == 0).all()
    assert dense[1].std().item() == pytest.approx(0.1, rel=0.3)


def test_parameters_without_gradient_stay_without_and_zero_noise_is_none() -> None:
    model = nn.Linear(3, 3)
    add_gradient_noise(model, 0.1)
    assert model.weight.grad is None
    model = make_model(1.0)
    add_gradient_noise(model, 0.0)
    assert (gradients(model)[0] == 1.0).all()
    with pytest.raises(ConfigError, match="noise_std must not be negative"):
        add_gradient_noise(model, -1.0)
    with pytest.raises(ConfigError, match="gamma must not be negative"):
        GradientNoise(0.1, gamma=-0.5)


def test_noise_goes_between_backward_and_step_of_a_guard() -> None:
    def train(noise: GradientNoise | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)) as guard:
            for x in torch.randn(5, 8, 4):
                guard.backward(lambda x: model(x).square().mean(), x)
                if noise is not None:
                    noise.add(model)
                guard.step()
            guard.flush()
            assert not guard.findings
        return [p.detach() for p in model.parameters()]

    noisy, again, plain = train(GradientNoise(0.01)), train(GradientNoise(0.01)), train(None)
    assert torch.equal(noisy[0], again[0])
    assert not torch.equal(noisy[0], plain[0])
