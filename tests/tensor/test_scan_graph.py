"""GraphWatch: it reports mistakes, stays silent on intended code, and changes neither."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import DEVICES, clone, loss_of, make_batches

from steadygrad.facts import GraphScan
from steadygrad.measure.graph import GraphWatch
from steadygrad.measure.graph_leaves import find_leaves
from steadygrad.measure.suspicious_ops import SuspiciousOps
from steadygrad.state.trained_parameters import find_trained_parameters

every_device = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")
N = 6


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    """A torch.compile in another test disables the watch in this process."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def make(model: nn.Module, **options: Any) -> GraphWatch:
    return GraphWatch(find_trained_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1, **options)))


def watch(model: nn.Module, fn: Callable[[], Tensor]) -> GraphScan:
    seen = make(model)
    with seen:
        loss = fn()
    return seen.read(0, loss)


def line_of(text: str) -> str:
    """Return file:line of the only line of this file that ends with the comment `# <text>`."""
    with open(__file__) as file:
        (number,) = [i for i, line in enumerate(file, start=1) if line.rstrip().endswith(f"# {text}")]
    return f"{__file__}:{number}"


# --- broadcasts ---------------------------------------------------------------------------------------------------


@every_device
def test_a_prediction_with_one_axis_too_many_is_reported_with_its_line(device: str) -> None:
    model, x, y = nn.Linear(3, 1).to(device), torch.randn(N, 3, device=device), torch.randn(N, device=device)

    def fn() -> Tensor:
        prediction = model(x)
        return (prediction - y).square().mean()  # the broadcast

    (found,) = watch(model, fn).broadcasts

    assert (found.op, found.left, found.right) == ("sub", (N, 1), (N,))
    assert found.where == line_of("the broadcast")


ACCIDENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "target first": lambda p, y: (y - p).abs().mean(),
    "mse_loss": lambda p, y: F.mse_loss(p, y),
    "MSELoss": lambda p, y: nn.MSELoss()(p, y),
    "l1_loss": lambda p, y: F.l1_loss(p, y),
    "smooth_l1_loss": lambda p, y: F.smooth_l1_loss(p, y),
    "weighted": lambda p, y: (p.square() * y).mean(),
    "ratio": lambda p, y: (p / y).sum(),
    "squeezed prediction": lambda p, y: (p.squeeze(-1) - torch.zeros(len(y), 1)).square().mean(),
    "activated": lambda p, y: (p.sigmoid() - y).square().mean(),
}


@pytest.mark.parametrize("loss", ACCIDENTS.values(), ids=ACCIDENTS.keys())
def test_each_accidental_broadcast_is_reported(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x, y = nn.Linear(3, 1), torch.randn(N, 3), torch.rand(N) + 1

    scan = watch(model, lambda: loss(model(x), y))

    assert len(scan.broadcasts) == 1
    assert {scan.broadcasts[0].left, scan.broadcasts[0].right} == {(N, 1), (N,)}


MEANT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "same shape": lambda p, y: (p[:, 0] - y).square().mean(),
    "unsqueezed target": lambda p, y: (p - y.unsqueeze(1)).square().mean(),
    "pairs by None": lambda p, y: (p[:, 0][:, None] - p[:, 0][None, :]).square().mean(),
    "pairs by one None": lambda p, y: (p[:, 0][:, None] - p[:, 0]).square().mean(),
    "pairs by unsqueeze": lambda p, y: (p[:, 0].unsqueeze(-1) * y).mean(),
    "pairs by view": lambda p, y: (p[:, 0].view(-1, 1) - y).mean(),
    "pairs of an unsqueezed one, activated": lambda p, y: (p[:, 0].unsqueeze(-1).exp() - y).mean(),
    "squared distances": lambda p, y: (p.square().sum(1, keepdim=True) + p.square().sum(1) - 2 * p @ p.T).mean(),
    "squared distances, keepdim by position": lambda p, y: (p.square().sum(1, True) + p.square().sum(1)).mean(),
    "transposed": lambda p, y: (p - p.T).abs().mean(),
    "outer": lambda p, y: torch.outer(p[:, 0], y).mean(),
    "scalar": lambda p, y: (p * 2 - y.mean()).mean(),
    "row": lambda p, y: (torch.cat([p, p], 1) + torch.ones(2)).mean(),
    "positions": lambda p, y: (p * torch.arange(N)).mean(),
    "mask": lambda p, y: (p @ p.T).masked_fill(torch.ones(N, N).triu(1).bool(), -1e9).softmax(-1).sum(),
    "additive mask": lambda p, y: ((p @ p.T) + torch.zeros(N)).softmax(-1).sum(),
    "target without a graph, unsqueezed": lambda p, y: (p[:, 0] - _unsqueeze_quietly(y)).mean(),
}


