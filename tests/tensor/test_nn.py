"""Activations, advice, GradientStabilizer and gradient noise: their results, and what they refuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from steadygrad import Guard
from steadygrad.errors import ConfigError, UnsupportedError
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
def test_an_activation_equals_its_formula_with_true_gradients(name: str) -> None:
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


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_swish_in_half_precision_accepts_gradients_enlarged_by_a_loss_scaler(beta: float, dtype: torch.dtype) -> None:
    x = torch.tensor([-200.0, -100.0, -3.0, 0.0, 3.0, 100.0, 200.0], dtype=dtype, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    ImprovedActivations.swish(x, beta).backward(torch.full_like(x, 4096.0))
    (exact * torch.sigmoid(beta * exact)).backward(torch.full_like(exact, 4096.0))
    assert x.grad is not None
    assert x.grad.dtype == dtype
    # One rounding of the result; computed in float32.
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("start", [1.0, 2.0])
def test_the_beta_of_swish_can_be_learnt(start: float) -> None:
    beta = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(ImprovedActivations.swish, [x, beta])
    ImprovedActivations.swish(x, beta).sum().backward()
    assert beta.grad is not None
    assert beta.grad != 0


@pytest.mark.parametrize("problem", ["vanishing", "exploding", "dead_neurons"])
def test_advice_names_activations_and_the_layer(problem: str) -> None:
    plain = get_activation_function_recommendations("mlp", problem)
    assert any("LU" in line or "tanh" in line for line in plain)
    assert get_activation_function_recommendations("TransformerEncoderLayer", problem)[1:] == plain
    with pytest.raises(ConfigError, match="must be one of vanishing, exploding, dead_neurons, got 'slow'"):
        get_activation_function_recommendations("mlp", "slow")
    with pytest.raises(ConfigError, match="layer_type must be text, got Linear"):
        get_activation_function_recommendations(nn.Linear(2, 2), problem)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="problem must be one of"):
        get_activation_function_recommendations("mlp", [problem])  # type: ignore[arg-type]


# --- GradientStabilizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_layer_and_batch_norm_equal_torchs_over_the_last_dimension(shape: tuple[int, ...]) -> None:
    x = 5 + 3 * torch.randn(shape)
    torch.testing.assert_close(GradientStabilizer("layer_norm", 4)(x), F.layer_norm(x, (4,)))
    rows = x.reshape(-1, 4)
    expected = (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(GradientStabilizer("batch_norm", 4)(x).reshape(-1, 4), expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_of_one_sample_uses_its_running_statistics() -> None:
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


def test_sync_batch_norm_still_acts_on_the_last_dimension() -> None:
    stabilizer = GradientStabilizer("batch_norm", 4)
    x = 5 + 3 * torch.randn(6, 4, 4)  # as many channels in the first dimension: nothing else would reveal it
    stabilizer(x)
    expected = stabilizer.eval()(x)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(stabilizer)
    assert isinstance(converted.norm, nn.SyncBatchNorm)
    torch.testing.assert_close(converted(x), expected)


@pytest.mark.parametrize("method", ["layer_norm", "batch_norm", "weight_norm", "spectral_norm"])
def test_a_restored_stabilizer_gives_the_same_output(method: str) -> None:
    saved, restored = GradientStabilizer(method, 4), GradientStabilizer(method, 4)
    saved(5 + 3 * torch.randn(8, 4)).square().sum().backward()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    restored.load_state_dict(saved.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(restored.eval()(x), saved.eval()(x))


def test_spectral_norm_bounds_the_largest_singular_value() -> None:
    layer = nn.Linear(6, 5)
    with torch.no_grad():
        layer.weight.mul_(50)
    assert torch.linalg.matrix_norm(layer.weight, 2) > 10
    stabilizer = GradientStabilizer("spectral_norm", layer=layer)
    for _ in range(200):  # power iteration: one step per forward
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
def test_without_a_layer_the_weight_norms_start_as_identity(method: str) -> None:
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
        ({"method": "weight_norm", "layer": torch.ones(2, 2)}, "needs a layer with a weight matrix, got Tensor"),
        ({"method": "weight_norm", "layer": nn.LazyLinear(4)}, "the weight of LazyLinear is not made yet"),
        ({"method": "layer_norm", "hidden_dim": True}, "needs hidden_dim got hidden_dim=True"),
        ({"method": "layer_norm", "hidden_dim": 4, "eps": -1.0}, "eps must be a finite number above 0, got -1.0"),
        ({"method": "layer_norm", "hidden_dim": 4, "eps": math.nan}, "eps must be a finite number above 0, got nan"),
        ({"method": "batch_norm", "hidden_dim": 4, "momentum": 5.0}, "momentum must lie between 0 and 1"),
    ],
)
def test_an_invalid_stabilizer_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientStabilizer(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "num_zero"), [("weight_norm", 1), ("weight_norm", 3), ("spectral_norm", 3)])
def test_a_zero_weight_is_refused_because_torch_turns_it_into_nan(method: str, num_zero: int) -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[:num_zero] = 0
    plain = getattr(nn.utils.parametrizations, method)(copy.deepcopy(layer))
    assert plain(torch.ones(1, 4)).isnan().any()
    with pytest.raises(ConfigError, match=f"{num_zero} of 3 rows of the weight of Linear are zero"):
        GradientStabilizer(method, layer=layer)


@pytest.mark.parametrize("first", ["weight_norm", "spectral_norm"])
def test_weight_norm_of_a_normalised_weight_is_refused_and_the_layer_stays_usable(first: str) -> None:
    layer = GradientStabilizer(first, 4).norm
    x = torch.randn(2, 4)
    before = layer.eval()(x)
    with pytest.raises(ConfigError, match="the weight of ParametrizedLinear is computed from other parameters already"):
        GradientStabilizer("weight_norm", layer=layer)
    assert torch.equal(layer(x), before)
    assert GradientStabilizer("spectral_norm", layer=layer)(x).shape == before.shape  # that one torch allows on top


def test_a_weight_that_is_not_a_parameter_is_refused() -> None:
    layer = nn.Linear(4, 4)
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.weight = weight  # left by the older nn.utils.weight_norm
    with pytest.raises(ConfigError, match="the weight of Linear is computed from other parameters already"):
        GradientStabilizer("spectral_norm", layer=layer)


@pytest.mark.parametrize("method", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "1 of 3 rows of the weight of Linear are not finite"),
        (math.inf, "1 of 3 rows of the weight of Linear are not finite"),
        (1e30, "1 of 3 rows .* too large for a length in torch.float32"),
    ],
)
def test_a_weight_that_is_nonfinite_or_has_an_infinite_norm_is_refused(method: str, value: float, message: str) -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[1] = value
    plain = getattr(nn.utils.parametrizations, method)(copy.deepcopy(layer))
    assert not plain(torch.ones(1, 4)).isfinite().all()
    with pytest.raises(ConfigError, match=message):
        GradientStabilizer(method, layer=layer)


@pytest.mark.parametrize("method", ["weight_norm", "spectral_norm"])
def test_a_weight_too_small_to_normalise_is_refused(method: str) -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.fill_(1e-30)
    plain = getattr(nn.utils.parametrizations, method)(copy.deepcopy(layer))
    assert not plain(torch.ones(1, 4)).isfinite().all()
    with pytest.raises(ConfigError, match="3 of 3 rows of the weight of Linear are zero, or as good as"):
        GradientStabilizer(method, layer=layer)


def test_an_uninitialised_layer_is_accepted() -> None:
    layer = nn.Linear(4, 3, device="meta")
    assert GradientStabilizer("weight_norm", layer=layer)(torch.ones(2, 4, device="meta")).shape == (2, 3)


# --- gradient noise -------------------------------------------------------------------------------------------------


def make_model(value: float = 0.0) -> nn.Module:
    model = nn.Linear(200, 100)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_variance_of_the_noise_decays_as_in_the_paper() -> None:
    for step in (0, 1, 99):
        model = make_model()
        std = add_gradient_noise(model, noise_std=0.5, gamma=0.55, step=step)
        assert std == pytest.approx(math.sqrt(0.25 / (1 + step) ** 0.55))
        assert model.weight.grad is not None
        # 20 000 samples: the deviation scatters by 0.5 %, the mean by std / 141.
        assert model.weight.grad.std().item() == pytest.approx(std, rel=0.025)
        assert abs(model.weight.grad.mean().item()) < 5 * std / 141


def test_noise_depends_only_on_seed_and_step_and_leaves_other_generators_alone() -> None:
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


def test_resumed_noise_continues_exactly() -> None:
    noise = GradientNoise(0.1, seed=5)
    for _ in range(3):
        noise.add(make_model())
    resumed = GradientNoise(0.1)
    resumed.load_state_dict(noise.state_dict())
    ahead, behind = make_model(), make_model()
    assert noise.current_std == resumed.current_std
    assert noise.add(ahead) == resumed.add(behind)
    assert all(torch.equal(a, b) for a, b in zip(gradients(ahead), gradients(behind)))


def test_noise_is_added_and_rounded_once_in_half_precision_and_to_stored_sparse_values() -> None:
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


def test_parameters_without_gradient_stay_without_and_zero_noise_changes_nothing() -> None:
    model = nn.Linear(3, 3)
    add_gradient_noise(model, 0.1)
    assert model.weight.grad is None
    model = make_model(1.0)
    add_gradient_noise(model, 0.0)
    assert (gradients(model)[0] == 1.0).all()


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, -1.0, "0.1", None])
def test_an_invalid_noise_size_is_refused_before_a_gradient_changes(wrong: Any) -> None:
    model = make_model(1.0)
    with pytest.raises(ConfigError, match=rf"noise_std must be a finite number, at least 0, got {wrong!r}"):
        add_gradient_noise(model, wrong)
    with pytest.raises(ConfigError, match="noise_std must be"):
        GradientNoise(wrong)
    with pytest.raises(ConfigError, match="gamma must be a finite number, at least 0"):
        add_gradient_noise(model, 0.1, gamma=wrong)
    assert (gradients(model)[0] == 1.0).all()


def test_an_invalid_step_or_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="step must be at least 0, got -1"):
        add_gradient_noise(make_model(), step=-1)
    with pytest.raises(ConfigError, match=r"step must be a whole number, got 1\.5"):
        add_gradient_noise(make_model(), step=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seed must be a whole number, got 'a'"):
        GradientNoise(0.1, seed="a")  # type: ignore[arg-type]
    noise = GradientNoise(0.1, seed=3)
    with pytest.raises(ConfigError, match="the state of GradientNoise lacks seed"):
        noise.load_state_dict({"step": 4})
    with pytest.raises(ConfigError, match="step must be at least 0, got -2"):
        noise.load_state_dict({"step": -2, "seed": 0})
    assert noise.state_dict() == {"step": 0, "seed": 3}


def test_any_integer_is_a_seed_and_different_ones_give_different_noise() -> None:
    # The CPU's generator uses only 32 bits of a seed, so seeds that differ above them are the hard ones.
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**45, 2**63, 2**64, 2**64 + 1, -(2**64), 10**40, torch.initial_seed()]
    drawn = []
    for seed in dict.fromkeys(seeds):
        model, again = make_model(), make_model()
        GradientNoise(0.1, seed=seed).add(model)
        add_gradient_noise(again, 0.1, seed=seed)
        assert torch.equal(gradients(model)[0], gradients(again)[0])
        drawn.append(gradients(model)[0].flatten())
    # Of 20 000 samples a correlation scatters by 0.007.
    assert torch.corrcoef(torch.stack(drawn)).triu(1).abs().max() < 0.05


def test_fast_decaying_noise_vanishes_without_overflow() -> None:
    assert add_gradient_noise(make_model(), 0.1, gamma=1e6, step=1) == 0


def test_an_element_repeated_in_a_sparse_gradient_gets_noise_once() -> None:
    table = nn.Embedding(2, 20_000, sparse=True)
    table(torch.tensor([1] * 9 + [0])).sum().backward()
    assert table.weight.grad is not None
    assert not table.weight.grad.is_coalesced()

    add_gradient_noise(table, 0.1)
    assert table.weight.grad.layout is torch.sparse_coo
    dense = table.weight.grad.to_dense()
    # 20 000 samples: the deviation scatters by 0.5 %. Nine times the noise would be 0.3.
    assert dense[1].std().item() == pytest.approx(0.1, rel=0.025)
    assert dense[1].mean().item() == pytest.approx(9.0, abs=0.01)
    assert dense[0].std().item() == pytest.approx(0.1, rel=0.025)
    torch.optim.SparseAdam(table.parameters()).step()


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_the_stored_values_of_a_compressed_gradient_get_noise(layout: torch.layout) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(200).to_sparse(layout=layout))
    model.weight.grad = torch.eye(200).to_sparse(layout=layout)
    add_gradient_noise(model, 0.1)
    dense = model.weight.grad.to_dense()
    assert dense.diagonal().std().item() == pytest.approx(0.1, rel=0.2)
    assert (dense - dense.diagonal().diag() == 0).all()


def test_an_unsupported_layout_is_refused_by_name_before_a_gradient_changes() -> None:
    model = nn.Module()
    model.first = nn.Linear(2, 2)
    model.first.weight.grad = torch.ones(2, 2)
    model.odd = nn.Parameter(torch.eye(2).to_mkldnn())
    model.odd.grad = torch.eye(2).to_mkldnn()
    with pytest.raises(UnsupportedError, match=r"the gradient of 'odd' has layout torch\._mkldnn"):
        add_gradient_noise(model, 0.1)
    assert (model.first.weight.grad == 1).all()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_shard_of_a_distributed_gradient_gets_the_same_noise_as_a_plain_one(mesh: DeviceMesh) -> None:
    plain, sharded = make_model(1.0), make_model(1.0)
    for name, parameter in list(sharded.named_parameters()):
        shards = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        shards.grad = distribute_tensor(torch.ones(parameter.shape), mesh, [Shard(0)])
        setattr(sharded, name, shards)
    add_gradient_noise(plain, 0.1)
    add_gradient_noise(sharded, 0.1)
    for ours, expected in zip(gradients(sharded), gradients(plain), strict=True):
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.full_tensor(), expected)


def test_an_unreduced_distributed_gradient_is_refused(mesh: DeviceMesh) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    model.weight.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(UnsupportedError, match="the gradient of 'weight' is a sum over ranks still to be made"):
        add_gradient_noise(model, 0.1)


def test_noise_can_be_added_between_backward_and_step_of_a_guard() -> None:
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
