"""add_gradient_checkpointing: the same training, with modules computed twice and never three times."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad.errors import UsageError
from steadygrad.nn import add_gradient_checkpointing


class Block(nn.Module):
    """Counts its calls, draws random numbers and keeps running statistics."""

    def __init__(self, width: int = 6, *, spectral: bool = False) -> None:
        super().__init__()
        linear = nn.Linear(width, width)
        self.linear = nn.utils.parametrizations.spectral_norm(linear) if spectral else linear
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.calls: list[torch.dtype] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        hidden = self.linear(x)
        self.calls.append(hidden.dtype)
        return x + scale * self.dropout(torch.tanh(self.norm(hidden.float())))


class Stack(nn.Module):
    def __init__(self, num: int = 3, *, spectral: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(spectral=spectral) for _ in range(num)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


class Nested(nn.Module):
    """A transformer whose name, class and blocks all match the default names."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(x)


def backward(model: nn.Module, x: Tensor, seed: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a), [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("spectral", [False, True])
def test_gradients_buffers_and_random_numbers_equal_those_of_the_plain_model(spectral: bool) -> None:
    plain = Stack(spectral=spectral)
    checkpointed = copy.deepcopy(plain)
    x = torch.randn(5, 6)
    assert add_gradient_checkpointing(checkpointed, ["Block"]) == ("layers.0", "layers.1", "layers.2")

    for step in range(3):
        gradients, drawn = backward(checkpointed, x, step), torch.rand(3)
        assert_same(gradients, backward(plain, x, step))
        assert torch.equal(drawn, torch.rand(3))
        assert_same(checkpointed.state_dict(), plain.state_dict())
    assert [len(layer.calls) for layer in checkpointed.layers] == [6, 6, 6]


@pytest.mark.parametrize("spectral", [False, True])
def test_torchs_checkpoint_counts_a_batch_twice_and_ours_once(spectral: bool) -> None:
    def run(wrap: Callable[[nn.Module], object]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = Stack(1, spectral=spectral)
        x = torch.randn(5, 6)
        wrap(model)
        backward(model, x)
        return dict(model.named_buffers())

    def wrap_plainly(model: nn.Module) -> None:
        block = model.layers[0]
        inner = block.forward
        block.forward = lambda x, **kw: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False, **kw)

    expected = run(lambda model: None)
    name = "layers.0.norm.num_batches_tracked"
    twice = run(wrap_plainly)
    assert twice[name].item() == 2
    assert not torch.equal(twice["layers.0.norm.running_mean"], expected["layers.0.norm.running_mean"])
    ours = run(lambda model: add_gradient_checkpointing(model, ["Block"]))
    assert ours[name].item() == 1
    assert_same(ours, expected)


class OwnNorm(nn.Module):
    """A norm with running statistics and no counter: torch's kernel changes them without changing their version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, self.scale, training=True)


def test_statistics_written_invisibly_by_a_kernel_are_counted_once() -> None:
    plain = nn.Sequential(OwnNorm())
    checkpointed = copy.deepcopy(plain)
    assert add_gradient_checkpointing(checkpointed, ["OwnNorm"]) == ("0",)
    x = torch.randn(4, 6)
    assert_same(backward(checkpointed, x), backward(plain, x))
    assert_same(dict(checkpointed.named_buffers()), dict(plain.named_buffers()))


class FirstMean(nn.Module):
    """Its buffer is None until the first forward sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        now = y.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return torch.tanh(y - self.mean)


class MadeMean(nn.Module):
    """Its buffer does not exist until the first forward creates it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6))
        self.mean += y.detach().mean(0)
        return torch.tanh(y - self.mean)


class SumOfSeen(nn.Module):
    """Adds its input to a given matrix and subtracts the matrix: a buffer that is not a vector."""

    def __init__(self, total: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(1, 6) if total is None else total)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) - self.total)
        self.total.add_(y.detach().mean(0))
        return y


class SharedTotal(nn.Module):
    """Two modules that write to one buffer: the second reads what the first wrote."""

    def __init__(self) -> None:
        super().__init__()
        total = torch.zeros(1, 6)
        self.first, self.second = SumOfSeen(total), SumOfSeen(total)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


WITH_BUFFERS = [Block, OwnNorm, SumOfSeen, FirstMean, MadeMean, SharedTotal]


@pytest.mark.parametrize("make", WITH_BUFFERS)
def test_a_retained_graph_gives_the_same_gradients_again_and_leaves_buffers_unchanged(
    make: Callable[[], nn.Module],
) -> None:
    plain = nn.Sequential(make(), nn.Linear(6, 1))
    checkpointed = copy.deepcopy(plain)
    add_gradient_checkpointing(checkpointed, ["0"])
    x = torch.randn(5, 6)

    def train(model: nn.Module) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        seen = []
        for _ in range(2):  # the second forward sees the buffers of the first
            loss = model(x).square().sum()
            for keep in (True, True, False):
                model.zero_grad()
                loss.backward(retain_graph=keep)
                seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
                seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return seen

    for ours, expected in zip(train(checkpointed), train(plain), strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize("make", WITH_BUFFERS)
def test_a_gradient_penalty_equals_that_of_the_plain_model(make: Callable[[], nn.Module]) -> None:
    plain = nn.Sequential(make(), nn.Linear(6, 1))
    checkpointed = copy.deepcopy(plain)
    add_gradient_checkpointing(checkpointed, ["0"])
    start = torch.randn(5, 6)

    def penalize(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(0)
        x = start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return gradients | {f"buffer {name}": value for name, value in model.named_buffers()}

    expected = penalize(plain)
    assert expected["1.weight"].abs().sum() > 0
    assert_same(penalize(checkpointed), expected)


def test_a_buffer_of_inference_mode_does_no_harm() -> None:
    with torch.inference_mode():
        scale = torch.ones(6)
    model = nn.Sequential(Block())
    model[0].register_buffer("scale", scale)
    add_gradient_checkpointing(model, ["Block"])
    assert all(gradient.isfinite().all() for gradient in backward(model, torch.randn(5, 6)).values())


class Named(nn.Module):
    """Takes arguments whose names torch's checkpoint uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, debug: bool = False, function: float = 1.0, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x)) * function
        y = y if mask is None else y * mask
        return -y if debug else y


class ByName(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.inner, self.settings = Named(), settings

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=x, **self.settings)


@pytest.mark.parametrize("settings", [{}, {"debug": True}, {"function": 2.0}, {"mask": torch.zeros(6)}])
def test_every_keyword_argument_reaches_the_module(settings: dict[str, object]) -> None:
    plain = ByName(**settings)
    checkpointed = copy.deepcopy(plain)
    add_gradient_checkpointing(checkpointed, ["inner"])
    x = torch.randn(5, 6)
    assert torch.equal(checkpointed(x), plain(x))
    assert_same(backward(checkpointed, x), backward(plain, x))


def test_a_keyword_input_changed_before_backward_raises_an_error_as_in_torch() -> None:
    model = ByName()
    add_gradient_checkpointing(model, ["inner"])
    x = torch.randn(5, 6)
    out = model(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_list_of_lists_matches_its_modules_and_an_uncalled_module_is_no_match() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]), nn.Linear(2, 2)])
    model.layer_scales = nn.ParameterList([torch.ones(2)])
    assert add_gradient_checkpointing(model, ["layer"]) == ("layers.0.0", "layers.0.1", "layers.1")
    with pytest.raises(UsageError, match="no module inside Module matches 'scales'"):
        add_gradient_checkpointing(model, ["scales"])