def _unsqueeze_quietly(y: Tensor) -> Tensor:
    with torch.no_grad():
        return y.unsqueeze(1)


@pytest.mark.parametrize("loss", MEANT.values(), ids=MEANT.keys())
def test_intended_broadcasts_are_not_reported(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x, y = nn.Linear(3, 1), torch.randn(N, 3), torch.randn(N)

    scan = watch(model, lambda: loss(model(x), y))

    assert scan.broadcasts == ()
    assert scan.double_softmaxes == ()


def test_a_weight_or_a_buffer_as_long_as_the_batch_is_not_reported() -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frequencies = nn.Parameter(torch.randn(N))
            self.register_buffer("shift", torch.randn(N))
            self.inner = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * self.frequencies + self.inner(x) * self.shift).sin()

    model = Fourier()

    assert watch(model, lambda: model(torch.randn(N, 1)).mean()).broadcasts == ()


def test_ordinary_models_give_no_report() -> None:
    transformer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    recurrent = nn.LSTM(4, 4)
    cases: list[tuple[nn.Module, Callable[[], Tensor]]] = [
        (transformer, lambda: F.cross_entropy(transformer(torch.randn(8, 8, 8)).flatten(0, 1), torch.arange(64) % 8)),
        (convolution, lambda: F.cross_entropy(convolution(torch.randn(4, 1, 4, 4)), torch.tensor([0, 1, 2, 0]))),
        (recurrent, lambda: recurrent(torch.randn(4, 4, 4))[0].square().mean()),
    ]
    for model, fn in cases:
        scan = watch(model, fn)
        assert scan == GraphScan(step=0)


# --- double softmax -----------------------------------------------------------------------------------------------


def test_a_softmax_before_cross_entropy_is_reported_with_its_line() -> None:
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Softmax(dim=-1)), torch.randn(N, 3), torch.randint(4, (N,))

    scan = watch(model, lambda: F.cross_entropy(model(x), y))  # the double softmax

    assert scan.double_softmaxes == (line_of("the double softmax"),)


DOUBLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "CrossEntropyLoss": lambda z, y: nn.CrossEntropyLoss()(z.softmax(-1), y),
    "log_softmax": lambda z, y: F.nll_loss(F.log_softmax(F.softmax(z, dim=1), dim=1), y),
    "a softmax's logarithm": lambda z, y: F.cross_entropy(F.log_softmax(F.softmax(z, dim=-1), dim=-1), y),
    "view between": lambda z, y: F.cross_entropy(z.view(2, -1, 4).softmax(-1).reshape(-1, 4), y),
    "permuted": lambda z, y: F.cross_entropy(z.view(2, -1, 4).softmax(-1).permute(0, 2, 1), y.view(2, -1)),
    "dropout between": lambda z, y: F.cross_entropy(F.dropout(z.softmax(-1), 0.1), y),
    "cast between": lambda z, y: F.cross_entropy(z.softmax(-1).float(), y),
    "torch.softmax twice": lambda z, y: torch.softmax(torch.softmax(z, -1), -1)[:, 0].log().mean(),
}


@pytest.mark.parametrize("loss", DOUBLE.values(), ids=DOUBLE.keys())
def test_each_double_softmax_is_reported(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x, y = nn.Linear(3, 4), torch.randn(N, 3), torch.randint(4, (N,))

    assert len(watch(model, lambda: loss(model(x), y)).double_softmaxes) == 1


SINGLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logits": lambda z, y: F.cross_entropy(z, y),
    "nll of log_softmax": lambda z, y: F.nll_loss(F.log_softmax(z, dim=1), y),
    "soft targets": lambda z, y: F.cross_entropy(z, z.detach().softmax(-1)),
    "another axis": lambda z, y: z.softmax(0).softmax(1)[:, 0].log().mean(),
    "arithmetic between": lambda z, y: F.cross_entropy(z.softmax(-1) * 5, y),
    "two of the same": lambda z, y: (z.softmax(0) * z.softmax(1)).sum(),
    "changed in place": lambda z, y: F.cross_entropy(z.softmax(-1).mul_(5), y),
    "a metric without a graph": lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z.detach().softmax(1), y),
    "attention, then a classifier": lambda z, y: F.cross_entropy((z.softmax(-1) @ torch.ones(4, 4)), y),
}


@pytest.mark.parametrize("loss", SINGLE.values(), ids=SINGLE.keys())
def test_a_single_softmax_is_not_reported(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x, y = nn.Linear(3, 4), torch.randn(N, 3), torch.randint(4, (N,))

    assert watch(model, lambda: loss(model(x), y)).double_softmaxes == ()


# --- parameters ---------------------------------------------------------------------------------------------------


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = [nn.Linear(3, 3), {"inner": nn.Linear(3, 3, bias=False)}]
        self.scales = (nn.Parameter(torch.ones(3)),)
        self.unused = [nn.Linear(3, 3)]
        self.again = [self.first]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1]["inner"](self.layers[0](self.first(x))) * self.scales[0]  # type: ignore[index,operator]


