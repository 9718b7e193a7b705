"""The guarded step on every kind of parameter and gradient: groups, dtypes, layouts, sparse, empty, changing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from listening import QUIET, last_of, listen, sgd
from torch import Tensor, nn
from training import assert_same, clone, loss_of, make_batches, make_model, snapshot, train_plain

from steadygrad import (
    FixedNorm,
    Guard,
    GuardConfig,
    MeasureConfig,
    Severity,
    ZClip,
)
from steadygrad.config import ClipStrategy
from steadygrad.testing import poison_batches, poison_gradient

# --- several optimizers and groups ----------------------------------------------------------------------------------


def test_two_optimizers_share_one_decision_and_one_record_per_step() -> None:
    model = make_model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters(), lr=0.01)]
    guard = Guard(model, optimizers, config=QUIET)
    poison_gradient(model[0].weight, at={1})  # only the first optimizer's parameter is bad
    records = []
    for step, batch in enumerate(make_batches(3)):
        before = snapshot(model, *optimizers)
        guard.step(loss_of(model), batch)
        records.append(last_of(guard))
        if step == 1:
            assert_same(before, snapshot(model, *optimizers))
    assert [(r.step, r.skipped, r.learning_rates) for r in records] == [
        (0, False, (0.1, 0.01)),
        (1, True, (0.1, 0.01)),
        (2, False, (0.1, 0.01)),
    ]
    assert guard.stats()["num_steps"] == 3


def test_two_optimizers_in_a_quiet_run_equal_the_plain_loop() -> None:
    plain, guarded = make_model(), make_model()
    batches = make_batches(5)
    kinds = [
        [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters())]
        for model in (plain, guarded)
    ]
    for batch in batches:
        loss_of(plain)(batch).backward()
        for optimizer in kinds[0]:
            optimizer.step()
            optimizer.zero_grad()
    guard = Guard(guarded, kinds[1], config=QUIET)
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, *kinds[0]), snapshot(guarded, *kinds[1]))


def test_the_norm_covers_the_parameters_of_all_optimizers() -> None:
    together, apart = make_model(), make_model()
    batch = make_batches(1)[0]
    one = Guard(together, sgd(together))
    two = Guard(apart, [torch.optim.SGD(apart[0].parameters(), lr=0.1), torch.optim.SGD(apart[2].parameters(), lr=0.1)])
    one.step(loss_of(together), batch)
    two.step(loss_of(apart), batch)
    assert last_of(one).grad_norm == last_of(two).grad_norm


def test_parameter_groups_keep_their_own_settings() -> None:
    plain, guarded = make_model(), make_model()
    batches = make_batches(5)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() < 2]
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 0.05}], lr=0.01
        )

    optimizers = [make(plain), make(guarded)]
    train_plain(plain, optimizers[0], batches)
    guard = Guard(guarded, optimizers[1], config=QUIET)
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, optimizers[0]), snapshot(guarded, optimizers[1]))
    assert last_of(guard).learning_rates == (0.01, 0.05)


def test_parameters_unknown_to_one_side_are_an_info_finding() -> None:
    model, stranger = make_model(), nn.Parameter(torch.ones(2))
    guard = Guard(model, torch.optim.SGD([*model[2].parameters(), stranger], lr=0.1))
    found = [f for f in guard.findings if f.kind == "partial_overlap"]
    assert [f.severity for f in found] == [Severity.INFO, Severity.INFO]
    assert "0.weight, 0.bias" in found[0].message
    assert "not in the model" in found[1].message
    assert guard.incidents == []


def test_a_frozen_parameter_in_no_optimizer_is_not_a_finding() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    guard = Guard(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert guard.findings == []


# --- parameter norms and update ratios ------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_update_ratios_and_parameter_norms_equal_a_float64_reference(every: int) -> None:
    model = make_model()
    tape, config = listen(measure=MeasureConfig(parameters_every=every))
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01), config=config)
    for step, batch in enumerate(make_batches(7)):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        guard.step(loss_of(model), batch)
        reading = tape.readings[-1]
        if step % every:
            assert reading.update_ratios is None
            assert reading.parameter_norms is None
            continue
        assert reading.update_ratios is not None
        assert reading.parameter_norms is not None
        assert reading.update_ratios.keys() == reading.parameter_norms.keys() == before.keys()
        for name, parameter in model.named_parameters():
            norm = before[name].norm().item()
            moved = (parameter.detach().double() - before[name]).norm().item()
            # Norms are float64; the difference is taken in fp32, which is exact for weights that barely moved.
            assert reading.parameter_norms[name] == pytest.approx(norm, rel=1e-12)
            assert reading.update_ratios[name] == pytest.approx(moved / norm, rel=1e-6)
            assert reading.update_ratios[name] > 0


def test_a_skipped_step_has_no_update_ratios() -> None:
    model = make_model()
    tape, config = listen(measure=MeasureConfig(parameters_every=1))
    guard = Guard(model, sgd(model), config=config)
    guard.step(loss_of(model), next(poison_batches(make_batches(1), at={0})))
    assert tape.readings[-1].update_ratios is None


def test_measuring_updates_changes_no_weight() -> None:
    plain, measured = make_model(), make_model()
    for model, config in ((plain, GuardConfig()), (measured, GuardConfig(measure=MeasureConfig(parameters_every=1)))):
        guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01), config=config)
        for batch in make_batches(5):
            guard.step(loss_of(model), batch)
    assert_same(snapshot(plain), snapshot(measured))


# --- unusual parameters and gradients -------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Parameters of every kind, each with a known gradient: loss = sum <p, target>."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))


def pull(model: nn.Module, targets: Mapping[str, Tensor]) -> Tensor:
    """Return a loss whose gradient with respect to each parameter is its target."""
    named = dict(model.named_parameters())
    terms = [(named[name] * target.conj()).sum() for name, target in targets.items()]
    return torch.stack([term.real.float() if term.is_complex() else term.float() for term in terms]).sum()


def reference_norm(targets: Iterable[Tensor]) -> float:
    squares = [
        (t.abs().double() if not t.is_complex() else t.to(torch.complex128).abs()).square().sum() for t in targets
    ]
    return math.sqrt(sum(square.item() for square in squares))


def mixed() -> tuple[Zoo, dict[str, Tensor]]:
    values = {
        "fp32": torch.randn(5, 3),
        "bf16": torch.randn(7).bfloat16(),
        "fp16": torch.randn(2, 3).half(),
        "fp64": torch.randn(3).double(),
    }
    return Zoo(**{k: v.clone() for k, v in values.items()}), {k: torch.randn_like(v) for k, v in values.items()}


def test_mixed_dtypes_in_a_quiet_run_equal_the_plain_loop() -> None:
    guarded, targets = mixed()
    plain = clone(guarded)
    optimizers = [sgd(plain, momentum=0.9), sgd(guarded, momentum=0.9)]
    guard = Guard(guarded, optimizers[1], config=QUIET)
    for _ in range(3):
        pull(plain, targets).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        guard.step(lambda: pull(guarded, targets))
    assert_same(snapshot(plain, optimizers[0]), snapshot(guarded, optimizers[1]))
    assert last_of(guard).grad_norm == pytest.approx(reference_norm(targets.values()), rel=1e-6)  # fp32 products


def test_mixed_dtypes_are_clipped_to_one_global_norm() -> None:
    model, targets = mixed()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    guard = Guard(model, sgd(model, lr=1.0), config=GuardConfig(clip=FixedNorm(max_norm=0.5)))
    guard.step(lambda: pull(model, targets))
    coefficient = 0.5 / (reference_norm(targets.values()) + 1e-6)
    assert last_of(guard).clip_coefficient == pytest.approx(coefficient, rel=1e-6)
    for name, parameter in model.named_parameters():
        # The gradient is rounded once to its dtype after scaling, the new weight once more; the norm itself comes from
        # fp32 products, which shows in the float64 parameter.
        expected = before[name].double() - (targets[name].double() * coefficient).to(parameter.dtype).double()
        tolerance = max(2 * torch.finfo(parameter.dtype).eps, 1e-6)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp64"])
def test_a_nan_in_any_dtype_is_found(name: str) -> None:
    model, targets = mixed()
    guard = Guard(model, sgd(model))
    before = snapshot(model)
    poison_gradient(getattr(model, name), at={0})
    guard.step(lambda: pull(model, targets))
    assert_same(before, snapshot(model))
    assert guard.findings[0].evidence["parameters"] == [name]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_are_measured_and_clipped(dtype: torch.dtype) -> None:
    model = Zoo(wave=torch.randn(4, 3, dtype=dtype), real=torch.randn(3))
    targets = {"wave": torch.randn(4, 3, dtype=dtype), "real": torch.randn(3)}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    guard = Guard(model, sgd(model, lr=1.0), config=GuardConfig(clip=FixedNorm(max_norm=0.5)))
    guard.step(lambda: pull(model, targets))
    norm = reference_norm(targets.values())
    assert last_of(guard).grad_norm == pytest.approx(norm, rel=1e-6)
    for name, parameter in model.named_parameters():
        expected = before[name] - targets[name] * (0.5 / (norm + 1e-6))
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)  # a few fp32 roundings


@pytest.mark.parametrize("value", [complex(math.nan, 0), complex(0, math.inf)])
def test_one_nonfinite_half_of_a_complex_number_is_enough(value: complex) -> None:
    model = Zoo(wave=torch.randn(3, dtype=torch.complex64))
    guard = Guard(model, sgd(model))
    before = snapshot(model)
    model.wave.grad = torch.tensor([1, value, 1], dtype=torch.complex64)
    guard.step()
    assert_same(before, snapshot(model))
    assert last_of(guard).num_nonfinite == 1


def test_parameters_without_elements_do_no_harm() -> None:
    plain = Zoo(nothing=torch.zeros(0, 3), something=torch.randn(3))
    guarded = clone(plain)
    targets = {"nothing": torch.zeros(0, 3), "something": torch.randn(3)}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, guarded)]
    config = GuardConfig(clip=FixedNorm(max_norm=1e9), measure=MeasureConfig(parameters_every=1))
    guard = Guard(guarded, optimizers[1], config=config)
    for _ in range(2):
        pull(plain, targets).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        guard.step(lambda: pull(guarded, targets))
    assert_same(snapshot(plain, optimizers[0]), snapshot(guarded, optimizers[1]))
    assert guard.health()["overall_healthy"]


def test_a_model_with_only_an_empty_gradient_steps() -> None:
    model = Zoo(nothing=torch.zeros(0))
    guard = Guard(model, sgd(model))
    guard.step(lambda: model.nothing.sum())
    assert (last_of(guard).grad_norm, last_of(guard).skipped) == (0.0, False)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "strided": lambda g: torch.stack([g, torch.full_like(g, math.nan)], dim=-1)[..., 0],  # NaN in the gaps
    "offset": lambda g: torch.cat([torch.full_like(g[:1], math.nan), g])[1:],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_noncontiguous_gradients_are_measured_and_clipped(layout: Callable[[Tensor], Tensor]) -> None:
    gradient = torch.randn(5, 4)
    models = [Zoo(w=torch.ones(5, 4)) for _ in range(2)]
    for model, grad in zip(models, (gradient.clone(), layout(gradient))):
        model.w.grad = grad
        guard = Guard(model, sgd(model), config=GuardConfig(clip=FixedNorm(max_norm=0.5)))
        guard.step()
        assert last_of(guard).grad_norm == pytest.approx(gradient.double().norm().item(), rel=1e-6)
        assert not last_of(guard).skipped
    assert torch.equal(models[0].w, models[1].w)


def test_a_channels_last_model_equals_the_plain_loop() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)).to(memory_format=torch.channels_last)
    guarded = clone(plain)
    batches = [(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last), torch.tensor([0, 2])) for _ in range(3)]
    optimizers = [sgd(plain), sgd(guarded)]
    train_plain(plain, optimizers[0], batches)
    guard = Guard(guarded, optimizers[1], config=QUIET)
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain), snapshot(guarded))


@pytest.mark.parametrize("clip", [FixedNorm(max_norm=1.0), ZClip(), None], ids=["fixed", "zclip", "none"])
def test_a_huge_finite_gradient_is_exploding_and_not_nonfinite(clip: ClipStrategy | None) -> None:
    model = Zoo(w=torch.zeros(4))
    direction = torch.tensor([1e25, -1e25, 0.0, 1e25])  # the squares overflow fp32
    guard = Guard(model, sgd(model, lr=1.0), config=GuardConfig(clip=clip))
    model.w.grad = direction.clone()
    guard.step()
    record = last_of(guard)
    assert not record.skipped
    assert record.num_nonfinite == 0
    assert record.grad_norm == pytest.approx(math.sqrt(3) * 1e25, rel=1e-6)
    assert "exploding_gradient" in {f.kind for f in guard.findings}
    assert not {f.kind for f in guard.findings} & {"nonfinite_loss", "nonfinite_gradient"}
    if clip is None:
        assert torch.equal(model.w.detach(), -direction)
    else:
        # Scaled by 1 / norm in fp32 and rounded a few times.
        torch.testing.assert_close(model.w.detach(), -direction / (math.sqrt(3) * 1e25), rtol=1e-5, atol=0)
        assert record.clipped


def test_stock_clipping_would_zero_that_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1e25, -1e25, 0.0, 1e25])
    nn.utils.clip_grad_norm_([parameter], 1.0)
    assert not parameter.grad.any()


# --- sparse gradients -----------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """A sparse embedding and, if requested, a dense head."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 2) if head else nn.Identity()

    def loss(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens)).square().sum(-1).mean()


