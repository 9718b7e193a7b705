"""A step that is finite and yet wrong -> which layer, or which op: growth with depth, fading gradients, dead units.

One replay with hooks: the size of what each layer gives, the size of each layer's gradient, and the share of units
that gave zero for the whole batch. Thresholds are far from what healthy networks show, since there is no history to
compare with; `suspect` says that the caller already has a suspicion. Reads only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.diagnose.blame import Blame
from steadygrad.diagnose.frames import Place, StackReader
from steadygrad.diagnose.replay import Step, call_user
from steadygrad.diagnose.trace import Event, Trace
from steadygrad.measure.activations import RELU_LIKE

MIN_LAYERS = 4
"""Layers from which growth with depth means something."""
MIN_GROWTH = 1.15
"""Factor per layer that counts as growth; 1.15 to the power of 50 is 1000."""
EXPLODED = 1e3
"""Norm of the gradients that counts as exploded."""
GROWN = 100.0
"""Growth over the whole run of layers."""
VANISHED = 1e-6
"""Gradient of the first layer against the last one's."""
DEAD = 0.8
"""Share of dead units that makes a layer an ailment."""
MIN_SAMPLES = 8
"""Fewest samples: with fewer, a unit is often zero for all of them."""
MIN_UNITS = 8
"""Fewest units: a smaller layer is more like a number that may well be zero, such as a satisfied hinge."""
AMPLIFIED = 30.0
"""Factor by which one derivative must enlarge the gradient to be reported."""
SUSPECTED = 10.0
"""Factor by which thresholds are relaxed when there is already a suspicion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ailment:
    """A layer where the step leaves the healthy range."""

    kind: str
    module: str
    place: Place
    text: str
    growth: float | None = None
    fixes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Layer:
    """One module that was called: where from, and the mean square of what it gave."""

    name: str
    module: nn.Module
    place: Place
    square: Tensor | None = None
    dead_share: Tensor | None = None
    output: float = 0.0
    gradient: float = 0.0


@dataclass(slots=True)
class _Sizes:
    layers: list[_Layer] = field(default_factory=list)
    grad_norm: float = 0.0


def find_amplifier(trace: Trace, blame: Blame) -> tuple[Event, float] | None:
    """Return the op of the engine that enlarged a gradient most, and how many times; None when none did by much."""
    best: tuple[Event, float] | None = None
    for event in trace.events:
        if not event.in_engine or event.forward is None:
            continue
        writers = [(read, trace.events[read.writers[-1]]) for read in event.reads]
        # Only from another node: the ops of one node hand values on among themselves.
        arriving = [blame.find_range(read).max_abs for read, w in writers if w.in_engine and w.forward != event.forward]
        made = blame.find_output(event).max_abs
        if arriving and max(arriving) > 0 and made / max(arriving) > (best[1] if best else AMPLIFIED):
            best = event, made / max(arriving)
    return best


def find_ailment(step: Step, modules: dict[int, str], suspect: str | None = None) -> Ailment | None:
    """Return the first layer that is wrong; None when all look healthy."""
    if step.model is None:
        return None
    sizes = _measure(step, modules)
    checks: dict[str, Callable[[_Sizes, float], Ailment | None]] = {
        "exploding": _find_exploding,
        "vanishing": _find_vanishing,
        "dead": _find_dead,
    }
    for kind, check in checks.items():
        found = check(sizes, SUSPECTED if kind == suspect else 1.0)
        if found is not None:
            return found
    return None


def _measure(step: Step, modules: dict[int, str]) -> _Sizes:
    assert step.model is not None
    sizes, stack = _Sizes(), StackReader(modules, call_user)
    named = {id(module): module for module in step.model.modules()}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            # On the device, and read when the step has run: a host read here would stop the forward at every layer.
            square = output.detach().float().square().mean()
            dead = measure_dead(output) if isinstance(module, RELU_LIKE) else None
            sizes.layers.append(_Layer(modules[id(module)], module, stack.read(), square, dead))

    # On the program's own modules: removed below whatever happens, or they would be saved with the model.
    handles = [nn.Module.register_forward_hook(module, note) for module in named.values()]
    try:
        with step.replay() as run:
            names = {name: grad for name, grad in run.grads.items() if grad.layout is torch.strided}
            norms = dict(zip(names, torch._foreach_norm([grad.float() for grad in names.values()]) if names else []))
            sizes.grad_norm = math.hypot(*(float(norm) for norm in norms.values()))
            for layer in sizes.layers:
                own = [f"{layer.name}.{name}".lstrip(".") for name, _ in layer.module.named_parameters(recurse=False)]
                layer.gradient = math.hypot(*(float(norms[name]) for name in own if name in norms))
                layer.output = math.sqrt(float(layer.square)) if layer.square is not None else 0.0
    finally:
        for handle in handles:
            handle.remove()
    return sizes


@torch.no_grad()
def measure_dead(output: Tensor) -> Tensor | None:
    """Share of units (channels of images, else features) that are 0 for every sample; None for too few samples."""
    unit = 1 if output.dim() >= 4 else output.dim() - 1
    if output.dim() < 2 or output.shape[unit] < MIN_UNITS or output.numel() // output.shape[unit] < MIN_SAMPLES:
        return None
    others = [dim for dim in range(output.dim()) if dim != unit]
    return (output.detach().abs().amax(dim=others) == 0).float().mean()


def _find_exploding(sizes: _Sizes, ease: float) -> Ailment | None:
    """Return the start of the longest run of like layers, each larger than the one before."""
    if sizes.grad_norm < EXPLODED / ease:
        return None
    for layers in _find_stacks(sizes.layers):
        outputs = [layer.output for layer in layers]
        start, end = _find_longest_run(outputs)
        if end - start + 1 < MIN_LAYERS or not outputs[start]:
            continue
        growth = outputs[end] / outputs[start]
        factor = growth ** (1 / (end - start))
        if growth > GROWN / ease:
            first = layers[start]
            text = (
                f"the outputs of the layers grow {factor:.3g} times per layer, from {outputs[start]:.3g} "
                f"({first.name}) to {outputs[end]:.3g} ({layers[end].name}); the gradient norm is {sizes.grad_norm:.3g}"
            )
            fixes = (
                "normalise inside each block: nn.LayerNorm(d) or nn.RMSNorm(d)",
                "scale the residual branch by 1 / sqrt(number of layers), or start it at 0",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            )
            return Ailment(
                kind="exploding", module=first.name, place=first.place, text=text, growth=factor, fixes=fixes
            )
    return None


def _find_vanishing(sizes: _Sizes, ease: float) -> Ailment | None:
    """Return the first layer, when its gradient is nothing beside the last one's and fades all the way."""
    layers = [layer for layer in sizes.layers if layer.gradient > 0]
    if len(layers) < MIN_LAYERS:
        return None
    first, last = layers[0], max(layers[len(layers) // 2 :], key=lambda layer: layer.gradient)
    ratio = first.gradient / last.gradient
    if ratio > VANISHED * ease:
        return None
    factor = ratio ** (1 / max(1, layers.index(last)))
    text = (
        f"gradients fade {1 / factor:.3g} times per layer on their way back, from {last.gradient:.3g} ({last.name}) to "
        f"{first.gradient:.3g} ({first.name})"
    )
    fixes = (
        "nn.ReLU() or nn.GELU() instead of a saturating activation",
        "residual connections: x + block(x)",
        "nn.LayerNorm(d) before each activation",
    )
    return Ailment(kind="vanishing", module=first.name, place=first.place, text=text, growth=factor, fixes=fixes)


def _find_dead(sizes: _Sizes, ease: float) -> Ailment | None:
    share_needed = DEAD if ease == 1.0 else 0.5
    for layer in sizes.layers:
        share = 0.0 if layer.dead_share is None else float(layer.dead_share)
        if share >= share_needed:
            text = f"{share:.0%} of the units of {layer.name} gave 0 for every sample: no gradient passes them"
            fixes = (
                "a smaller learning rate, or a warm-up: one large step can push every bias below 0",
                "nn.LeakyReLU(0.01) or nn.GELU()",
                "nn.LayerNorm(d) before the activation",
            )
            return Ailment(kind="dead", module=layer.name, place=layer.place, text=text, fixes=fixes)
    return None


def _find_stacks(layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """Return the layers of one class that are called one after the other at one depth, the largest stacks first."""
    stacks: dict[tuple[type, int], list[_Layer]] = {}
    for layer in layers:
        stacks.setdefault((type(layer.module), layer.name.count(".")), []).append(layer)
    return sorted((stack for stack in stacks.values() if len(stack) >= MIN_LAYERS), key=_by_depth)


def _by_depth(stack: list[_Layer]) -> tuple[int, int]:
    return stack[0].name.count("."), -len(stack)


def _find_longest_run(values: Sequence[float]) -> tuple[int, int]:
    """Return the first and last index of the longest run in which each is at least MIN_GROWTH times the one before."""
    best, start = (0, 0), 0
    for index in range(1, len(values)):
        if values[index] < MIN_GROWTH * values[index - 1]:
            start = index
        if index - start > best[1] - best[0]:
            best = start, index
    return best