def test_parameters_in_plain_containers_are_named() -> None:
    model = Hiding()

    scan = watch(model, lambda: model(torch.randn(2, 3)).sum())

    assert scan.hidden == ("layers.0.weight", "layers.0.bias", "layers.1.inner.weight", "scales.0")


def test_hidden_parameters_held_by_an_optimizer_are_not_reported() -> None:
    model = Hiding()
    held = [*model.parameters(), *model.layers[0].parameters()]  # type: ignore[union-attr]
    trained = find_trained_parameters(model, torch.optim.SGD(held, lr=0.1))

    scan = GraphWatch(trained).read(0, model(torch.randn(2, 3)).sum())

    assert scan.hidden == ("layers.1.inner.weight", "scales.0")
    assert len(scan.foreign) == 2


def test_leaves_that_are_inputs_or_belong_to_another_model_are_not_hidden() -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 1)
    x = torch.randn(2, 3, requires_grad=True)

    scan = watch(model, lambda: other(model(x)).sum())

    assert scan.hidden == ()


def test_unoptimized_parameters_and_anomaly_mode_are_passed_on() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    seen = GraphWatch(find_trained_parameters(model, torch.optim.SGD(model[0].parameters(), lr=0.1)))
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        scan = seen.read(4, model(torch.randn(2, 3)).sum())

    assert scan.step == 4
    assert scan.unoptimized == ("1.weight", "1.bias")
    assert scan.anomaly_mode
    assert not seen.read(5, None).anomaly_mode


def test_leaves_are_also_found_after_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    loss = model(torch.randn(2, 3)).sum()
    loss.backward()

    assert {id(p) for p in find_leaves(loss)} == {id(p) for p in model.parameters()}


# --- invisible ----------------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Everything(nn.Module):
    """Dropout, batch norm, attention, a recurrent layer, checkpointing and a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.attention = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False)
        y, _ = self.recurrent(self.attention(y.unsqueeze(0)))
        out: Tensor = Double.apply(self.head(y[0]))  # type: ignore[no-untyped-call]
        return out


@every_device
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_watched_step_equals_an_unwatched_one(autocast: bool, device: str) -> None:
    plain = Everything().to(device)
    watched, batch = clone(plain), make_batches(1, device)[0]

    torch.manual_seed(3)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        loss = loss_of(plain)(batch)
    loss.backward()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    seen = make(watched)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast), seen:
        again = loss_of(watched)(batch)
    scan = seen.read(0, again)
    again.backward()

    assert torch.equal(loss, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert scan == GraphScan(step=0)
    for p, q in zip(plain.parameters(), watched.parameters()):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_a_frozen_encoder_keeps_its_fast_path() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, batch_first=True).eval()
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.encoder(x)
            y: Tensor = self.head(x)
            return y

    model, x = Frozen(), torch.randn(2, 4, 8)
    expected = model(x)

    with make(model):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("compile_model", [True, False], ids=["model", "function"])
def test_compiled_code_is_not_watched(compile_model: bool) -> None:
    model, x, y = nn.Linear(3, 1), torch.randn(N, 3), torch.randn(N)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def fn(x: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    called = torch.compile(model if compile_model else fn, backend=backend, fullgraph=True)
    seen = make(model)
    with seen:
        called(x)
    called(x)

    assert len(graphs) == 1
    assert seen.read(0, None).broadcasts == ()


def test_an_error_of_the_user_passes_through_and_ends_the_watch() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), make(model):
        model(torch.randn(2, 5))

    assert not torch.overrides._is_torch_function_mode_enabled()


def test_a_failing_check_gives_an_empty_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(SuspiciousOps, "after", fail)
    monkeypatch.setattr("steadygrad.measure.graph.find_leaves", fail)
    model, x, y = nn.Linear(3, 1), torch.randn(N, 3), torch.randn(N)

    assert watch(model, lambda: (model(x) - y).square().mean()) == GraphScan(step=0)


def test_marks_keep_no_tensor_alive() -> None:
    suspicious_ops = SuspiciousOps()
    x = torch.ones(3, requires_grad=True)
    y = x.unsqueeze(1).softmax(0)
    suspicious_ops.after(torch.unsqueeze, (x, 1), {}, y)
    suspicious_ops.after(torch.softmax, (y, 0), {}, y)
    assert len(suspicious_ops._meant) == len(suspicious_ops._softmaxed) == 1

    del y

    assert len(suspicious_ops._meant) == len(suspicious_ops._softmaxed) == 0