TOKENS = [torch.tensor([1, 1, 3, 7]), torch.tensor([0, 3, 3, 3]), torch.tensor([9, 2, 1, 1])]
SPARSE: dict[str, Callable[[Bag], list[torch.optim.Optimizer]]] = {
    "SGD": lambda bag: [torch.optim.SGD(bag.parameters(), lr=0.1)],
    "SparseAdam": lambda bag: [
        torch.optim.SparseAdam(bag.table.parameters(), lr=0.1),
        torch.optim.SGD(bag.head.parameters(), lr=0.1),
    ],
}
every_sparse = pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())


@every_sparse
def test_sparse_gradients_in_a_quiet_run_equal_the_plain_loop(make: Callable[[Bag], list[Any]]) -> None:
    plain, guarded = Bag(head=True), Bag(head=True)
    plain_optimizers, optimizers = make(plain), make(guarded)
    guard = Guard(guarded, optimizers, config=QUIET)
    for tokens in TOKENS:
        plain.loss(tokens).backward()
        for optimizer in plain_optimizers:
            optimizer.step()
            optimizer.zero_grad()
        guard.step(guarded.loss, tokens)
    assert_same(snapshot(plain, *plain_optimizers), snapshot(guarded, *optimizers))


@every_sparse
def test_a_bad_sparse_gradient_never_reaches_a_weight(make: Callable[[Bag], list[Any]]) -> None:
    bag = Bag(head=True)
    optimizers = make(bag)
    guard = Guard(bag, optimizers, config=QUIET)
    guard.step(bag.loss, TOKENS[0])
    with torch.no_grad():
        bag.table.weight[9] = 1e30  # finite, but the square of the output is not
    before = snapshot(bag, *optimizers)
    guard.step(bag.loss, TOKENS[2])
    assert last_of(guard).skipped
    assert_same(before, snapshot(bag, *optimizers))


