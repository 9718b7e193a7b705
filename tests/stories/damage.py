"""Finite damage: the training continues and ends worse than it should. Nothing here is NaN or Inf.

Each story damages the weights, the moments, the rate or the data of one of the three trainings in mid-run. Weights are
overwritten through `.data`, as by a broken kernel, bad memory or a careless program: no version changes. With a data
change, the data are replaced at the same step, in the clean run too; then the level of the loss says nothing, and only
the same batches under older weights separate damage from new data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trainings import (
    ALPHABET,
    BACK,
    SYMBOLS,
    Batch,
    MakeFault,
    Story,
    Training,
    train_images,
    train_language,
    train_memory,
)

Damage = Callable[[nn.Module, torch.optim.Optimizer], Any]
"""Does the damage; called before a batch."""
Change = Callable[[Batch], Batch]

AT = {"transformer": 300, "cnn": 140, "rnn": 440}
"""The step of the damage and of the data change: late enough to have learnt something, early enough to recover."""


@dataclass(frozen=True, kw_only=True)
class ChangingTraining(Training):
    """A training whose data change midway; the held-out data are of the new kind."""

    change: Change
    changes_at: int

    def order(self) -> list[Batch]:
        """Return the batches in this seed's order; the change comes at the same step for each seed."""
        batches = super().order()
        return [*batches[: self.changes_at], *map(self.change, batches[self.changes_at :])]


def change_data(training: Training) -> ChangingTraining:
    """Return the same training on other data from step AT on."""
    change = CHANGES[training.name]
    fields = {field.name: getattr(training, field.name) for field in dataclasses.fields(training)}
    fields["held_out"] = [change(batch) for batch in training.held_out]
    return ChangingTraining(**fields, change=change, changes_at=AT[training.name])


def mix_spellings(batch: Batch) -> Batch:
    """Spell every other text with the reversed alphabet: half of the data stays the same."""
    inputs, targets = (column.clone() for column in batch)
    for column in (inputs, targets):
        column[::2] = len(ALPHABET) - 1 - column[::2]
    return inputs, targets


def mirror_images(batch: Batch) -> Batch:
    """Swap two of the four directions."""
    return batch[0].flip(3), batch[1]


def permute_answers(batch: Batch) -> Batch:
    """Rename every symbol: everything learnt is wrong."""
    return batch[0], (batch[1] + 1) % SYMBOLS


CHANGES: dict[str, Change] = {"transformer": mix_spellings, "cnn": mirror_images, "rnn": permute_answers}


# --- kinds of damage -------------------------------------------------------------------------------------------------


