"""SplitWatch: DataLoaders as the program begins to iterate -> a SplitScan: a split that overlaps, weights of classes.

Two facts are certain. Two Subsets of one dataset, one trained on and one evaluated, whose sizes add up to the dataset
and that share samples: they were meant as its two parts, and come from two random splits. And a WeightedRandomSampler
with as few weights as there are classes, for a dataset with many more samples: only the first samples are ever drawn.
A loader is one for training if the next call of the model has gradients. Cost: indices are compared once for each pair.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

from steadygrad.facts.program import SplitScan
from steadygrad.measure.torch_calls import listen_to_loaders

FEW = 8
"""How many times more samples than weights show that the weights are not those of samples."""
MOST_PAIRS = 64
"""Pairs of subsets that are compared; a program may make new ones for each epoch."""


class SplitWatch:
    """Listens from the first step on; `take` returns what is new."""

    def __init__(self) -> None:
        self._begun: tuple[Any, Any] | None = None  # dataset and sampler: iterators do not hold their loader
        self._trained: weakref.ref[Any] | None = None
        self._seen: set[tuple[int, int]] = set()
        self._found: SplitScan | None = None
        self._is_listening = self._has_weights = False

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return self._found is not None

    def listen(self) -> None:
        """Hear of loaders from now on."""
        if not self._is_listening:
            self._is_listening = True
            listen_to_loaders(self)

    def before_epoch(self, loader: DataLoader[Any]) -> None:
        """The program begins to iterate over a loader."""
        self._begun = loader.dataset, loader.sampler

    def note_call(self, step: int, *, is_training: bool) -> None:
        """The model is about to be called with a batch of the loader that was begun last, if it is new."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        dataset, sampler = begun
        if is_training:
            self._trained = weakref.ref(dataset)
            self._look_at_weights(step, dataset, sampler)
        elif self._trained is not None:
            self._compare(step, self._trained(), dataset)

    def take(self, step: int) -> list[SplitScan]:
        """Return the finding's fact, if there is one by `step`."""
        found = self._found
        if found is None or found.step > step:
            return []
        self._found = None
        return [found]

    def _look_at_weights(self, step: int, dataset: Any, sampler: Any) -> None:
        if self._has_weights or not isinstance(sampler, WeightedRandomSampler):
            return
        num_weights, num_samples = len(sampler.weights), len(dataset)
        if num_weights * FEW <= num_samples:
            self._has_weights = True
            self._found = SplitScan(step=step, num_weights=num_weights, num_samples=num_samples)

    def _compare(self, step: int, trained: Any, evaluated: Any) -> None:
        if not isinstance(trained, Subset) or not isinstance(evaluated, Subset) or trained is evaluated:
            return
        pair = (id(trained), id(evaluated))
        if trained.dataset is not evaluated.dataset or pair in self._seen or len(self._seen) == MOST_PAIRS:
            return
        self._seen.add(pair)
        num_samples = len(trained.dataset)  # type: ignore[arg-type]
        if len(trained.indices) + len(evaluated.indices) != num_samples:
            return
        one, other = set(map(int, trained.indices)), set(map(int, evaluated.indices))
        # Half of the data on each side may be the same half, on purpose.
        if len(one) + len(other) == num_samples and one & other and not other <= one and not one <= other:
            self._found = SplitScan(
                step=step, num_samples=num_samples, num_evaluated=len(other), num_shared=len(one & other)
            )
