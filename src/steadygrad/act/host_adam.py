"""Make the step of torch's own Adam or AdamW on the CPU with fewer calls: the same arithmetic, to the bit.

torch updates one parameter after another, by nine calls each and 10 us of checks. `HostAdam` makes each call once for a
batch of parameters: for all of them in a small model, and in a large one for as many as the cache holds. The order of
operations is the same for each element, so the bits are too; but another torch may compute Adam in another way. So
nothing is taken on trust: the first step is torch's own, the same step is made on a copied sample of every tensor, and
only if weights, moments and counters agree to the bit does `HostAdam` make the next ones. It starts again where other
memory holds the weights. Everything but the plain case (hooks on the step, a profiler, AMSGrad, a missing gradient,
parameters that have made different numbers of steps or that share memory) is left to torch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as torchs

from steadygrad.act.adam_lists import QuickLists

BATCH = 1 << 18
"""Elements of the parameters that are updated together. Weights, gradients and moments of more leave the cache between
two of the nine calls: all 10M of a GPT at once take a fifth longer than torch, in such batches a tenth less."""
SAMPLE = 1 << 14
"""Elements of each tensor that are compared; the step of a large model would otherwise need its memory twice."""
MAX_PROOFS = 8
"""So many times a step is made twice to compare: memory that moves more often is not worth it."""
MAX_COUNT = float(1 << 24)
"""Where float32 stops counting by one."""
_FOLDER = Path(torch.__file__).parent
_gradient, _is_on_host = operator.attrgetter("grad"), operator.attrgetter("is_cpu")
_dtype, _layout = operator.attrgetter("dtype"), operator.attrgetter("layout")
_first, _second, _count = (operator.itemgetter(name) for name in ("exp_avg", "exp_avg_sq", "step"))


@dataclass(slots=True)
class _Lists:
    """What the step of one group reads and writes, and its settings."""

    group: dict[str, Any]
    params: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    counters: list[Tensor]
    count: float
    """Number of steps made, this one included."""

    @property
    def written(self) -> list[Tensor]:
        """All tensors that the step changes."""
        return [*self.params, *self.averages, *self.squares, *self.counters]

    def copy_sample(self) -> _Lists:
        """Return copies of the first elements of each tensor."""
        return self._make_from(lambda tensors: [_sample(tensor).clone() for tensor in tensors])

    def split(self) -> Iterator[_Lists]:
        """Yield the same in batches of at most `BATCH` elements, or of one larger tensor."""
        sizes = list(map(Tensor.numel, self.params))
        if sum(sizes) <= BATCH:
            yield self
            return
        start, num = 0, 0
        for end, size in enumerate(sizes):
            if num and num + size > BATCH:
                yield self._make_from(operator.itemgetter(slice(start, end)))
                start, num = end, 0
            num += size
        yield self._make_from(operator.itemgetter(slice(start, None)))

    def _make_from(self, take: Callable[[list[Tensor]], list[Tensor]]) -> _Lists:
        many = (self.params, self.gradients, self.averages, self.squares, self.counters)
        params, gradients, averages, squares, counters = map(take, many)
        return _Lists(self.group, params, gradients, averages, squares, counters, self.count)


class HostAdam:
    """Makes the steps of one optimizer."""

    def __init__(self, optimizer: Any, own: Callable[..., Any] | None = None) -> None:
        """`own`: the step of the optimizer's class, where something that calls it stands in its place."""
        self._optimizer, self._lists = optimizer, QuickLists(optimizer)
        self._class_step = type(optimizer).step
        self._is_torchs = _is_torchs_own(self._class_step if own is None else own)
        self._proven: list[int] | None = None
        """Addresses of the weights for which a step was compared with torch's."""
        self._num_proofs = 0

    def step(self, make: Callable[[], Any]) -> None:
        """Make the optimizer's step; `make` is torch's own way to do so."""
        lists = self._find_lists()
        addresses = None if lists is None else [p.data_ptr() for one in lists for p in one.params]
        if lists is not None and addresses == self._proven:
            if "step" in vars(self._optimizer):
                self._optimizer._opt_called = True  # as the scheduler's wrapper of step() does
            for one in lists:
                for batch in one.split():
                    _update(batch)
        elif lists is not None and self._num_proofs < MAX_PROOFS:
            self._proven = addresses if self._prove(lists, make) else None
        else:
            make()

    def _prove(self, lists: Sequence[_Lists], make: Callable[[], Any]) -> bool:
        """Make torch's own step; return whether ours gives the same bits."""
        self._num_proofs += 1
        are_apart = _are_apart([t for one in lists for t in (*one.written, *one.gradients)])
        copies = [one.copy_sample() for one in lists] if are_apart else []
        make()
        for one in copies:
            _update(one)
        pairs = ((a, b) for one, copy in zip(lists, copies) for a, b in zip(one.written, copy.written))
        return are_apart and all(a.dtype is b.dtype and torch.equal(_sample(a), b) for a, b in pairs)

    def _find_lists(self) -> list[_Lists] | None:
        try:
            return self._collect() if self._is_plain() else None
        except Exception:  # a state that is not as torch makes it; nothing was changed, and torch may know what to do
            self._is_torchs = False
            return None

    def _is_plain(self) -> bool:
        """Whether calling `optimizer.step` would run torch's Adam and nothing else."""
        optimizer = self._optimizer
        if not self._is_torchs or type(optimizer).step is not self._class_step:
            return False
        own = vars(optimizer)
        if "_init_group" in own or ("step" in own and not _is_schedulers(own["step"], self._class_step)):
            return False
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return False
        if torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks:
            return False
        # A mode of the program's, or of a diagnosis, sees each call.
        has_mode = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
        return not has_mode and not torch._C._autograd._profiler_enabled()

    def _collect(self) -> list[_Lists] | None:
        """Return the lists of each group; None where one of them is not the plain case."""
        found = []
        for group in self._optimizer.param_groups:
            lists = self._collect_group(group)
            if lists is None:
                return None
            found.append(lists)
        return found

    def _collect_group(self, group: dict[str, Any]) -> _Lists | None:
        params = group["params"]
        states = self._lists.find_states(group)
        if not params or not all(states) or not _is_ordinary(group):
            return None
        gradients = list(map(_gradient, params))
        # A missing gradient is no Tensor either
        if set(map(type, gradients)) != {Tensor} or not set(map(type, params)) <= {nn.Parameter, Tensor}:
            return None
        if set(map(_layout, gradients)) != {torch.strided} or not all(map(_is_on_host, params)):
            return None
        if {*map(_dtype, params), *map(_dtype, gradients)} != {torch.float32}:
            return None
        counters = list(map(_count, states))
        counts = set(map(Tensor.item, counters))
        if len(counts) != 1 or (count := counts.pop()) >= MAX_COUNT:
            return None
        averages, squares = list(map(_first, states)), list(map(_second, states))
        return _Lists(group, params, gradients, averages, squares, counters, count + 1.0)


