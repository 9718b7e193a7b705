"""Pairs of image and mask, from files or generated here -> tensors and their loaders.

A sample is {'image': [3, S, S], 'mask': [1, S, S]}: the image normalised like ImageNet, the mask 0 or 1. Generated
pictures hide an object as nature does: same colours and contrast as its surroundings, only the grain runs in another
direction. They depend only on the seed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from steadygrad.errors import UsageError
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.cod.folder import Pair, Split, find_split, import_pillow, require_usable, spell_error
from steadygrad_recipes.imaging import to_rgb, turn_upright

logger = logging.getLogger("steadygrad")

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet, which trained backbones expect."""

ADVICE = " Fix the file, or leave it out (--skip-bad-data true); a training that it ended continues with --resume."
"""End of the error about a picture that cannot be decoded."""
LEFT_OUT = "left_out.txt"
"""List of the files that are not used, in the run directory."""

Sample = dict[str, Tensor]


class LateFaults:
    """Lists files that turn out to be damaged when they are decoded: each once, in a file that workers share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, line: str) -> None:
        """Append the line and log it, unless it is there."""
        line = line.encode(errors="backslashreplace").decode()  # a name that is not UTF-8
        known = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
        if line in known:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        # As an error: ranks other than the first log nothing below that, and each reads its own files
        logger.error("%s The next picture takes its place; the file is listed in %s.", line, self._path)


class PairDataset(Dataset[Sample]):
    """Files -> samples."""

    def __init__(self, pairs: Sequence[Pair], size: int, faults: LateFaults | None = None) -> None:
        """`faults`: where to list a pair that cannot be decoded, for which the next one stands in; None: an error."""
        self.pairs, self.size, self._faults = tuple(pairs), size, faults

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        for ahead in range(len(self)):
            try:
                return self._read(self.pairs[(index + ahead) % len(self)])
            except UsageError as error:
                if self._faults is None or ahead + 1 == len(self):
                    raise
                self._faults.add(str(error).removesuffix(ADVICE))
        raise IndexError(index)

    def _read(self, pair: Pair) -> Sample:
        if pair.mask is None:
            return {"image": read_picture(pair.image, self.size), "mask": torch.zeros(1, self.size, self.size)}
        image = read_picture(pair.image, self.size, is_as_stored=pair.is_as_stored)
        return {"image": image, "mask": read_mask(pair.mask, self.size)}


class MadeDataset(Dataset[Sample]):
    """Generated pictures, all in memory."""

    def __init__(self, num: int, size: int, seed: int) -> None:
        self.images, self.masks = make_pictures(num, size, seed)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return {"image": self.images[index], "mask": self.masks[index]}


def open_datasets(
    config: CodConfig, run_dir: Path | None = None
) -> tuple[Dataset[Sample], Dataset[Sample], dict[str, Split]]:
    """Return training and evaluation data, and the folder's splits; no splits for generated pictures.

    With `skip_bad_data`, files that are found to be damaged later are listed in `run_dir`; without one they are errors.
    """
    if config.dataset_path is None:
        train = MadeDataset(config.num_made, config.image_size, config.seed)
        # Another seed, or the evaluation pictures would be among those trained on
        return train, MadeDataset(max(2, config.num_made // 4), config.image_size, config.seed + 1_000_003), {}
    splits = {}
    for name in ("train", "test"):
        split = find_split(config.dataset_path, name, include_noncam=config.include_noncam)
        require_usable(split, config.dataset_path, name, skip_bad=config.skip_bad_data)
        splits[name] = split
    faults = LateFaults(run_dir / LEFT_OUT) if config.skip_bad_data and run_dir is not None else None
    train_set, test_set = (PairDataset(split.pairs, config.image_size, faults) for split in splits.values())
    return train_set, test_set, splits


def open_loaders(
    config: CodConfig, train: Dataset[Sample], test: Dataset[Sample]
) -> tuple[DataLoader[Sample], DataLoader[Sample]]:
    """Return loaders: training images in a new order each epoch, evaluation images in a fixed one.

    The order comes from torch's own generator, which every checkpoint holds, also between epochs.
    """
    size, workers = config.batch_size, config.num_workers
    return DataLoader(train, size, shuffle=True, num_workers=workers), DataLoader(test, size, num_workers=workers)


# --- files -----------------------------------------------------------------------------------------------------------


def read_picture(path: Path, size: int, *, is_as_stored: bool = False) -> Tensor:
    """Return a picture as [3, size, size], normalised; upright unless `is_as_stored`, whatever its EXIF says."""
    return normalise(_read(path, "RGB", size, is_as_stored=is_as_stored).permute(2, 0, 1))


def read_mask(path: Path, size: int) -> Tensor:
    """Return a mask as [1, size, size] of 0 and 1. Masks come as 0/255 or, from some tools, as 0/1."""
    values = _read(path, "L", size, is_as_stored=True)
    top = float(values.max())
    return (values > (0.5 if top > 0.5 else 0.5 / 255)).float()[None]


def normalise(image: Tensor) -> Tensor:
    """[3, H, W] in [0, 1] -> what the network takes."""
    return (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def denormalise(image: Tensor) -> Tensor:
    """Undo `normalise`, for pictures that are shown to a person."""
    return (image * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)).clamp(0, 1)


def _read(path: Path, mode: str, size: int, *, is_as_stored: bool) -> Tensor:
    """Return a file's pixels in [0, 1]: [size, size, 3], or [size, size] for a mask."""
    pillow = import_pillow("reading pictures")
    try:
        with pillow.open(path) as picture:
            if mode == "L" and picture.has_transparency_data:  # else what is transparent counts by its hidden colour
                picture = pillow.alpha_composite(pillow.new("RGBA", picture.size, "black"), picture.convert("RGBA"))
            # Nearest for masks: a blend of 0 and 1 would be neither
            way = pillow.Resampling.BILINEAR if mode == "RGB" else pillow.Resampling.NEAREST
            # A mask may be clipped to eight bits: it has two values, and 1 of 65535 counts as much as 255
            whole = picture.convert(mode) if mode == "L" else to_rgb(picture if is_as_stored else turn_upright(picture))
            scaled = whole.resize((size, size), way)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise UsageError(f"{path} cannot be read as a picture ({spell_error(error)}).{ADVICE}") from None
    pixels = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8).float() / 255
    return pixels.view(size, size, 3) if mode == "RGB" else pixels.view(size, size)


