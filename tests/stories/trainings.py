"""Three small real trainings, the two loops that run them (plain and guarded), and faults for them.

Each has data with noise that no model can learn, so its clean final loss has a lower bound, far below guessing: "within
5 % of the clean run" then means that a run was saved, not that its noise was lucky.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad import Action, Guard, GuardConfig
from steadygrad.config import ClipStrategy, Policy
from steadygrad.errors import TrainingHalted
from steadygrad.testing import corrupt_weight, jump_lr, poison_batches, scale_batches

Batch = tuple[Tensor, Tensor]
MakeFault = Callable[[nn.Module, torch.optim.Optimizer], Callable[[int], None]]
"""Created for a run, then called before each batch with its number: the place for faults."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its data, and the loss that it should reach."""

    name: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batches: Sequence[Batch] = field(repr=False)
    held_out: Sequence[Batch] = field(repr=False)
    guessing: float
    """Loss of the best constant prediction."""
    seed: int = 0
    """Seed of the initial weights and of dropout; above 0 it also shuffles the batches."""
    make_scheduler: Callable[[torch.optim.Optimizer], Any] = lambda _: None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy; the last dimension of the output holds the classes."""
        output = model(batch[0])
        return F.cross_entropy(output.reshape(-1, output.shape[-1]), batch[1].reshape(-1))

    def order(self) -> list[Batch]:
        """Return the batches in this seed's order."""
        if not self.seed:
            return list(self.batches)
        places = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(self.seed))
        return [self.batches[place] for place in places.tolist()]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the loss on held-out data."""
        was_training = model.training
        model.eval()
        losses = [float(self.loss(model, batch)) for batch in self.held_out]
        model.train(was_training)
        return sum(losses) / len(losses)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a training ended."""

    loss: float
    """Held-out loss at the end; NaN when it died."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: Guard | None = None
    halted: TrainingHalted | None = None

    @property
    def died(self) -> bool:
        """Whether a weight is NaN or Inf."""
        return not all(p.isfinite().all() for p in self.model.parameters())


def train_plain(
    training: Training,
    *,
    batches: Iterable[Batch] | None = None,
    make_fault: MakeFault | None = None,
    clip: Callable[[nn.Module], Any] | None = None,
) -> Run:
    """Train with the usual loop; `clip` gets the model between backward and step."""
    model, optimizer, scheduler = _begin(training)
    before_batch = _do_nothing if make_fault is None else make_fault(model, optimizer)
    for number, batch in enumerate(training.order() if batches is None else batches):
        before_batch(number)
        training.loss(model, batch).backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return Run(loss=training.evaluate(model), model=model, optimizer=optimizer)


def train_guarded(
    training: Training,
    config: GuardConfig | None = None,
    *,
    batches: Iterable[Batch] | None = None,
    make_fault: MakeFault | None = None,
    run_dir: Path | None = None,
) -> Run:
    """Train with the same loop on a Guard."""
    model, optimizer, scheduler = _begin(training)
    guard = Guard(model, optimizer, config=config, scheduler=scheduler, run_dir=run_dir)
    fn, halted = functools.partial(training.loss, model), None
    before_batch = _do_nothing if make_fault is None else make_fault(model, optimizer)
    source = _count(training.order() if batches is None else batches, before_batch)
    try:
        for batch in guard.batches(source):
            guard.step(fn, batch)
        guard.flush()
    except TrainingHalted as error:
        halted = error
    return Run(loss=training.evaluate(model), model=model, optimizer=optimizer, guard=guard, halted=halted)


def _begin(training: Training) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(training.seed)
    model = training.make_model().train()
    optimizer = training.make_optimizer(model.parameters())
    return model, optimizer, training.make_scheduler(optimizer)


def _do_nothing(number: int) -> None:
    """Change nothing."""


def _count(batches: Iterable[Batch], before_batch: Callable[[int], None]) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        before_batch(number)
        yield batch


# --- a transformer that learns a little language -------------------------------------------------------------------

NOUNS = ["cat", "dog", "bird", "fish", "fox"]
VERBS = ["sees", "likes", "hears"]
CONTEXT = 24


def write_text(num_sentences: int, seed: int) -> str:
    """Write sentences of a tiny grammar. The words are random; their spelling and what may follow is not."""
    generator = torch.Generator().manual_seed(seed)

    def pick(words: Sequence[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=generator))]

    return "".join(f"the {pick(NOUNS)} {pick(VERBS)} the {pick(NOUNS)}. " for _ in range(num_sentences))


ALPHABET = sorted(set(write_text(100, 0)))


def encode(text: str) -> Tensor:
    return torch.tensor([ALPHABET.index(letter) for letter in text])


def make_text_batches(count: int, seed: int, size: int = 16) -> list[Batch]:
    letters = encode(write_text(400, seed))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(letters) - CONTEXT - 1, (count, size), generator=generator)
    windows = letters[starts[..., None] + torch.arange(CONTEXT + 1)]  # (count, size, CONTEXT + 1)
    return [(window[:, :-1], window[:, 1:]) for window in windows]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.dropout(self.mlp(self.mixed(x)))


class Transformer(nn.Module):
    def __init__(self, *, width: int = 32, num_blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # (batch, CONTEXT, letters)


@functools.cache
def train_language(num_steps: int = 400, **changes: Any) -> Training:
    """Train a transformer on letters; AdamW. Guessing by letter frequency costs 2.5 nats, knowing the grammar 0.25."""
    frequencies = encode(write_text(400, 1)).bincount().double()
    frequencies = frequencies / frequencies.sum()
    training = Training(
        name="transformer",
        make_model=Transformer,
        make_optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
        batches=make_text_batches(num_steps, seed=1),
        held_out=make_text_batches(16, seed=2),
        guessing=float(-(frequencies * frequencies.log()).sum()),
    )
    return dataclasses.replace(training, **changes)


# --- a CNN that classifies stripes -----------------------------------------------------------------------------------

NUM_CLASSES = 4
SIDE = 12


def make_images(count: int, seed: int) -> Batch:
    """Noisy stripes in four directions; one label in ten is wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    angles = labels.double() * math.pi / NUM_CLASSES
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phase = 6.3 * torch.rand(count, generator=generator)
    waves = angles.cos()[:, None, None] * x + angles.sin()[:, None, None] * y + phase[:, None, None]
    images = waves.sin()[:, None] + 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    noisy = torch.rand(count, generator=generator) < 0.1
    labels = torch.where(noisy, torch.randint(NUM_CLASSES, (count,), generator=generator), labels)
    return images.float(), labels


