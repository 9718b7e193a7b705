"""Checkpoints: verified, atomic, safe to read; and a resume that is exact."""

from steadygrad.checkpoint.catalogue import CheckpointInfo
from steadygrad.checkpoint.load import Checkpoint
from steadygrad.checkpoint.save import Save
from steadygrad.checkpoint.store import CheckpointStore
from steadygrad.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MismatchError,
    NonFiniteStateError,
    UnsafePickleError,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointStore",
    "DamagedCheckpoint",
    "MismatchError",
    "NonFiniteStateError",
    "Save",
    "UnsafePickleError",
]