# --- made pictures ---------------------------------------------------------------------------------------------------


def make_pictures(num: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Generate images [num, 3, size, size] and masks [num, 1, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    made = [_make_picture(size, generator) for _ in range(num)]
    return torch.stack([image for image, _ in made]), torch.stack([mask for _, mask in made])


def _make_picture(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    mask = _make_blob(size, generator)  # [S, S]
    angle = 0.4 * float(torch.randn((), generator=generator))  # the ground is roughly level
    ground, grain = (_make_grain(size, angle + turn, generator) for turn in (0.0, math.pi / 2))
    shade = torch.where(mask > 0, grain, ground)
    colour = 0.3 + 0.4 * torch.rand(3, 1, 1, generator=generator)
    tint = 0.03 * torch.randn(3, size, size, generator=generator)
    return normalise((colour + 0.18 * shade + tint).clamp(0, 1)), mask[None]


def _make_blob(size: int, generator: torch.Generator) -> Tensor:
    """Draw a lobed disc of 0 and 1 at a random place."""
    draw = torch.rand(5, generator=generator)
    centre = size * (0.2 + 0.6 * draw[:2])
    radius = size * (0.14 + 0.12 * draw[2])
    axis = torch.arange(size).float()
    y, x = axis[:, None] - centre[0], axis[None, :] - centre[1]
    lobes = 1 + 0.25 * torch.sin(3 * torch.atan2(y, x) + 2 * math.pi * draw[3])
    return (x.square() + y.square() < (radius * lobes).square()).float()


def _make_grain(size: int, angle: float, generator: torch.Generator) -> Tensor:
    """Return noise stretched in one direction, with mean 0 and standard deviation 1."""
    noise = torch.randn(1, 1, size, size, generator=generator)
    reach = torch.arange(-8, 9).float()
    y, x = reach[:, None], reach[None, :]
    along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    kernel = torch.exp(-along.square() / 50 - across.square() / 2.5)
    grain = F.conv2d(noise, kernel[None, None], padding=8)[0, 0]
    return (grain - grain.mean()) / grain.std()
