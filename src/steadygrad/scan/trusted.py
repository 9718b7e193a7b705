"""A file whose origin its user vouches for -> the same tensors in a file that anyone can read.

`torch.load` runs what the file asks for. That happens here and nowhere else, and only where the user has said `trust`.
Tensors are written into a temporary file under the names that the inert reader gives them; a whole model by its
`state_dict()`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.errors import CheckpointError


def load_trusted(path: Path) -> Any:
    """Return what `torch.load` makes of a file, code and all."""
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the file's own code raises
        raise CheckpointError(f"{path} cannot be loaded, even with trust: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def unpickled_copy(path: Path) -> Iterator[Path]:
    """A file with the tensors and plain values of `path`, for as long as it is needed; `path` itself if it is safe."""
    if path.is_dir() or path.suffix == ".safetensors":
        yield path
        return
    # Readable by this user alone (mode 0700), and removed even if the load fails
    with tempfile.TemporaryDirectory(prefix="steadygrad-") as folder:
        copy = Path(folder) / path.name
        torch.save(_keep_plain(load_trusted(path), set()), copy)
        yield copy


def _keep_plain(value: Any, above: set[int]) -> Any:
    """Tensors, numbers, text and their containers; objects by their attributes, as the inert reader sees them."""
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return value
    if id(value) in above:  # a container in itself; only ancestors, so that a value held twice is kept twice
        return None
    above = {*above, id(value)}
    if isinstance(value, nn.Module):
        return _keep_plain(value.state_dict(), above)
    if isinstance(value, Mapping):
        return {str(key): _keep_plain(item, above) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_keep_plain(item, above) for item in value]
    attributes = getattr(value, "__dict__", None)
    return _keep_plain(attributes, above) if isinstance(attributes, dict) and attributes else None
