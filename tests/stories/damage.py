"""Damage that stays finite: the training goes on, and ends worse than it should. Nothing here is NaN or Inf.

Each story hurts the weights, the moments, the rate or the data of one of the three trainings in mid-run. Weights are
overwritten through `.data`, as a broken kernel, a bad memory cell or a careless program does it: no version moves. With
a data change the data becomes another one at the same step, for the clean run too; then the level of the loss says
nothing, and only the same batches under older weights tell damage from news.
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
    Meddle,
    Story,
    Training,
    train_images,
    train_language,
    train_memory,
)

Hurt = Callable[[nn.Module, torch.optim.Optimizer], Any]
"""Does the damage; called before a batch."""
Change = Callable[[Batch], Batch]

AT = {"transformer": 300, "cnn": 140, "rnn": 440}
"""The step of the damage, and of the data change: late enough to have something to lose, early enough to be saved."""


@dataclass(frozen=True, kw_only=True)
class ChangingTraining(Training):
    """A training whose data becomes another one on the way; what is held out is of the new kind."""

    change: Change
    changes_at: int

    def order(self) -> list[Batch]:
        """The batches as this seed trains on them; the change comes at the same step for each seed."""
        batches = super().order()
        return [*batches[: self.changes_at], *map(self.change, batches[self.changes_at :])]


def change_data(training: Training) -> ChangingTraining:
    """The same training on other data from its step in AT on."""
    change = CHANGES[training.name]
    fields = {field.name: getattr(training, field.name) for field in dataclasses.fields(training)}
    fields["held_out"] = [change(batch) for batch in training.held_out]
    return ChangingTraining(**fields, change=change, changes_at=AT[training.name])


def mix_spellings(batch: Batch) -> Batch:
    """Every other text is spelled with the alphabet turned around: half of the data is as it was."""
    inputs, targets = (column.clone() for column in batch)
    for column in (inputs, targets):
        column[::2] = len(ALPHABET) - 1 - column[::2]
    return inputs, targets


def mirror_images(batch: Batch) -> Batch:
    """Two of the four directions change places."""
    return batch[0].flip(3), batch[1]


def permute_answers(batch: Batch) -> Batch:
    """Every symbol has another name: all that is known is wrong."""
    return batch[0], (batch[1] + 1) % SYMBOLS


CHANGES: dict[str, Change] = {"transformer": mix_spellings, "cnn": mirror_images, "rnn": permute_answers}


# --- what is hurt ----------------------------------------------------------------------------------------------------


def repeat(hurt: Hurt, *, at: int, count: int = 1) -> Meddle:
    """Do the damage before the batch numbered `at`, and before each of the next ones up to `count` in all."""

    def meddle(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        return lambda number: hurt(model, optimizer) if at <= number < at + count else None

    return meddle


def set_rate(factor: float, *, at: int, until: int | None = None) -> Meddle:
    """Write a wrong rate into the optimizer once, and the right one again at `until`; in between nobody writes it."""

    def meddle(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        rates = [group["lr"] for group in optimizer.param_groups]

        def before_batch(number: int) -> None:
            if number in (at, until):
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * factor if number == at else rate

        return before_batch

    return meddle


def copy_early_average(*, at: int, num_steps: int = 20) -> Meddle:
    """An average that was forgotten after the first steps takes the place of the weights."""

    def meddle(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        averages = [weight.detach().clone() for weight in model.parameters()]

        def before_batch(number: int) -> None:
            for weight, average in zip(model.parameters(), averages):
                if number < num_steps:
                    average.lerp_(weight.detach(), 0.1)
                if number == at:
                    weight.data.copy_(average)

        return before_batch

    return meddle


def scale_weights(part: str, factor: float) -> Hurt:
    """Matrices with `part` in their names become `factor` times as large."""

    def hurt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for weight in _find_matrices(model, part):
            weight.data.mul_(factor)

    return hurt


def add_noise(deviations: float) -> Hurt:
    """Noise of so many standard deviations of each matrix is added to it."""

    def hurt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(9)
        for weight in _find_matrices(model):
            weight.data.add_(deviations * weight.data.std() * torch.randn(weight.shape, generator=generator))

    return hurt


def permute_rows(part: str) -> Hurt:
    """The rows of a matrix come in another order: the values are right, their places are not."""

    def hurt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for weight in _find_matrices(model, part):
            order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(9))
            weight.data.copy_(weight.data[order])

    return hurt


def round_weights(num_bits: int) -> Hurt:
    """All matrices are rounded to so few bits."""

    def hurt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for weight in _find_matrices(model):
            step = weight.data.abs().max() / (2 ** (num_bits - 1) - 1)
            weight.data.copy_((weight.data / step).round() * step)

    return hurt


def scale_batchnorm(factor: float) -> Hurt:
    """Scales of every BatchNorm become `factor` times as large, its running variance a hundred times."""

    def hurt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.data.mul_(factor)
                module.running_var.data.mul_(100.0)

    return hurt


def scale_state(name: str, factor: float) -> Hurt:
    """One kind of the optimizer's state becomes `factor` times as large; its counters stay."""

    def hurt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state[name].mul_(factor)

    return hurt


def lose_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Adam's moments are zero and its counter is not, so its bias correction is wrong: steps of ten times the rate."""
    for name in ("exp_avg", "exp_avg_sq"):
        scale_state(name, 0.0)(model, optimizer)


def spoil_batches(batches: Sequence[Batch], *, at: int, count: int, factor: float) -> list[Batch]:
    """`count` batches in a row have inputs `factor` times as large, and each label belongs to another sample."""
    bad = range(at, at + count)
    return [(x * factor, y.roll(1)) if number in bad else (x, y) for number, (x, y) in enumerate(batches)]


def _find_matrices(model: nn.Module, part: str = "") -> list[Tensor]:
    return [weight for name, weight in model.named_parameters() if part in name and weight.dim() > 1]


# --- the stories -----------------------------------------------------------------------------------------------------


def make_damage_stories(*, with_data_change: bool = False) -> list[Story]:
    """Thirteen trainings with finite damage, and optionally with new data from the same step on.

    Unguarded, most end with 1.3 to 60 times the clean held-out loss. Two heal by themselves and need nobody: lost
    moments, and weights of two bits, which end between 1.0 and 1.35; a guard must only not make them worse. With new
    data two more end below 1.35, embedding rows and the early average, since much is to be learnt again anyway. `finds`
    is empty: what is reported beside the action is for the rules to say.
    """
    # The transformer needs a hundred steps more to learn the second spelling.
    language, images, memory = train_language(500 if with_data_change else 400), train_images(), train_memory()
    if with_data_change:
        language, images, memory = map(change_data, (language, images, memory))
    late, middle, end = (AT[training.name] for training in (language, images, memory))
    hurt: list[tuple[str, Training, Meddle]] = [
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
    healing: list[tuple[str, Training, Meddle]] = [
        ("moments lost, counter kept", language, repeat(lose_moments, at=late)),
        ("weights rounded to 2 bits", language, repeat(round_weights(2), at=late)),
    ]
    suffix = ", new data" if with_data_change else ""
    stories = [
        Story(name=name + suffix, clean=clean, meddle=meddle, finds=frozenset(), does=does)
        for those, does in ((hurt, BACK), (healing, frozenset()))
        for name, clean, meddle in those
    ]
    spoil = functools.partial(spoil_batches, at=end, count=20, factor=50.0)
    return [*stories, Story(name=f"20 bad batches{suffix}", clean=memory, spoil=spoil, finds=frozenset(), does=BACK)]
