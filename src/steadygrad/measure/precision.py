"""PrecisionWatch: what the number formats of a training do to it -> PrecisionScans.

Copies a sample of the half-precision weights, and counts with the next scan how many of those with a gradient have not
moved at all. In the first steps hooks note whether the layers run in the format that autocast asks for, whether the
forward is in float16, and whether a recomputed forward starts from the same random state. The hooks are removed after
`NUM_STEPS` steps, and not set where something is compiled. Waits for nothing, if no learning rate is on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.facts import NUM_COLUMNS, PrecisionScan, Reading
from steadygrad.measure.graph import FAST_PATHS, may_enter
from steadygrad.measure.quiet_hook import QuietHook, remove_hooks
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.hidden_hooks import hide_hooks
from steadygrad.state.modules import list_modules
from steadygrad.state.trained_parameters import TrainedParameters
from steadygrad.state.tree import find_tensors
from steadygrad.stats import median

NUM_STEPS = 4
"""Steps in which the forward is watched."""
SAMPLE, MAX_SAMPLED = 1024, 128
"""Elements of a parameter, and parameters, to sample."""
HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that autocast runs in half precision."""
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
MAX_NODES = 2000
"""Nodes of a forward's graph that are searched for one in half precision."""
RandomState = tuple[Tensor, tuple[int, int]]
"""Of the CPU's generator, and seed and offset of the device's."""


class PendingPrecision:
    """A scan whose numbers are still being copied."""

    def __init__(self, rows: PendingRows, **known: Any) -> None:
        self._rows, self._known = rows, known

    def read(self, reading: Reading) -> PrecisionScan:
        """Return the scan of the step that `reading` is about."""
        rows = self._rows.read()
        stuck, given = rows.get("weights", (0.0, 0.0))
        table = reading.gradients
        zeros = table.cells[NUM_COLUMNS - 1 :: NUM_COLUMNS]
        shares = [zero / numel for zero, numel in zip(zeros, table.numels) if numel >= SAMPLE / 8]
        return PrecisionScan(
            step=reading.step,
            stuck_share=stuck / given if given else None,
            zero_share=median(sorted(shares)) if shares else 0.0,
            has_scale=reading.loss_scale is not None,
            **self._known,
        )


class PrecisionWatch:
    """Call `begin` before the first step and `measure` after each."""

    def __init__(self, trained: TrainedParameters, *, transfer: Transfer) -> None:
        self._trained, self._transfer = trained, transfer
        self._sampled: list[tuple[Tensor, Tensor]] = []
        self._num_since = self._num_steps = 0
        self._rate = self._largest = 0.0
        self._forward = ForwardWatch(trained.model)

    def begin(self) -> None:
        """Sample the weights, and watch the forwards of the first steps."""
        self._sample()
        model = self._trained.model
        if may_enter(model) and not any(isinstance(module, FAST_PATHS) for _, module in list_modules(model)):
            self._forward.begin()

    def close(self) -> None:
        """Remove the hooks."""
        self._forward.close()

    def measure(self, *, is_due: bool) -> PendingPrecision | None:
        """Compare the weights with the sample if a scan is due; return None if there is nothing to say."""
        self._num_since += 1
        self._num_steps += 1
        if self._num_steps > NUM_STEPS and not is_due:
            return None
        rows: dict[str, Tensor] = {}
        seen = self._forward.take()
        if self._num_steps >= NUM_STEPS:
            self._forward.close()
        if is_due and self._sampled:
            rows["weights"] = _count_stuck(self._sampled)
            seen |= self._describe_rates()
            self._sample()
        return PendingPrecision(send_rows(rows, self._transfer), **seen) if rows or seen else None

    @torch.no_grad()
    def _sample(self) -> None:
        halves = [p for _, p in self._trained.named if p.dtype in HALVES and p.requires_grad and is_readable(p)]
        self._sampled = [(p, _take(p)) for p in halves[:MAX_SAMPLED]]
        self._num_since, self._rate = 0, self._find_rate()

    def _find_rate(self) -> float:
        rates = [float(group["lr"]) for o in self._trained.optimizers for group in o.param_groups if "lr" in group]
        return max(rates, default=0.0)

    def _describe_rates(self) -> dict[str, Any]:
        now, before = self._find_rate(), self._rate
        self._largest = max(self._largest, now, before)
        kinds = {type(o).__module__.split(".")[0] for o in self._trained.optimizers}
        return {
            "dtype": str(self._sampled[0][0].dtype).removeprefix("torch."),
            "num_steps": self._num_since,
            "is_full_rate": 0 < now >= 0.5 * self._largest and now <= 1.01 * before,
            "is_own_optimizer": kinds == {"torch"},
        }


