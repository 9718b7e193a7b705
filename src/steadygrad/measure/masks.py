"""How often the program has masked weights, counted from the moment that the first guard is created.

`torch.nn.utils.prune` registers a buffer `weight_mask` with each pruning, the first and every later one. torch calls us
when a buffer is registered, so nothing has to be searched. Process-wide; reads only, one comparison a step.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import register_module_buffer_registration_hook

_num_made = 0
_is_installed = False


def install() -> None:
    """Count masks from now on."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_module_buffer_registration_hook(_note)


def count_masks() -> int:
    """Return how many masks the program has made since `install`."""
    return _num_made


def _note(_module: Any, name: str, _buffer: Any) -> None:
    global _num_made
    # Nothing is returned: torch would register that in place of the buffer.
    _num_made += name.endswith("_mask")
