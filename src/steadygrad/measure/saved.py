"""What an op has saved for its backward, read only where no hook has packed it.

Unpacking would run the program's code: a checkpoint computes its layers again, with all that they do beside.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def read_saved(node: Any, name: str) -> Tensor | None:
    """Return the tensor; None if the node has none, if a hook has packed it, or if this torch does not tell."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    # Where torch has no `unpack_hook` the default is not None, and nothing is read.
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    saved = getattr(node, f"_saved_{name}")
    return saved if isinstance(saved, Tensor) else None