def make_image_batches(num_epochs: int, seed: int, *, num_images: int = 1280, size: int = 32) -> list[Batch]:
    """Return epochs over the same images, each in a new order."""
    images, labels = make_images(num_images, seed)
    return [
        (images[chosen], labels[chosen])
        for epoch in range(num_epochs)
        for chosen in torch.randperm(num_images, generator=torch.Generator().manual_seed(epoch)).split(size)
    ]


class Half(nn.Module):
    """Rounds activations to half precision, like autocast: above 65504 they are Inf."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half().float()


def make_cnn(*, dropout: float = 0.0, half: bool = False) -> nn.Module:
    def convolve(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        return [conv, *([Half()] if half else []), nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(
        *convolve(1, 8),
        nn.MaxPool2d(2),
        *convolve(8, 16),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(64, NUM_CLASSES),
    )


@functools.cache
def train_images(num_epochs: int = 6, **changes: Any) -> Training:
    """Train a CNN on stripes; SGD with momentum. Guessing costs log(4); the wrong labels alone about 0.35."""
    training = Training(
        name="cnn",
        make_model=make_cnn,
        make_optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        batches=make_image_batches(num_epochs, seed=1),
        held_out=[make_images(1024, seed=2)],
        guessing=math.log(NUM_CLASSES),
    )
    return dataclasses.replace(training, **changes)


# --- an RNN that must remember ---------------------------------------------------------------------------------------

LENGTH = 30
SYMBOLS = 4


def make_memories(count: int, seed: int, *, size: int = 32, length: int = LENGTH) -> list[Batch]:
    """Ask for the first symbol of each sequence at its end, after noise; one answer in ten is wrong."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        symbols = torch.randint(SYMBOLS, (size,), generator=generator)
        inputs = 0.1 * torch.randn(size, length, SYMBOLS, generator=generator)
        inputs[:, 0] += F.one_hot(symbols, SYMBOLS)
        wrong = torch.rand(size, generator=generator) < 0.1
        batches.append((inputs, torch.where(wrong, torch.randint(SYMBOLS, (size,), generator=generator), symbols)))
    return batches


