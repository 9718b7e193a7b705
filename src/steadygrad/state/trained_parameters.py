"""Model and optimizers -> the named parameters that a step can change, or an error that says why it cannot work.

Looked at once, when a Guard is created. Engines that own backward and step themselves are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.errors import UnsupportedError, UsageError
from steadygrad.state.flat_shards import clean_name, find_flat_shards
from steadygrad.state.shards import Fragment

ENGINES = {
    "deepspeed": "DeepSpeed's engine owns backward, clipping and step. Use Guard.from_deepspeed(engine), with the "
    "engine that deepspeed.initialize returned, or train with DistributedDataParallel and a Guard.",
    "megatron": "Megatron-LM's optimizers keep their own gradient buffers. Use its `--check-for-nan-in-loss-and-grad`, "
    "or train with DistributedDataParallel and a Guard.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameters:
    """What a Guard watches."""

    model: nn.Module
    """The user's own module, without wrappers."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    named: tuple[tuple[str, Tensor], ...]
    """The optimizers' parameters, under their names in the model; without lazy ones that are not made yet."""
    unoptimized: tuple[str, ...]
    """Trainable parameters of the model that no optimizer holds."""
    foreign: tuple[str, ...]
    """Parameters that an optimizer holds and the model does not."""

    @property
    def is_fragmented(self) -> bool:
        """Whether an engine keeps the weights in parts of its own: they are measured, never copied or put back."""
        return any(isinstance(parameter, Fragment) for _, parameter in self.named)


def find_trained_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> TrainedParameters:
    """Check that these belong together, and name what they share."""
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if len(optimizers) == 1 and hasattr(optimizers[0], "find_trained"):  # an engine's, which knows its own parts
        found: TrainedParameters = optimizers[0].find_trained(unwrap(model))
        return found
    for thing in (model, *optimizers):
        _refuse_engines(thing)
    if not isinstance(model, nn.Module):
        raise UsageError(f"Guard's first argument must be a torch.nn.Module, got {type(model).__name__}.")
    if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        kinds = ", ".join(type(o).__name__ for o in optimizers) or "an empty list"
        raise UsageError(f"Guard's second argument must be a torch optimizer or a list of them, got {kinds}.")
    inner = unwrap(model)
    # Again, because the wrapper may hide an engine's model.
    _refuse_engines(inner)
    names = {id(p): clean_name(name) for name, p in inner.named_parameters()}
    fragments = find_flat_shards(inner)
    if not names:
        raise UsageError(f"{type(inner).__name__} has no parameters, so there is nothing to train or to guard.")
    named: list[tuple[str, Tensor]] = []
    foreign: list[str] = []
    held: set[int] = set()
    for o, one in enumerate(optimizers):
        for g, group in enumerate(one.param_groups):
            for i, parameter in enumerate(group["params"]):
                # In two groups or optimizers: measured once.
                if id(parameter) in held:
                    continue
                held.add(id(parameter))
                if is_lazy(parameter):
                    continue  # no forward has made it yet
                name = names.get(id(parameter))
                if name is None:
                    name = f"optimizer{o}.group{g}.{i}"
                    foreign.append(name)
                named.append((name, fragments.get(id(parameter), parameter)))
        if not any(id(p) in names for group in one.param_groups for p in group["params"]):
            raise UsageError(
                f"{type(one).__name__} shares no parameter with {type(inner).__name__}: it was made for another model, "
                "or the model was replaced or moved to another device later. Create the optimizer from this model's "
                "parameters()."
            )
    order = {name: i for i, name in enumerate(names.values())}
    named.sort(key=lambda pair: order.get(pair[0], len(order)))
    unoptimized = [clean_name(n) for n, p in inner.named_parameters() if p.requires_grad and id(p) not in held]
    return TrainedParameters(
        model=inner,
        optimizers=optimizers,
        named=tuple(named),
        unoptimized=tuple(unoptimized),
        foreign=tuple(foreign),
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DistributedDataParallel and DataParallel."""
    *_, inner = _walk_in(model)
    return inner


def find_wrappers(model: nn.Module) -> list[nn.Module]:
    """Return what `unwrap` opens, the outermost first."""
    *wrappers, _ = _walk_in(model)
    return wrappers


def _walk_in(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    if isinstance(inner, nn.Module):
        yield from _walk_in(inner)


def _refuse_engines(thing: object) -> None:
    kind = type(thing)
    # All bases: engines are also used through subclasses of the program's own.
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ENGINES:
            raise UnsupportedError(f"{kind.__name__} cannot be guarded. {ENGINES[package]}")
    if isinstance(thing, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS calls its closure several times a step, so there is no one gradient to guard. "
            "Use a first-order optimizer, run the script under `steadygrad run`, which undoes a bad step as a whole, "
            "or look without acting: GradientHealthMonitor."
        )
