"""FusedAdamW: torch's AdamW with a kernel that reads each gradient once, and no lost updates for weights in bfloat16.

State, checkpoints and settings are those of `torch.optim.AdamW(fused=True)`. What the kernel cannot take (the CPU,
float64, gaps between elements, a rate that is a tensor) goes through torch's own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from steadygrad.errors import UsageError
from steadygrad.optim import reference

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedAdamW(torch.optim.AdamW):
    """AdamW whose kernel reads each gradient once, clipped or not.

    `stochastic_rounding` is for parameters in bfloat16: an update below half a unit of a weight's last place is lost
    when it is rounded to the nearest, and counts in the mean when it is rounded at random. The moments are rounded so
    too. The random numbers follow from `seed` and the step counter: a resumed run repeats them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise UsageError(f"FusedAdamW(seed=...) must be a whole number from 0 on, got {seed!r}.")
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self._updates: dict[int, tuple[Any, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "stochastic_rounding": self.stochastic_rounding, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._updates = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `found_inf` and `grad_scale`, where set, skip it and divide the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[], [], [], [], [], []]
            self._init_group(group, *lists)  # type: ignore[no-untyped-call]
            params, gradients, first, second, _, counters = lists
            if params:
                self._update(group, [params, gradients, first, second, counters])
        return loss

    def _update(self, group: dict[str, Any], lists: list[list[Tensor]]) -> None:
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        update = self._find_kernel(group, lists)
        if update is None and self.stochastic_rounding and lists[0][0].dtype is torch.bfloat16:
            update = reference.update
        if update is None:
            params, gradients, first, second, counters = lists
            adamw(
                params, gradients, first, second, [], counters,
                fused=True, grad_scale=scale, found_inf=found, amsgrad=False, beta1=group["betas"][0],
                beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                maximize=False,
            )  # fmt: skip
            return
        torch._foreach_add_(lists[-1], 1)
        update(
            lists,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            seed=self.seed,
            found=found,
            scale=scale,
        )
        if found is not None:
            torch._foreach_sub_(lists[-1], [found] * len(lists[-1]))

    def _find_kernel(self, group: dict[str, Any], lists: list[list[Tensor]]) -> Any:
        """Return the kernel for this group's tensors; None if it cannot take them."""
        kind = [(p.numel(), p.dtype) for p in lists[0]]
        known, update = self._updates.get(id(group), (None, None))
        if known != kind:
            update = self._make_kernel(lists)
            self._updates[id(group)] = (kind, update)
        return update if not isinstance(group["lr"], Tensor) and all(map(_is_plain, *lists[:4])) else None

    def _make_kernel(self, lists: list[list[Tensor]]) -> Any:
        if not has_kernel({p.device for p in lists[0]}):
            return None
        from steadygrad.optim.triton_adamw import Update  # Triton, where there is one

        return Update(lists[0], rounds=self.stochastic_rounding)


def has_kernel(devices: Collection[torch.device]) -> bool:
    """Whether the kernel runs on tensors of these devices: one GPU, with Triton installed."""
    on_one_gpu = len(devices) == 1 and all(device.type == "cuda" for device in devices)
    return on_one_gpu and importlib.util.find_spec("triton") is not None


def _is_plain(param: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the four lie alike in memory, without gaps, in a dtype that the kernel knows; shards have no address."""
    tensors = (param, gradient, first, second)
    if any(type(one) not in (Tensor, torch.nn.Parameter) for one in tensors):
        return False
    is_alike = all(one.stride() == param.stride() and one.dtype is param.dtype for one in tensors)
    return is_alike and param.dtype in KERNEL_DTYPES and param.is_contiguous()