def test_nested_matches_are_wrapped_once_at_the_innermost() -> None:
    model = Nested()
    plain = copy.deepcopy(model)
    assert add_gradient_checkpointing(model) == ("transformer.layers.0", "transformer.layers.1")
    calls = []
    model.transformer.layers[0].linear1.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 4, 8)
    assert_same(backward(model, x), backward(plain, x))
    assert len(calls) == 2  # forward and one recomputation


def test_wrapping_again_wraps_nothing_twice() -> None:
    model = Stack()
    assert add_gradient_checkpointing(model, ["layers.1"]) == ("layers.1",)
    assert add_gradient_checkpointing(model, ["layers"]) == ("layers.0", "layers.2")
    assert add_gradient_checkpointing(model, ["Block"]) == ()
    assert add_gradient_checkpointing(model, ["norm"]) == ()  # inside a wrapped module
    backward(model, torch.randn(5, 6))
    assert [len(layer.calls) for layer in model.layers] == [2, 2, 2]


def test_a_parent_of_a_wrapped_module_is_not_wrapped() -> None:
    model = nn.Sequential(nn.Sequential(Block()))
    assert add_gradient_checkpointing(model, ["Block"]) == ("0.0",)
    assert add_gradient_checkpointing(model, ["0"]) == ()


def test_autocast_is_kept_in_the_recomputation() -> None:
    model = Stack(1)
    add_gradient_checkpointing(model, "Block")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(5, 6))
    out.float().sum().backward()
    assert model.layers[0].calls == [torch.bfloat16, torch.bfloat16]


