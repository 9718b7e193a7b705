"""Samples -> batches of tensors, one for each modality, with a table of which modalities each sample has.

Everything random here (order, choice among several captions) is a function of seed, epoch and position, so that a
loader restored to a position yields exactly the batches that would have come, whichever processes load them.
"""

from __future__ import annotations

import functools
import io
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.trainer.ranks import count_ranks, find_rank
from steadygrad.view.progress import track
from steadygrad.words import spell_count
from steadygrad_recipes.clip6d.captions import LeftOut, Sample, read_samples
from steadygrad_recipes.clip6d.config import (
    IMAGE,
    VECTOR,
    Clip6dConfig,
    ModelConfig,
    list_languages,
    split_modality,
)
from steadygrad_recipes.clip6d.pretrained import encode_texts
from steadygrad_recipes.clip6d.shards import Place, find_shards, read_shards
from steadygrad_recipes.clip6d.tokens import encode_batch
from steadygrad_recipes.imaging import to_rgb, turn_upright

logger = logging.getLogger("steadygrad")

Batch = dict[str, Tensor]
"""Modality -> [B, ...], and `present` -> [B, M]."""
Key = tuple[int, int]
"""Epoch and index: the key by which a data set returns an item."""


@dataclass(frozen=True)
class Corpus:
    """Contents of a folder: samples for training and validation, vectors by id, and rows that could not be used."""

    train: list[Sample]
    val: list[Sample]
    vectors: dict[int, Tensor]
    left_out: list[LeftOut]

    @property
    def vector_dim(self) -> int:
        """Length of a vector; 0 without any."""
        return len(next(iter(self.vectors.values()))) if self.vectors else 0


def read_corpus(config: Clip6dConfig, folder: Path) -> Corpus:
    """Read the folder, leave out samples with fewer than two of the modalities, and split the rest."""
    languages = list_languages(config.modalities)
    needs_images, needs_vectors = IMAGE in config.modalities, VECTOR in config.modalities
    shards = find_shards(folder)
    if shards:
        samples, vectors, left_out = read_shards(shards, languages, needs_images=needs_images)
    else:
        samples, left_out = read_samples(folder, languages, folder / config.images, needs_images=needs_images)
        vectors = _read_vectors(folder, {sample.id for sample in samples}, left_out) if needs_vectors else {}
    kept = []
    for sample in samples:
        having = [name for name in config.modalities if has_modality(sample, name, vectors)]
        if len(having) >= 2:
            kept.append(sample)
        else:
            reason = f"of the modalities it has {' and '.join(having) or 'none'}, and two are needed"
            reason += f"; it holds {', '.join(sample.parts)}" if sample.parts else ""
            left_out.append(LeftOut(*sample.origin, reason))
    train, val = _split(kept, config.val_share, config.seed)
    needed = config.batch_size * count_ranks()
    if len(train) < needed or len(val) < 2:
        first = "; ".join(f"{one.file}, {one.row[:40]}: {one.reason}" for one in left_out[:3])
        reasons = f" {spell_count(len(left_out), 'row')} left out, such as {first}." if left_out else ""
        raise UsageError(
            f"{folder} has {len(train)} samples for training, of which a step needs {needed}, and {len(val)} for "
            f"validation.{reasons} Lower batch_size, change val_share, or give more."
        )
    return Corpus(train, val, vectors, left_out)


def has_modality(sample: Sample, name: str, vectors: dict[int, Tensor]) -> bool:
    """Return whether this sample has anything in this modality."""
    if name == IMAGE:
        return sample.image is not None
    if name == VECTOR:
        return sample.id in vectors
    language, number = split_modality(name)
    return len(sample.captions.get(language, ())) >= (number or 1)