class Recurrent(nn.Module):
    """A plain recurrent network of ReLUs that starts as the identity (Le et al. 2015); it can explode."""

    def __init__(self, *, width: int = 32, gain: float = 1.0) -> None:
        super().__init__()
        self.rnn = nn.RNN(SYMBOLS, width, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(width, SYMBOLS)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(gain * torch.eye(width))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.rnn(inputs)  # (batch, length, width)
        return self.head(hidden[:, -1])


@functools.cache
def train_memory(num_steps: int = 600, **changes: Any) -> Training:
    """Train a recurrent network over 30 steps; Adam. Guessing costs log(4); the wrong answers alone about 0.35."""
    training = Training(
        name="rnn",
        make_model=Recurrent,
        make_optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        batches=make_memories(num_steps, seed=1),
        held_out=make_memories(16, seed=2),
        guessing=math.log(SYMBOLS),
    )
    return dataclasses.replace(training, **changes)


# --- what goes wrong -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Story:
    """A training, its fault, and the expected findings and actions."""

    name: str
    clean: Training = field(repr=False)
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the training, if the fault is in its setup."""
    spoil: Callable[[Sequence[Batch]], Iterable[Batch]] = lambda batches: batches
    make_fault: MakeFault | None = None
    finds: frozenset[str]
    """Kinds of finding that must be in the ledger."""
    does: frozenset[Action]
    """All expected actions beyond clipping."""
    policy: Policy = field(default_factory=Policy)
    """Policy that saves the run: the default one where that is enough."""

    @property
    def faulty(self) -> Training:
        """Return the training with its fault."""
        return dataclasses.replace(self.clean, **self.changes)

    def with_seed(self, seed: int) -> Story:
        """Return the same story with another seed."""
        return dataclasses.replace(self, clean=dataclasses.replace(self.clean, seed=seed))

    def train_plain(self, clip: Callable[[nn.Module], Any] | None = None) -> Run:
        """Run it in a plain loop."""
        return train_plain(self.faulty, batches=self.spoil(self.clean.order()), make_fault=self.make_fault, clip=clip)

    def train_guarded(
        self, *, clip: ClipStrategy | None, policy: Policy | None = None, run_dir: Path | None = None
    ) -> Run:
        """Run it on a Guard, with the story's policy unless another is given."""
        config = GuardConfig(clip=clip, policy=self.policy if policy is None else policy)
        batches = self.spoil(self.clean.order())
        return train_guarded(self.faulty, config, batches=batches, make_fault=self.make_fault, run_dir=run_dir)


def poison_sample(batches: Sequence[Batch], number: int, value: float) -> list[Batch]:
    """Set one image of the data set to `value`, in every batch that contains it."""
    image = batches[0][0][number].clone()
    poisoned = []
    for images, labels in batches:
        same = (images == image).flatten(1).all(1)
        poisoned.append((torch.where(same[:, None, None, None], value, images), labels))
    return poisoned


def lengthen(batches: Sequence[Batch], *, at: int, length: int) -> list[Batch]:
    """Make the sequences of one batch far longer than all others."""
    (long,) = make_memories(1, seed=3, length=length)
    return [long if number == at else batch for number, batch in enumerate(batches)]


def corrupt(name: str, *, at: int, value: float = math.nan) -> MakeFault:
    """Overwrite one element of a weight, once."""

    def make_fault(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        return lambda number: corrupt_weight(model.get_parameter(name), value) if number == at else None

    return make_fault


def jump(*, at: int, until: int, factor: float) -> MakeFault:
    """Set the learning rate far too high for a while."""
    return lambda model, optimizer: jump_lr(optimizer, at=at, until=until, factor=factor)


BAD_STEP = frozenset({"nonfinite_loss", "nonfinite_gradient"})
BAD_BATCH = BAD_STEP | {"nonfinite_input"}
SKIP, BACK = frozenset({Action.SKIP}), frozenset({Action.ROLLBACK})


def make_stories() -> list[Story]:
    """Return everything that a guard should save a run from; each ends well with and without clipping."""
    language, images, memory = train_language(), train_images(), train_memory()
    halved = train_images(make_model=functools.partial(make_cnn, half=True))
    wreck = "blocks.0.out.weight"
    nan, inf = (functools.partial(poison_batches, at={100}, value=value) for value in (math.nan, math.inf))
    return [
        Story(name="NaN batch", clean=images, spoil=nan, finds=BAD_BATCH, does=SKIP),
        Story(name="Inf batch", clean=images, spoil=inf, finds=BAD_BATCH, does=SKIP),
        Story(
            name="poisoned sample in each epoch",
            clean=images,
            spoil=lambda batches: poison_sample(batches, 5, math.nan),
            finds=BAD_BATCH | {"frequent_actions"},
            does=SKIP,
        ),
        Story(
            name="overflow as in fp16",
            clean=halved,
            spoil=functools.partial(scale_batches, at={100}, factor=1e6),
            finds=BAD_STEP,
            does=SKIP,
        ),
        Story(
            name="learning rate jumps, SGD",
            clean=images,
            make_fault=jump(at=100, until=110, factor=1000.0),
            finds=frozenset({"loss_spike", "loss_explosion"}),
            does=BACK,
        ),
        Story(
            name="learning rate jumps, AdamW",
            clean=language,
            make_fault=jump(at=200, until=210, factor=1000.0),
            finds=frozenset({"loss_spike", "loss_explosion"}),
            does=BACK,
        ),
        Story(
            name="weight becomes NaN",
            clean=language,
            make_fault=corrupt(wreck, at=200),
            finds=BAD_STEP | {"nonfinite_parameter"},
            does=BACK,
        ),
        Story(
            name="weight becomes 1e30",
            clean=language,
            make_fault=corrupt(wreck, at=200, value=1e30),
            finds=BAD_STEP,
            does=BACK | SKIP | {Action.SCALE_LR},
        ),
        Story(
            name="RNN explodes to Inf",
            clean=memory,
            spoil=functools.partial(lengthen, at=100, length=1500),
            finds=BAD_STEP,
            does=SKIP,
        ),
        Story(
            name="RNN explodes",
            clean=memory,
            spoil=functools.partial(lengthen, at=100, length=300),
            finds=frozenset({"exploding_gradient"}),
            does=BACK,
            policy=Policy(actions={"exploding_gradient": Action.ROLLBACK}),
        ),
    ]


def make_rate_stories() -> list[Story]:
    """Return stories with a rate 30 times too high from the first step on: runs without any good step."""
    language, images, memory = train_language(), train_images(), train_memory()
    plain = train_language(make_optimizer=_make_sgd(0.3))
    finds = frozenset({"rate_too_high"})
    return [
        Story(name=f"learning rate 30x, {name}", clean=clean, changes={"make_optimizer": high}, finds=finds, does=BACK)
        for name, clean, high in (
            ("SGD", plain, _make_sgd(9.0)),
            ("AdamW", language, lambda p: torch.optim.AdamW(p, lr=0.09)),
            ("CNN", images, _make_sgd(1.5)),
            ("RNN", memory, lambda p: torch.optim.Adam(p, lr=0.03)),
        )
    ]


@functools.cache
def _make_sgd(rate: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def make_far_too_high_story(factor: float = 1e4) -> Story:
    """Return a story with a far too high rate: it must be lowered several times, each time within a few steps."""
    return Story(
        name=f"learning rate {factor:.0f}x",
        clean=train_language(make_optimizer=_make_sgd(0.3)),
        changes={"make_optimizer": _make_sgd(0.3 * factor)},
        finds=BAD_STEP | {"rate_too_high"},
        does=BACK,
    )


def make_slow_story() -> Story:
    """Return a story of an RNN that starts with a recurrent weight of 1.3 instead of 1: its first loss is 265.

    Its norm is in the thousands. At a rate of 1e-3 recovery takes hundreds of steps, so it gets four times as many.
    Unclipped, the largest gradients dominate Adam's moments, in the first steps and later; only a fixed threshold at
    every step saves it. No short attempt can show that: clipped, with fresh moments, it is behind for the next 160
    steps and more.
    """
    return Story(
        name="RNN starts unstable",
        clean=train_memory(2400),
        changes={"make_model": functools.partial(Recurrent, gain=1.3)},
        finds=frozenset({"exploding_gradient", "frequent_clipping"}),
        does=frozenset(),
    )