def test_repeated_rows_of_a_sparse_gradient_are_summed_before_measuring() -> None:
    bag = Bag(head=False)
    dense = bag.table.weight.detach().clone().requires_grad_()
    nn.functional.embedding(TOKENS[0], dense).square().sum(-1).mean().backward()
    assert dense.grad is not None
    norm = dense.grad.double().norm().item()
    tape, config = listen(clip=FixedNorm(max_norm=norm / 2))
    guard = Guard(bag, torch.optim.SGD(bag.parameters(), lr=1.0), config=config)
    guard.step(bag.loss, TOKENS[0])
    stats = tape.readings[0].gradients["table.weight"]
    assert stats.norm == pytest.approx(norm, rel=1e-6)  # fp32 products
    assert stats.num_zeros == 7 * 4  # the rows that the sparse gradient does not store
    expected = dense.detach() - dense.grad * 0.5
    # 1e-6 is added to the norm in the coefficient; then a few fp32 roundings.
    torch.testing.assert_close(bag.table.weight.detach(), expected, rtol=1e-5, atol=1e-5)


# --- gradients that appear and disappear ----------------------------------------------------------------------------


class Branches(nn.Module):
    """Two branches, of which a step uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def loss(self, batch: tuple[Tensor, Tensor], use: str) -> Tensor:
        outputs = [branch(batch[0]) for name, branch in self.named_children() if name in use]
        return nn.functional.cross_entropy(torch.stack(outputs).sum(0), batch[1])


@pytest.mark.parametrize("clip", [FixedNorm(max_norm=1e9), ZClip(max_norm=None, z=1e9)], ids=["fixed", "zclip"])
def test_parameters_may_have_a_gradient_only_at_some_steps(clip: ClipStrategy) -> None:
    plain, guarded = Branches(), Branches()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, guarded)]
    tape, config = listen(clip=clip)
    guard = Guard(guarded, optimizers[1], config=config)
    uses = ["left", "left right", "right", "left right", "left"]
    for batch, use in zip(make_batches(5), uses):
        plain.loss(batch, use).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        guard.step(guarded.loss, batch, use)
    assert_same(snapshot(plain, optimizers[0]), snapshot(guarded, optimizers[1]))
    seen = [" ".join(dict.fromkeys(name.partition(".")[0] for name in r.gradients)) for r in tape.readings]
    assert seen == uses


def test_a_nan_in_a_later_gradient_is_found() -> None:
    model = Branches()
    guard = Guard(model, sgd(model))
    batches = make_batches(3)
    guard.step(model.loss, batches[0], "left")
    poison_gradient(model.right.weight, at={0})
    before = snapshot(model)
    guard.step(model.loss, batches[1], "left right")
    assert_same(before, snapshot(model))
    assert guard.findings[-1].evidence["parameters"] == ["right.weight"]
    guard.step(model.loss, batches[2], "left right")
    assert not last_of(guard).skipped


def test_unfrozen_parameters_are_guarded_from_that_step_on() -> None:
    plain, guarded = make_model(), make_model()
    optimizers = [sgd(plain, momentum=0.9), sgd(guarded, momentum=0.9)]
    batches = make_batches(6)
    for model in (plain, guarded):
        model[0].requires_grad_(False)
    guard = Guard(guarded, optimizers[1], config=QUIET)
    train_plain(plain, optimizers[0], batches[:2])
    for batch in batches[:2]:
        guard.step(loss_of(guarded), batch)
    for model in (plain, guarded):
        model[0].requires_grad_(True)
    train_plain(plain, optimizers[0], [batches[2], batches[4], batches[5]])
    poison_gradient(guarded[0].weight, at={1})
    for batch in batches[2:]:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, optimizers[0]), snapshot(guarded, optimizers[1]))
    assert {incident.step for incident in guard.incidents} == {3}
