"""A checkpoint folder -> the state that was saved, verified complete and finite, without running any foreign code.

The manifest and every hash are checked before a byte is interpreted. Weights are safetensors, which hold no code; the
rest is read with `weights_only=True`, and a pickle that needs more is refused, naming what it wanted to run. Loads to
the CPU. Anything wrong raises a CheckpointError with a reason; the caller decides what to try next.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.checkpoint.catalogue import CheckpointInfo
from steadygrad.checkpoint.plain import unpack
from steadygrad.disk.manifest import FILES, MODEL, MODEL_FILE, PLAIN_FILE, STATE, STATE_FILE, check_files
from steadygrad.errors import DamagedCheckpoint, NonFiniteStateError, UnsafePickleError
from steadygrad.scan.readers.torch import read_torch
from steadygrad.state.finite import count_nonfinite


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint: its description, and its state on the CPU."""

    info: CheckpointInfo
    state: dict[str, Any]
    devices: dict[int, str] = field(default_factory=dict)
    """id of a tensor of the state -> the device it was on, if that was not the CPU."""

    @property
    def step(self) -> int:
        """The next step, which is also the number of steps taken before it was saved."""
        return self.info.step


def read_checkpoint(info: CheckpointInfo) -> Checkpoint:
    """Verify that a checkpoint is complete, read it, and verify that it is finite."""
    folder = info.path
    check_files(folder, info.manifest)
    missing = {MODEL_FILE, STATE_FILE, PLAIN_FILE} - info.manifest.files.keys()
    if missing:
        raise DamagedCheckpoint(folder, f"it has no {', '.join(sorted(missing))}")
    tensors = {kind: _read_tensors(folder, name) for kind, name in FILES.items()}
    plain = load_plain(folder / PLAIN_FILE)
    try:
        tensors["odd"] = plain["odd"]
        devices: dict[int, str] = {}
        state = unpack(plain["tree"], lambda mark: _find(tensors, mark), devices)
        may_be = set(plain["may_be_nonfinite"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpoint(folder, f"{PLAIN_FILE} does not fit the other files: {error!r}") from error
    _check_finite(folder, tensors, may_be)
    return Checkpoint(info, state, devices)


def _find(tensors: Mapping[str, Mapping[str, Tensor]], mark: str) -> Tensor:
    kind, _, name = mark.partition(":")
    return tensors[kind][name]


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(folder / name))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedCheckpoint(folder, f"{name} cannot be read: {error}") from error


def _check_finite(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], may_be: set[str]) -> None:
    named = {f"{MODEL}.{name}": tensor for name, tensor in tensors[MODEL].items()}
    bad = count_nonfinite({**named, **tensors[STATE], **tensors["odd"]}, may_be=may_be)
    if bad:
        raise NonFiniteStateError(str(folder), bad)


def load_plain(path: Path) -> Any:
    """Load a `torch.save` file of plain containers and tensors; raise UnsafePickleError if it wants to run more."""
    with path.open("rb") as file:
        read_torch(path, file)  # reads the pickle without running it, and raises with the names of what it would run
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(path, [str(error).partition("\n")[0]]) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedCheckpoint(path.parent, f"{path.name} cannot be read: {error}") from error
