"""Predictions -> PNG files in RUN/pictures, which the report shows: image, true mask, prediction side by side.

Each is written to a temporary file and renamed, so that a report built meanwhile finds only complete files. The PNG
encoder is here: it is a dozen lines, and a training on generated pictures then needs no imaging library.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from steadygrad_recipes.cod.data import denormalise
from steadygrad_recipes.cod.metrics import score_mask

FOLDER = "pictures"
GAP = 4
"""Pixels between the three panels."""
TINT = (0.9, 0.2, 0.25)


def write_pictures(
    run_dir: Path, images: Tensor, masks: Tensor, probabilities: Tensor, *, names: Sequence[str], when: str
) -> None:
    """Write one file per image; the caption gives IoU, Dice, MAE and S-measure."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for number, (image, mask, p) in enumerate(zip(images.cpu(), masks.cpu(), probabilities.float().cpu())):
        iou, dice, mae, s, *_ = score_mask(p[0].double(), mask[0] > 0.5)
        file = f"prediction-{number:02d}.png"
        captions[file] = (
            f"{names[number]}, {when}: image, true mask, prediction. "
            f"IoU {iou:.3f}, Dice {dice:.3f}, MAE {mae:.3f}, S-measure {s:.3f}"
        )
        _replace(folder / file, encode_png(draw_panels(denormalise(image), mask, p)))
    _replace(folder / "captions.json", json.dumps(captions, indent=1).encode())


def draw_panels(image: Tensor, mask: Tensor, p: Tensor) -> Tensor:
    """Return [3, H, W] in [0, 1]: the image, the mask, and the image with the prediction overlaid."""
    tint = torch.tensor(TINT).view(3, 1, 1)
    laid = image * (1 - 0.6 * p) + tint * 0.6 * p
    gap = torch.ones(3, image.shape[1], GAP)
    return torch.cat([image, gap, mask.expand(3, -1, -1), gap, laid], dim=2)


def encode_png(image: Tensor) -> bytes:
    """Encode [3, H, W] in [0, 1] as a PNG file: eight bits per channel, no filter."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)  # [H, W, 3]
    height, width = pixels.shape[:2]
    rows = bytearray(height * (1 + 3 * width))  # each row starts with a 0: no filter
    torch.frombuffer(rows, dtype=torch.uint8).view(height, -1)[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_make_chunk(kind, data) for kind, data in chunks)


def _make_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        aside.write_bytes(data)
        aside.replace(path)  # atomic: a report may be reading
    finally:
        aside.unlink(missing_ok=True)
