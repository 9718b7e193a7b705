"""DTensors -> this rank's part, and the number of parts of the whole.

Nothing here communicates with another rank, except for a gradient that tensor parallelism left as a pending sum. Parts
share memory with their DTensor: writing to a part writes to it. torch.distributed.tensor is not imported for this; a
tensor that is not a DTensor passes through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """How parts on many ranks make one tensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> MeshPlace | None:
        """The place of a DTensor; None for any other."""
        if not is_dtensor(tensor) or not hasattr(tensor, "_local_tensor"):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride()))

    def make_whole(self, part: Tensor) -> Tensor:
        """Return the DTensor of which `part` is this rank's part, without communication."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is spread over a device mesh."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "device_mesh")


def take_local(tensor: Tensor) -> Tensor:
    """This rank's part; shares memory."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def count_shards(tensor: Any) -> int:
    """Return the number of parts of the whole; ranks beyond that hold copies."""
    if not is_dtensor(tensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(i) for i, one in enumerate(tensor.placements) if _is_cut(one))


def finish_sum(tensor: Any) -> Tensor:
    """Return a gradient with its pending sum completed; any other as it is."""
    if not is_dtensor(tensor) or not any(one.is_partial() for one in tensor.placements):
        whole: Tensor = tensor
        return whole
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if one.is_partial() else one for one in tensor.placements]
    summed: Tensor = tensor.redistribute(placements=placements)
    return summed


def _is_cut(placement: Any) -> bool:
    return not (placement.is_replicate() or placement.is_partial())
