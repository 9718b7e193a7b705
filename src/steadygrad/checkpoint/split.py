"""The state of one rank -> what all ranks hold together, what is its own, and the plain rest.

Parameters, optimizer state and extras (EMA) are equal on all ranks, or in shards, and so is every DTensor wherever it
stands: they are shared. Buffers, gradients that accumulate and random generators are each rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steadygrad.checkpoint.plain import TENSOR, pack_plain
from steadygrad.state.shards import is_dtensor

BUFFERS = "buffer_names"
"""Key of the state: which of the model's tensors are buffers."""
SHARED = ("optimizers.", "extras.", "other_parameters.")
"""Where tensors stand that all ranks have alike."""


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Plain containers with a mark where each tensor was; shared tensors and own ones, by where they stood."""
    buffers = {f"model.{name}" for name in state[BUFFERS]}
    shared: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}

    def take(tensor: Tensor, path: str) -> dict[str, str]:
        is_shared = path.startswith(SHARED) or (path.startswith("model.") and path not in buffers)
        (shared if is_shared or is_dtensor(tensor) else own)[path] = tensor.detach()
        return {TENSOR: path} if tensor.device.type == "cpu" else {TENSOR: path, "device": str(tensor.device)}

    return pack_plain(state, take), shared, own
