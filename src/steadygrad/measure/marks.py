"""Marks on tensors: weak, by identity. Asking for one while there are none costs next to nothing.

The watches of a forward ask several times for each call, of which few are ever marked; torch's dictionary makes a
weak reference of each key that it is asked for.
"""

from __future__ import annotations

from typing import Any

from torch.utils.weak import WeakTensorKeyDictionary


class Marks:
    """What is known of some tensors, for as long as they live."""

    def __init__(self) -> None:
        self._held: Any = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Any) -> bool:
        return bool(self._held.data) and tensor in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, tensor: Any) -> Any:
        return self._held[tensor]

    def __setitem__(self, tensor: Any, mark: Any) -> None:
        self._held[tensor] = mark

    def __delitem__(self, tensor: Any) -> None:
        del self._held[tensor]

    def get(self, tensor: Any) -> Any:
        """Return the mark; None if there is none."""
        return self._held[tensor] if tensor in self else None