def repeat(harm: Damage, *, at: int, count: int = 1) -> MakeFault:
    """Do the damage before batch number `at`, and before each of the next ones, `count` in total."""

    def make_fault(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        return lambda number: harm(model, optimizer) if at <= number < at + count else None

    return make_fault


def set_rate(factor: float, *, at: int, until: int | None = None) -> MakeFault:
    """Write a wrong rate into the optimizer once, and the right one again at `until`; nothing writes it in between."""

    def make_fault(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        rates = [group["lr"] for group in optimizer.param_groups]

        def before_batch(number: int) -> None:
            if number in (at, until):
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * factor if number == at else rate

        return before_batch

    return make_fault


def copy_early_average(*, at: int, num_steps: int = 20) -> MakeFault:
    """Replace the weights with an average that was never updated after the first steps."""

    def make_fault(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        averages = [weight.detach().clone() for weight in model.parameters()]

        def before_batch(number: int) -> None:
            for weight, average in zip(model.parameters(), averages):
                if number < num_steps:
                    average.lerp_(weight.detach(), 0.1)
                if number == at:
                    weight.data.copy_(average)

        return before_batch

    return make_fault


def scale_weights(part: str, factor: float) -> Damage:
    """Multiply matrices with `part` in their names by `factor`."""

    def harm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for weight in _find_matrices(model, part):
            weight.data.mul_(factor)

    return harm


def add_noise(deviations: float) -> Damage:
    """Add noise to each matrix, in units of its standard deviation."""

    def harm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(9)
        for weight in _find_matrices(model):
            weight.data.add_(deviations * weight.data.std() * torch.randn(weight.shape, generator=generator))

    return harm


def permute_rows(part: str) -> Damage:
    """Permute the rows of a matrix: the values are right, their positions are not."""

    def harm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for weight in _find_matrices(model, part):
            order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(9))
            weight.data.copy_(weight.data[order])

    return harm


def round_weights(num_bits: int) -> Damage:
    """Round all matrices to few bits."""

    def harm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for weight in _find_matrices(model):
            step = weight.data.abs().max() / (2 ** (num_bits - 1) - 1)
            weight.data.copy_((weight.data / step).round() * step)

    return harm


def scale_batchnorm(factor: float) -> Damage:
    """Multiply the scales of every BatchNorm by `factor`, and its running variance by a hundred."""

    def harm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.data.mul_(factor)
                module.running_var.data.mul_(100.0)

    return harm


def scale_state(name: str, factor: float) -> Damage:
    """Multiply one kind of the optimizer's state by `factor`; its counters stay."""

    def harm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state[name].mul_(factor)

    return harm


def lose_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Zero Adam's moments but not its counter, so its bias correction is wrong: steps of ten times the rate."""
    for name in ("exp_avg", "exp_avg_sq"):
        scale_state(name, 0.0)(model, optimizer)


def spoil_batches(batches: Sequence[Batch], *, at: int, count: int, factor: float) -> list[Batch]:
    """Multiply the inputs of `count` batches in a row by `factor`, and give each label to another sample."""
    bad = range(at, at + count)
    return [(x * factor, y.roll(1)) if number in bad else (x, y) for number, (x, y) in enumerate(batches)]


def _find_matrices(model: nn.Module, part: str = "") -> list[Tensor]:
    return [weight for name, weight in model.named_parameters() if part in name and weight.dim() > 1]


# --- the stories -----------------------------------------------------------------------------------------------------


def make_damage_stories(*, with_data_change: bool = False) -> list[Story]:
    """Return thirteen trainings with finite damage, optionally with new data from the same step on.

    Unguarded, most end with 1.3 to 60 times the clean held-out loss. Two recover by themselves: lost moments, and
    weights of two bits, which end between 1.0 and 1.35; there a guard only must not make things worse. With new data
    two more end below 1.35, embedding rows and the early average, since much must be learnt again anyway. `finds` is
    empty: findings without an action are up to the rules.
    """
    # The transformer needs another hundred steps to learn the second spelling.
    language, images, memory = train_language(500 if with_data_change else 400), train_images(), train_memory()
    if with_data_change:
        language, images, memory = map(change_data, (language, images, memory))
    late, middle, end = (AT[training.name] for training in (language, images, memory))
    lasting: list[tuple[str, Training, MakeFault]] = [
        ("rate x 100 for good, SGD", images, set_rate(100.0, at=middle)),
        ("rate x 30 for 40 steps, AdamW", language, set_rate(30.0, at=late, until=late + 40)),
        ("attention matrices x 20", language, repeat(scale_weights("queries_keys_values", 20.0), at=late)),
        ("noise of 3 sigma on matrices", language, repeat(add_noise(3.0), at=late)),
        ("embedding rows permuted", language, repeat(permute_rows("letters"), at=late)),
        ("first moment x 100", language, repeat(scale_state("exp_avg", 100.0), at=late)),
        ("second moment x 1e-8, ten steps", language, repeat(scale_state("exp_avg_sq", 1e-8), at=late, count=10)),
        ("momentum x 1000, SGD", images, repeat(scale_state("momentum_buffer", 1000.0), at=middle)),
        ("early average copied back", language, copy_early_average(at=late)),
        ("BatchNorm scales x 20", images, repeat(scale_batchnorm(20.0), at=middle)),
    ]
    healing: list[tuple[str, Training, MakeFault]] = [
        ("moments lost, counter kept", language, repeat(lose_moments, at=late)),
        ("weights rounded to 2 bits", language, repeat(round_weights(2), at=late)),
    ]
    suffix = ", new data" if with_data_change else ""
    stories = [
        Story(name=name + suffix, clean=clean, make_fault=make_fault, finds=frozenset(), does=does)
        for those, does in ((lasting, BACK), (healing, frozenset()))
        for name, clean, make_fault in those
    ]
    spoil = functools.partial(spoil_batches, at=end, count=20, factor=50.0)
    return [*stories, Story(name=f"20 bad batches{suffix}", clean=memory, spoil=spoil, finds=frozenset(), does=BACK)]
