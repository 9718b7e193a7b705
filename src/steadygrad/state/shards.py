"""Parameters cut across ranks -> this rank's part, and the number of parts of the whole.

DTensors (FSDP2, tensor parallelism) describe their own cut. A `Fragment` describes that of an engine which keeps the
parts elsewhere: ZeRO's partitions, the flat parameters of FSDP1. Nothing here communicates with another rank, except
for a gradient that tensor parallelism left as a pending sum. Parts share memory with the whole: writing to a part
writes to it. torch.distributed.tensor is not imported for this; a tensor that is not cut passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
        """Return the place of a DTensor; None for any other."""
        if not is_dtensor(tensor) or not hasattr(tensor, "_local_tensor"):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride()))

    def make_whole(self, part: Tensor) -> Tensor:
        """Return the DTensor of which `part` is this rank's part, without communication."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )


class Fragment:
    """A parameter of which this rank holds a part in an engine's own memory; stands in for it where it is measured.

    It answers what is asked of a parameter. `numel()` and `dim()` are those of the whole; the part may be empty. Part
    and gradient are fetched each time, because engines move them.
    """

    requires_grad = True
    is_leaf = False  # nothing may be hooked: autograd has never seen it

    def __init__(
        self,
        parameter: Tensor,
        *,
        shape: tuple[int, ...],
        num_parts: int,
        part: Callable[[], Tensor],
        gradient: Callable[[], Tensor | None],
        source: Tensor | None = None,
    ) -> None:
        """`num_parts`: the ranks that share one copy of the whole. `source`: the leaf that autograd knows."""
        self.parameter, self.shape, self.num_parts = parameter, shape, num_parts
        self.source = parameter if source is None else source
        self._part, self._gradient = part, gradient

    @property
    def part(self) -> Tensor:
        """This rank's part; shares memory with the engine."""
        return self._part()

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the part; None if there is none at present."""
        return self._gradient()

    @property
    def device(self) -> torch.device:
        """Device of the part."""
        return self.part.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the part."""
        return self.part.dtype

    @property
    def is_cuda(self) -> bool:
        """Whether the part is on CUDA."""
        return self.part.is_cuda

    # EditWatch compares it from step to step, as that of a tensor.
    @property
    def _version(self) -> int:
        return self.part._version

    def numel(self) -> int:
        """Return the number of elements of the whole."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions of the whole."""
        return len(self.shape)

    def is_complex(self) -> bool:
        """Return whether elements are complex."""
        return self.part.is_complex()

    def is_inference(self) -> bool:
        """Return whether the part was made in inference mode."""
        return self.part.is_inference()


def in_optimizer(parameter: Any) -> Any:
    """Return the object that optimizers hold: of a Fragment, the parameter that it stands for."""
    return parameter.parameter if isinstance(parameter, Fragment) else parameter


def is_sharded(parameter: object) -> bool:
    """Whether this rank holds a part of `parameter` only."""
    return isinstance(parameter, Fragment) or is_dtensor(parameter)


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is spread over a device mesh."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "device_mesh")


def take_local(tensor: Tensor) -> Tensor:
    """Return this rank's part; shares memory."""
    if isinstance(tensor, Fragment):
        return tensor.part
    # Not to_local(), which records an autograd op wherever gradients are enabled.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def count_shards(tensor: Any) -> int:
    """Return the number of parts of the whole; ranks beyond that hold copies."""
    if isinstance(tensor, Fragment):
        return tensor.num_parts
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
    # A collective: all ranks of the mesh must come here.
    summed: Tensor = tensor.redistribute(placements=placements)
    return summed


def _is_cut(placement: Any) -> bool:
    return not (placement.is_replicate() or placement.is_partial())
