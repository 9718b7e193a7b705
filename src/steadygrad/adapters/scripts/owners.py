"""The parameters of an optimizer -> the module that they belong to, found among all live objects.

A script never says what its model is. The outermost module that holds the parameters is taken, without the wrappers of
torch.compile and the parallel packages; where other optimizers train parts of it, the smallest part that holds these.
Parameters of several models, or of none, are gathered in a module created for this. Reads only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steadygrad.state.live_objects import is_affordable, list_live, list_young
from steadygrad.state.trained_parameters import unwrap


def find_owner(parameters: Sequence[Tensor]) -> tuple[nn.Module, nn.Module]:
    """Return the module of these parameters, and the outermost one that it is a part of."""
    held = {id(p) for p in parameters}
    owners = _choose_owners(_find_roots(), held)
    if len(owners) == 1 and held <= _parameter_ids(owners[0]):
        return _narrow(owners[0], held), owners[0]
    gathered = _gather(owners, parameters)
    return gathered, gathered


def list_parts(owner: nn.Module) -> list[nn.Module]:
    """Return the modules that a script calls: the owner itself, or the parts of one created here."""
    return [part for part in owner.children() if part is not owner] if type(owner) is nn.Module else [owner]


def _find_roots() -> list[nn.Module]:
    """Return modules that no other module holds."""
    # Young ones: what an optimizer trains is seldom much older than itself where there are so many of them.
    modules = list_live(nn.Module) if is_affordable() else list_young(nn.Module)
    children = {id(child) for module in modules for child in _list_children(module)}
    return [module for module in modules if id(module) not in children]


def _list_children(module: nn.Module) -> list[nn.Module | None]:
    # vars(): a module whose constructor has not reached super().__init__() has no `_modules`.
    held = vars(module)
    # What a traced module runs, and that has its parts; calls do not pass through this one's hooks.
    inner = held.get("_actual_script_module")
    return list((held.get("_modules") or {}).values()) if inner is None else [inner, *inner._modules.values()]


def _choose_owners(roots: Sequence[nn.Module], held: set[int]) -> list[nn.Module]:
    """Choose as few as possible, those that hold most of the parameters first."""
    covered = {id(inner): (inner, _parameter_ids(inner) & held) for inner in map(_open, roots)}
    chosen: list[nn.Module] = []
    left = set(held)
    while covered:
        # The most parameters, then the smallest module: a model before a container that holds it and others. A scripted
        # one before that which it was made from and shares its parameters with: it is the one that is called.
        module, ids = max(
            covered.values(),
            key=lambda pair: (
                len(pair[1] & left),
                -len(_parameter_ids(pair[0])),
                isinstance(pair[0], torch.jit.ScriptModule),
            ),
        )
        if not ids & left:
            break
        chosen.append(module)
        left -= ids
        del covered[id(module)]
    return chosen


def _open(module: nn.Module) -> nn.Module:
    try:
        return unwrap(module)
    except Exception:  # a module whose constructor has not finished
        return module


def _parameter_ids(module: nn.Module) -> set[int]:
    try:
        return {id(p) for p in module.parameters()}
    # A module whose constructor has not finished, or with a `parameters` of its own: not an owner.
    except Exception:
        return set()


def _narrow(module: nn.Module, held: set[int]) -> nn.Module:
    """Descend to the smallest part, while there are trainable parameters outside `held`."""
    while any(p.requires_grad and id(p) not in held for p in module.parameters()):
        inner = next((child for child in module.children() if held <= _parameter_ids(child)), None)
        if inner is None:
            break
        module = inner
    return module


def _gather(owners: Sequence[nn.Module], parameters: Sequence[Tensor]) -> nn.Module:
    """Return a module with `owners` as parts, and the parameters that none of them has. Nothing is registered."""
    gathered = nn.Module()
    for number, owner in enumerate(owners):
        # Written directly: add_module would run the program's registration hooks.
        gathered._modules[f"{type(owner).__name__}{number}"] = owner
    known = _parameter_ids(gathered)
    for number, parameter in enumerate(parameters):
        if id(parameter) not in known:
            gathered._parameters[f"tensor{number}"] = parameter  # type: ignore[assignment]  # a leaf of any class
    return gathered