def _split(samples: list[Sample], val_share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    order = list(samples)
    # A text as seed: the same in every process, whatever PYTHONHASHSEED is
    random.Random(f"split {seed}").shuffle(order)
    num_val = min(max(2, round(val_share * len(order))), len(order) // 2)
    held_out = {sample.id for sample in order[:num_val]}
    sides: tuple[list[Sample], list[Sample]] = [], []
    for sample in sorted(order, key=lambda s: s.id):
        # A copy goes where its first one is, or validation would reward what was learned by heart
        sides[(sample.id if sample.first is None else sample.first) in held_out].append(sample)
    return sides


def _read_vectors(folder: Path, known: set[int], left_out: list[LeftOut]) -> dict[int, Tensor]:
    """Read vectors.safetensors or vectors.npz: `ids` [N] and `vectors` [N, D]."""
    path = next(
        (folder / f"vectors.{end}" for end in ("safetensors", "npz") if (folder / f"vectors.{end}").is_file()), None
    )
    advice = "It holds ids [N], whole numbers, and vectors [N, D]; or take vector out of modalities."
    if path is None:
        raise UsageError(f"{folder} has neither vectors.safetensors nor vectors.npz. {advice}")
    content = _load_arrays(path)
    if not {"ids", "vectors"} <= set(content):
        raise UsageError(f"{path} has {', '.join(content) or 'nothing'}, not ids and vectors. {advice}")
    ids, vectors = content["ids"], content["vectors"].float()
    is_whole = not ids.is_floating_point() and not ids.is_complex() and ids.dtype is not torch.bool
    if ids.dim() != 1 or vectors.dim() != 2 or len(ids) != len(vectors) or not is_whole or not vectors.numel():
        raise UsageError(
            f"{path}: ids {list(ids.shape)} of {ids.dtype} and vectors {list(vectors.shape)} do not fit. {advice}"
        )
    found: dict[int, Tensor] = {}
    for key, vector, is_finite in zip(ids.tolist(), vectors, vectors.isfinite().all(1).tolist()):
        reason = "" if is_finite else "the vector is not finite"
        reason = reason or ("" if key in known else "no image has this id")
        reason = reason or ("the id is there twice" if key in found else "")
        if reason:
            left_out.append(LeftOut(path.name, f"id {key}", reason))
        else:
            found[key] = vector
    return found


def _load_arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise UsageError(f"{path} is not a safetensors file: {error}. Write it again.") from None
    numpy = import_extra("recipes", "numpy", what="reading vectors.npz")
    try:
        with numpy.load(path, allow_pickle=False) as arrays:  # a pickle would run code
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:  # numpy's parsers of headers and of zip files raise many kinds
        raise UsageError(f"{path} is not an npz file of plain arrays: {error}. Write it with numpy.savez.") from None


class CaptionDataset(Dataset[dict[str, Any]]):
    """Items by (epoch, index): the sample's value in each modality, None where it has none."""

    def __init__(self, samples: Sequence[Sample], corpus: Corpus, config: Clip6dConfig) -> None:
        self.samples, self._vectors = list(samples), corpus.vectors
        self._modalities, self._seed, self._side = config.modalities, config.seed, config.model.image_size

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        epoch, index = key
        sample = self.samples[index]
        # No generator is shared: which worker loads the sample, and when, makes no difference
        draw = random.Random(f"{self._seed} {epoch} {sample.id}")
        return {name: self._take(sample, name, draw if epoch >= 0 else None) for name in self._modalities}

    def _take(self, sample: Sample, name: str, draw: random.Random | None) -> Any:
        if not has_modality(sample, name, self._vectors):
            return None
        if name == IMAGE:
            return read_image(sample.image, self._side, ", ".join(sample.origin) if sample.shard else str(sample.image))
        if name == VECTOR:
            return self._vectors[sample.id]
        language, number = split_modality(name)
        captions = sample.captions[language]
        if number is not None:
            return captions[number - 1]
        return captions[0] if draw is None else draw.choice(captions)


def read_image(place: Any, side: int, name: str | None = None) -> Tensor | None:
    """Return the centre square, resized, as bytes [3, side, side]. None, with a warning, when the image is broken."""
    images = import_extra("recipes", "PIL.Image", what="reading images")
    content = place.read() if isinstance(place, Place) else place
    try:
        with images.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            whole = to_rgb(turn_upright(image))
    except (
        OSError,
        SyntaxError,
        ValueError,
        images.DecompressionBombError,
    ) as error:  # what Pillow raises for a damaged file
        # Pillow names the object that it was given, which says nothing about one in memory
        reason = "Pillow knows no such format" if isinstance(content, bytes) and "BytesIO" in str(error) else str(error)
        _warn_unreadable(str(place) if name is None else name, reason)
        return None
    short = min(whole.size)
    left, top = ((length - short) // 2 for length in whole.size)
    square = whole.resize((side, side), images.Resampling.BICUBIC, box=(left, top, left + short, top + short))
    # A bytearray: torch warns about a buffer that cannot be written
    return torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1)


@functools.cache
def _warn_unreadable(path: str, reason: str) -> None:
    """Warn once per file, not once per epoch."""
    logger.warning("%s cannot be read (%s); this image is left out.", path, reason)


def encode_captions(texts: Sequence[str], model: ModelConfig) -> Tensor:
    """Return the tokens of captions: bytes, or those of the tokenizer that comes with a trained model."""
    if model.pretrained is None:
        return encode_batch(texts, model.context)
    return encode_texts(texts, model.pretrained, model.context)


def collate(items: Sequence[dict[str, Any]], *, config: Clip6dConfig, vector_dim: int) -> Batch:
    """Collate one batch. What a sample lacks is padded and marked in `present`; the loss never reads the padding."""
    side, batch = config.model.image_size, {}
    for name in config.modalities:
        values = [item[name] for item in items]
        if name == IMAGE:
            blank = torch.zeros(3, side, side, dtype=torch.uint8)
            batch[name] = torch.stack([blank if value is None else value for value in values])
        elif name == VECTOR:
            batch[name] = torch.stack([torch.zeros(vector_dim) if value is None else value for value in values])
        else:
            batch[name] = encode_captions([value or "" for value in values], config.model)
    batch["present"] = torch.tensor([[item[name] is not None for name in config.modalities] for item in items])
    return batch


class CaptionLoader:
    """Whole batches, in a different order each epoch, from where `load_state_dict` says. Lightning uses it directly.

    With several ranks a step takes a batch for each of them, and this one gets its own.
    """

    def __init__(self, corpus: Corpus, config: Clip6dConfig) -> None:
        self._data, self._config = CaptionDataset(corpus.train, corpus, config), config
        self._collate = partial(collate, config=config, vector_dim=corpus.vector_dim)
        self._epoch = self._position = 0
        self.describe: Callable[[], str] = lambda: ""
        """Returns the text shown next to the progress bar."""

    def __len__(self) -> int:
        return len(self._data) // (self._config.batch_size * count_ranks())

    def __iter__(self) -> Iterator[Batch]:
        return track(self._iterate(), describe=lambda: self.describe(), total=len(self))

    def _iterate(self) -> Iterator[Batch]:
        if self._position >= len(self):
            self._epoch, self._position = self._epoch + 1, 0
        order = list(range(len(self._data)))
        random.Random(f"order {self._config.seed} {self._epoch}").shuffle(order)
        size = self._config.batch_size
        joined, own = size * count_ranks(), size * find_rank()
        # All ranks shuffle alike; a step takes `joined` samples, of which this rank's begin at `own`
        starts = range(self._position * joined + own, len(self) * joined, joined)
        keys = [[(self._epoch, index) for index in order[start : start + size]] for start in starts]
        for batch in _load(self._data, keys, self._collate, self._config.workers):
            # Before the yield: a state saved while the batch is in use must not give the batch again
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position: how many batches were handed out."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go back to that position; the next pass yields the rest of that epoch, or the next epoch if none is left."""
        self._epoch, self._position = state["epoch"], state["position"]


def iterate_validation(corpus: Corpus, config: Clip6dConfig) -> Iterator[Batch]:
    """Yield every validation sample once, in order, with its first captions; the last batch may be smaller."""
    data, size = CaptionDataset(corpus.val, corpus, config), config.batch_size
    # Epoch -1: no draw among captions, so that validations are comparable
    keys = [[(-1, i) for i in range(start, min(start + size, len(data)))] for start in range(0, len(data), size)]
    yield from _load(data, keys, partial(collate, config=config, vector_dim=corpus.vector_dim), config.workers)


def _load(data: CaptionDataset, keys: list[list[Key]], join: Any, workers: int) -> Iterator[Batch]:
    generator = torch.Generator()  # of its own: the seeds of workers are not drawn from the training's
    yield from DataLoader(data, batch_sampler=keys, collate_fn=join, num_workers=workers, generator=generator)
