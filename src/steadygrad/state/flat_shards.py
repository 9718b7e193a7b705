"""FSDP1: its wrappers in a model -> a Fragment for each parameter that they cut.

`FullyShardedDataParallel` flattens the parameters of a layer into one tensor, cuts that into equal parts, and keeps on
each rank whatever falls into its part: some elements of a parameter, all, or none; with `NO_SHARD` everything. With
`use_orig_params=False` only the flat tensor itself is known, and is measured as one parameter. Nothing is imported:
wrappers are found by name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from steadygrad.state.shards import Fragment

PREFIX = "_fsdp_wrapped_module."
"""What each wrapper adds to the names of parameters."""


def find_flat_shards(model: nn.Module) -> dict[int, Fragment]:
    """Return a Fragment for each parameter that FSDP1 holds, by the id of the parameter; empty for other models."""
    return {
        id(fragment.parameter): fragment
        for module in model.modules()
        # A wrapper whose parameters all belong to inner wrappers has no handle.
        if is_wrapper(module) and (handle := getattr(module, "_handle", None)) is not None
        for fragment in _cut(handle)
    }


def is_wrapper(module: nn.Module) -> bool:
    """Return whether FSDP1 wraps a module in this one."""
    bases = type(module).__mro__
    return any(b.__name__ == "FullyShardedDataParallel" and b.__module__.partition(".")[0] == "torch" for b in bases)


def clean_name(name: str) -> str:
    """Return the name that a parameter has without the wrappers."""
    return name.replace(PREFIX, "")


def _cut(handle: Any) -> Iterator[Fragment]:
    flat = handle.flat_param
    # Private attributes of FSDP1's FlatParamHandle.
    parameters = flat._params if handle._use_orig_params else [flat]
    shapes = flat._shapes if handle._use_orig_params else [flat._unpadded_unsharded_size]
    for parameter, shape in zip(parameters, shapes):
        yield Fragment(
            parameter,
            shape=tuple(shape),
            num_parts=handle.world_size if handle.uses_sharded_strategy else 1,
            # Called at each use: FSDP1 exchanges the memory below its parameters around forward and backward.
            part=parameter.detach,
            gradient=functools.partial(_find_gradient, parameter, parameters),
            source=flat,
        )


def _find_gradient(parameter: Tensor, siblings: Sequence[Tensor]) -> Tensor | None:
    """Return the gradient; an empty one for an empty part, since FSDP gives it none, if the layer has gradients."""
    if parameter.grad is not None or parameter.numel() or all(one.grad is None for one in siblings):
        return parameter.grad
    # It has no elements, so it serves as its own gradient: each rank then has a row for each parameter.
    return parameter.detach()