class ForwardWatch:
    """Hooks on the model and its layers in the first steps: formats of their outputs, random states when recomputed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # Bound to the list: it is emptied in place, and self._hooks must never be another one.
        weakref.finalize(self, remove_hooks, self._hooks)
        self._names = {module: name for name, module in list_modules(model)}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._draws: dict[nn.Module, list[list[RandomState]]] = {}
        self._redrawn: list[str] = []
        self._recomputes = False
        self._asked: torch.dtype | None = None
        self._ran: set[torch.dtype] = set()
        self._is_unheeded = False

    def begin(self) -> None:
        """Set the hooks; on none of the modules if one refuses."""
        try:
            self._hook()
        except Exception:
            self.close()

    def _hook(self) -> None:
        before = QuietHook(self._before_module, num_arguments=2)
        after = QuietHook(self._after_module, num_arguments=3)
        for _, module in list_modules(self._model):
            hide_hooks(module)
            self._hooks.append(nn.Module.register_forward_pre_hook(module, before))
            self._hooks.append(nn.Module.register_forward_hook(module, after))
        self._hooks.append(
            nn.Module.register_forward_pre_hook(self._model, QuietHook(self._before_model, num_arguments=2))
        )

    def close(self) -> None:
        """Remove the hooks."""
        remove_hooks(self._hooks)
        self._draws = {}

    def take(self) -> dict[str, Any]:
        """Return what the step's forwards have shown, as fields of a PrecisionScan."""
        seen: dict[str, Any] = {}
        if torch.float16 in self._ran:
            seen["is_float16"] = True
        if self._is_unheeded:
            seen["unheeded_autocast"] = str(self._asked).removeprefix("torch.")
        if self._redrawn:
            seen["redrawn"] = _find_innermost(self._redrawn)
        self._draws, self._redrawn, self._ran, self._asked, self._is_unheeded = {}, [], set(), None, False
        return seen

    def _before_model(self, model: nn.Module, _args: Any) -> None:
        if model.training and torch.is_grad_enabled() and not _is_in_backward():
            device = next((p.device.type for p in model.parameters()), "cpu")
            self._asked = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _before_module(self, module: nn.Module, _args: Any) -> None:
        """Note the random state; compare it when backward computes the module's output again.

        Only once some backward has done so: most programs never do, and the state would be read twice a module.
        """
        is_again = _is_in_backward()
        self._recomputes |= is_again
        if not module.training or not self._recomputes:
            return
        state, calls = _read_random_state(self._device), self._draws.setdefault(module, [])
        if not is_again:
            calls.append([state])
        elif len(calls) == 1 and len(calls[0]) == 2:  # called more often: unknown which call is repeated
            (start, end), name = calls[0], self._names.get(module, "")
            if not _is_same(start, end) and not _is_same(start, state):
                self._redrawn.append(name)

    def _after_module(self, module: nn.Module, _args: Any, output: Any) -> None:
        if not module.training or _is_in_backward():
            return
        if isinstance(module, PRODUCTS) and isinstance(output, Tensor):
            self._ran.add(output.dtype)
        if module in self._draws:
            self._draws[module][-1].append(_read_random_state(self._device))
        if module is self._model and self._asked in HALVES and not self._ran & {*HALVES}:
            self._is_unheeded = _has_products(module) and not _has_halves(output)


def _has_products(model: nn.Module) -> bool:
    """Return whether the model has weights that inputs are multiplied with: matrices that are not looked up in."""
    return any(
        p.dim() > 1 and p.dtype is torch.float32
        for _, module in list_modules(model)
        if not isinstance(module, LOOKUPS)
        for p in module.parameters(recurse=False)
    )


def _has_halves(output: Any) -> bool:
    """Return whether anything in the graph of a forward was computed in half precision; True if it cannot be seen."""
    roots = [tensor.grad_fn for _, tensor in find_tensors((output,), {}) if tensor.grad_fn is not None]
    waiting, seen = list(roots), set(roots)
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if any(one.dtype in HALVES for one in node._input_metadata):
            return True
        following = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(following)
        waiting += following
    return not roots or bool(waiting)


@torch.no_grad()
def _count_stuck(sampled: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return how many sampled elements with a gradient are what they were, and how many have one: float64 [2]."""
    counts = []
    for parameter, then in sampled:
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            continue
        # Equal shapes: the same places are taken of gradient, weight and old weight.
        has_gradient = _take(parameter.grad) != 0
        same = _take(parameter) == then
        counts.append(torch.stack([(same & has_gradient).sum(), has_gradient.sum()]).double())
    return torch.stack(counts).sum(0) if counts else torch.zeros(2, dtype=torch.float64, device="cpu")


def _take(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


def _is_in_backward() -> bool:
    # Of this thread; -1 outside any backward.
    return bool(torch._C._current_graph_task_id() != -1)


def _read_random_state(device: torch.device) -> RandomState:
    """Return the state of the generators that a forward draws from; reads no device memory."""
    if device.type != "cuda":
        return torch.get_rng_state(), (0, 0)
    generator = torch.cuda.default_generators[device.index or 0]
    return torch.get_rng_state(), (generator.initial_seed(), generator.get_offset())


def _is_same(one: RandomState, other: RandomState) -> bool:
    return one[1] == other[1] and torch.equal(one[0], other[0])


def _find_innermost(names: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that have no other of these inside them."""
    return tuple(
        name or "the model" for name in names if not any(other != name and _is_inside(other, name) for other in names)
    )


def _is_inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")