def test_without_gradients_nothing_is_recomputed_and_names_are_unchanged() -> None:
    model = Stack()
    names = list(model.state_dict())
    add_gradient_checkpointing(model, ["Block"])
    assert list(model.state_dict()) == names
    with torch.no_grad():
        model.eval()(torch.randn(2, 6))
    assert [len(layer.calls) for layer in model.layers] == [1, 1, 1]


def test_a_copy_uses_its_own_weights_and_is_checkpointed_too() -> None:
    model = Stack(1).eval()
    add_gradient_checkpointing(model, ["Block"])
    x = torch.randn(5, 6)
    expected = model(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(x), expected)
    other.layers[0].calls.clear()
    other(x).sum().backward()
    assert len(other.layers[0].calls) == 2


def test_a_pickled_model_still_runs() -> None:
    model = Stack(1).eval()
    add_gradient_checkpointing(model, ["Block"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(5, 6)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), model(x))


def test_a_forward_set_on_the_instance_is_kept() -> None:
    model = Stack(1).eval()
    block = model.layers[0]
    inner = block.forward
    block.forward = lambda x, **kw: 2 * inner(x, **kw)
    x = torch.randn(5, 6)
    expected = model(x)
    add_gradient_checkpointing(model, ["Block"])
    out = model(x)
    torch.testing.assert_close(out, expected)
    out.sum().backward()


@pytest.mark.parametrize("names", [["Attention"], [], [""]])
def test_without_a_match_the_error_lists_what_exists(names: list[str]) -> None:
    with pytest.raises(UsageError, match=r"no module inside Stack matches .*\. Its classes are: .*Block.*Linear"):
        add_gradient_checkpointing(Stack(), names)


@pytest.mark.parametrize("wrong", [1, nn.Linear(2, 2), None])
def test_an_invalid_name_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=rf"must hold names, got {type(wrong).__name__} .*Give names of modules"):
        add_gradient_checkpointing(Stack(), ["Block", wrong])


def test_inner_activations_are_not_kept() -> None:
    def count_saved(model: nn.Module) -> int:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            model(torch.randn(64, 6))
        return sum(saved)

    plain = Stack(6)
    checkpointed = copy.deepcopy(plain)
    add_gradient_checkpointing(checkpointed, ["Block"])
    assert count_saved(checkpointed) < count_saved(plain) / 2


@pytest.mark.parametrize("num", [1, 2])
def test_a_checkpointed_model_compiles(num: int) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num)])
    plain = copy.deepcopy(model)
    add_gradient_checkpointing(model, ["0"])
    x = torch.randn(3, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    expected = backward(plain, x)
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, expected)
    torch.compiler.reset()


def test_a_checkpointed_model_called_by_keyword_compiles() -> None:
    model = ByName(function=2.0, mask=torch.ones(6))
    plain = copy.deepcopy(model)
    add_gradient_checkpointing(model, ["inner"])
    x = torch.randn(3, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, backward(plain, x))
    torch.compiler.reset()
