"""Checkpoint files for several tests: one of every format with the same tensors, and a payload that leaves a mark."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def make_weights() -> dict[str, Tensor]:
    """Two healthy tensors and one with a NaN and two Infs."""
    generator = torch.Generator().manual_seed(1)
    embed = torch.randn(64, 32, generator=generator)
    bad = torch.randn(40, 50, generator=generator)
    bad[3, 4], bad[5, 6], bad[7, 8] = NAN, INF, -INF
    return {"embed": embed, "norm": torch.ones(32), "bad": bad}


def write_safetensors(folder: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_torch(folder: Path, weights: dict[str, Tensor]) -> Path:
    torch.save(weights, folder / "model.pt")
    return folder / "model.pt"


def write_legacy(folder: Path, weights: dict[str, Tensor]) -> Path:
    torch.save(weights, folder / "legacy.bin", _use_new_zipfile_serialization=False)
    return folder / "legacy.bin"


def write_shards(folder: Path, weights: dict[str, Tensor]) -> Path:
    """A Hugging Face folder: one shard per tensor, and their index."""
    folder = folder / "hf"
    folder.mkdir()
    files = {name: f"model-{i}-of-{len(weights)}.safetensors" for i, name in enumerate(weights, 1)}
    for name, tensor in weights.items():
        save_file({name: tensor}, folder / files[name])
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def write_distributed(folder: Path, weights: dict[str, Tensor]) -> Path:
    folder = folder / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(dict(weights), checkpoint_id=str(folder))
    return folder


FORMATS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "legacy": write_legacy,
    "shards": write_shards,
    "distributed": write_distributed,
}


class Payload:
    """Creates a file if it is unpickled by a loader that runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)