def can_step_on_host(optimizer: Any) -> bool:
    """Whether this is an optimizer that `HostAdam` knows."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def _is_ordinary(group: dict[str, Any]) -> bool:
    """Whether the settings of a group are plain numbers, and ask for nothing but the moments and weight decay."""
    if group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"] or group["fused"]:
        return False
    return type(group["lr"]) is float and {*map(type, group["betas"])} == {float}


def _sample(tensor: Tensor) -> Tensor:
    """Return the first elements."""
    return tensor.detach().reshape(-1)[:SAMPLE]


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two of these lie in the same memory. Those that do must be updated one after the other."""
    spans = []
    for tensor in filter(Tensor.numel, tensors):
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()))
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(spans)))


def _update(lists: _Lists) -> None:
    """The update of Adam, each operation for all these parameters at once."""
    group, params, gradients, averages, squares = (
        lists.group, lists.params, lists.gradients, lists.averages, lists.squares,
    )  # fmt: skip
    (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # quicker than no_grad()
    try:
        torch._foreach_add_(lists.counters, 1)
        if decay != 0 and group["decoupled_weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * decay)
        elif decay != 0:
            gradients = list(torch._foreach_add(gradients, params, alpha=decay))
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, (1 - beta2**lists.count) ** 0.5)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_addcdiv_(params, averages, divisors, -(rate / (1 - beta1**lists.count)))
    finally:
        torch._C._set_grad_enabled(was_enabled)


def _is_torchs_own(step: Any) -> bool:
    """Whether a function and all that it wraps are defined by torch."""
    while step is not None:
        if not Path(step.__code__.co_filename).is_relative_to(_FOLDER):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def _is_schedulers(step: Any, wrapped: Any) -> bool:
    """Whether this is the `step` that a learning-rate scheduler leaves at its optimizer, around `wrapped`."""
    code = getattr(step, "__code__", None)
    is_own = code is not None and code.co_filename == lr_scheduler.__file__
    return is_own and getattr(step, "__wrapped__", None) is wrapped
