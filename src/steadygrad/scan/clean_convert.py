"""The tensors of any checkpoint file, repaired -> a safetensors file. Plain values beside them are left behind."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from steadygrad.disk.staging import StagedFile, fits_safetensors
from steadygrad.errors import CheckpointError
from steadygrad.scan.readers.chunks import read_tensor
from steadygrad.scan.stored import Contents
from steadygrad.state.finite import replace_nonfinite

SAFETENSORS = ".safetensors"


def write_safetensors(contents: Contents, bad: Collection[str], target: Path, value: float) -> None:
    """Write every tensor under its name; those named in `bad` with `value` for each NaN and Inf."""
    tensors: dict[str, torch.Tensor] = {}
    for stored in contents.tensors:
        if stored.dtype is None or not fits_safetensors(tensor := read_tensor(stored)):
            raise CheckpointError(
                f"{stored.name} has a dtype that safetensors cannot hold: {stored.kind}. Keep the format."
            )
        tensors[stored.name] = (replace_nonfinite(tensor, value) if stored.name in bad else tensor).contiguous()
    staged = StagedFile()
    staged.stage(tensors, {})
    with target.open("wb") as file:
        for piece in staged.pieces():
            file.write(piece)
