"""A DeepSpeed engine's optimizer -> the parts of weights and gradients that this rank holds, and its way to skip.

ZeRO keeps float32 weights and averaged gradients in flat partitions: in stages 1 and 2 a rank owns a stretch of all
parameters, in stage 3 an equal share of each. Gradients are complete between the last backward and `optimizer.step()`.
A step is skipped by the optimizer's own way out, that of a gradient which overflowed, so that every buffer is cleared
as it expects. deepspeed is never imported: its objects are recognized by name, as of version 0.19.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygrad.act.patches import Patches
from steadygrad.errors import UnsupportedError
from steadygrad.state.shards import Fragment
from steadygrad.state.trained_parameters import TrainedParameters

STAGES_1_AND_2 = "DeepSpeedZeroOptimizer"
STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"


def is_engine(thing: object) -> bool:
    """Return whether this is an engine that `deepspeed.initialize` made."""
    return any(
        base.__name__ == "DeepSpeedEngine" and base.__module__.partition(".")[0] == "deepspeed"
        for base in type(thing).__mro__
    )


class Partitions(torch.optim.Optimizer):
    """The engine's optimizer as a torch optimizer of the model's parameters.

    Rates and decays are the engine's own: reading and writing its groups goes to the groups of its optimizer.
    """

    def __init__(self, engine: Any) -> None:  # the base class would copy the groups, and hook `step`
        _refuse(engine)
        self._zero = engine.optimizer
        self._module: nn.Module = engine.module
        # Bound before EngineDrive.attach() replaces it: otherwise a step would call the Guard again.
        self._step: Callable[..., Any] = self._zero.step
        self._is_whole = isinstance(self._zero, torch.optim.Optimizer)
        base = self._zero if self._is_whole else self._zero.optimizer
        self.defaults, self.state = dict(base.defaults), defaultdict(dict)
        names = {id(p): name for name, p in self._module.named_parameters()}
        groups = [list(group) for group in self._list_groups()]
        self._named = [(names[id(p)], held) for group in groups for p, held in group]
        self.param_groups = [
            _Group(theirs, [p for p, _ in group])  # type: ignore[misc]
            for theirs, group in zip(base.param_groups, groups)
        ]
        self.num_steps = 0
        """Steps that were made, not skipped."""

    # --- what a Guard asks for ----------------------------------------------------------------------------------------

    def find_trained(self, model: nn.Module) -> TrainedParameters:
        """Return the parts, under the names of their parameters in the model's order."""
        order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        known = {name for name, _ in self._named}
        unoptimized = [name for name, p in model.named_parameters() if p.requires_grad and name not in known]
        return TrainedParameters(
            model=model,
            optimizers=(self,),
            named=tuple(sorted(self._named, key=lambda pair: order[pair[0]])),
            unoptimized=tuple(unoptimized),
            foreign=(),
        )

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Run the engine's own step."""
        # Before the step: one that raises halfway must not be taken for a skip, and discarded.
        self.num_steps += 1
        self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leave that to the engine, which clears its gradients after each step."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine saves its own state."""
        return {}

    def discard(self, *, keep_scale: bool) -> None:
        """Clear the gradients without a step; `keep_scale` leaves the loss scale, which is not to blame."""
        zero, patches = self._zero, Patches()
        if self._is_whole:
            zero.overflow = True  # what the engine reads after a step
            return
        try:
            if keep_scale:
                patches.replace(zero, "_update_scale", lambda *_args, **_kwargs: None)
            if type(zero).__name__ == STAGE_3:
                _force(zero, "_overflow_check_and_loss_scale_update", patches, runs=True)
            else:
                runs = zero.check_grad_overflow
                patches.replace(zero, "check_grad_overflow", True)
                _force(zero, "check_overflow", patches, runs=runs)
            self._step()
        finally:
            patches.undo()

    def begin(self) -> None:
        """Forget the skip of an earlier step."""
        if self._is_whole:
            self._zero.overflow = False

    @property
    def loss_scale(self) -> float | None:
        """The factor that gradients carry; None without loss scaling."""
        scales = getattr(self._zero, "dtype", None) is torch.float16
        return float(self._zero.loss_scale) if scales else None

    def list_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the engine will save of this rank: weights in float32, moments and buffers."""
        for name, held in self._named:
            yield name, held.part if isinstance(held, Fragment) else held
        base = self._zero if self._is_whole else self._zero.optimizer
        for i, state in enumerate(base.state.values()):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"optimizer state {i}.{key}", value
        yield from self._module.named_buffers()

    # --- where the parts are ------------------------------------------------------------------------------------------

    def _list_groups(self) -> Iterator[Iterator[tuple[Tensor, Any]]]:
        """Yield, for each group of the optimizer, its parameters and the parts of them."""
        zero = self._zero
        if self._is_whole:
            yield from (((p, p) for p in group["params"]) for group in zero.param_groups)
        elif type(zero).__name__ == STAGE_3:
            owners = zero.sub_group_to_group_id
            for number, _ in enumerate(zero.optimizer.param_groups):
                subs = [i for i, _ in enumerate(zero.fp16_groups) if owners[i] == number]
                yield ((p, _share(zero, i, j, p)) for i in subs for j, p in enumerate(zero.fp16_groups[i]))
        else:
            for i, group in enumerate(zero.bit16_groups):
                yield ((p, _stretch(zero, i, p)) for p in group)


class _Group(MutableMapping[str, Any]):
    """A group of the engine's optimizer, with the model's parameters instead of flat partitions."""

    def __init__(self, theirs: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        self._theirs, self._parameters = theirs, list(parameters)

    def __getitem__(self, key: str) -> Any:
        return self._parameters if key == "params" else self._theirs[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._theirs[key] = value

    def __delitem__(self, key: str) -> None:
        del self._theirs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


def _stretch(zero: Any, group: int, parameter: Any) -> Fragment:
    """Stages 1 and 2: the elements of `parameter` that lie in this rank's stretch of the flat group; often none."""
    mapping = parameter._hp_mapping
    flat: Tensor = zero.single_partition_of_fp32_groups[group]
    address = (0, 0) if mapping is None else (mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)

    def find_gradient() -> Tensor | None:
        held: Mapping[int, Any] = zero.offload_gradient_dict if zero.cpu_offload else zero.averaged_gradients
        parts = held.get(group)
        if parts is None:
            return None
        if mapping is None:
            return flat.detach()[:0]
        own = [part for part in parts if not getattr(part, "_zero_padding", False)]
        gradient: Tensor = own[parameter._index_in_param_group].reshape(-1)
        return gradient

    return Fragment(
        parameter,
        shape=tuple(parameter.shape),
        num_parts=dist.get_world_size(zero.real_dp_process_group[group]),
        part=lambda: flat.detach().narrow(0, *address),
        gradient=find_gradient,
    )


def _share(zero: Any, sub_group: int, place: int, parameter: Any) -> Fragment:
    """Stage 3: this rank's share of `parameter`, without the padding of the last one."""
    group = parameter.ds_process_group
    _, start, size = zero.grad_position[zero.get_param_id(parameter)]
    size = max(0, min(size, parameter.ds_numel - size * dist.get_rank(group)))

    def find_gradient() -> Tensor | None:
        if zero.offload_optimizer:
            gradient = zero.fp32_partitioned_groups_flat[sub_group].grad
            return None if gradient is None else gradient.narrow(0, start, size)
        parts = zero.averaged_gradients.get(sub_group)
        return None if parts is None else parts[place].reshape(-1).narrow(0, 0, size)

    return Fragment(
        parameter,
        shape=tuple(parameter.ds_shape),
        num_parts=dist.get_world_size(group),
        part=lambda: zero.fp32_partitioned_groups_flat[sub_group].detach().narrow(0, start, size),
        gradient=find_gradient,
    )


def _force(zero: Any, name: str, patches: Patches, *, runs: bool) -> None:
    """Make the optimizer's own check, replaced during one step, find an overflow."""
    check = getattr(zero, name)

    def find_overflow(*args: Any, **kwargs: Any) -> bool:
        if runs:  # it clears what it remembers of this step
            check(*args, **kwargs)
        zero.overflow = True
        return True

    patches.replace(zero, name, find_overflow)


def _refuse(engine: Any) -> None:
    """Raise an error for engines whose gradients are elsewhere, or complete at another moment."""
    zero, kind = engine.optimizer, type(engine).__name__
    if kind != "DeepSpeedEngine":
        raise UnsupportedError(
            f"{kind} cannot be guarded: its stages hold different parameters, and the engine runs forward and backward "
            "itself. Use DeepSpeed's ZeRO stages 1 to 3, or DistributedDataParallel and a Guard."
        )
    obstacles = {
        "has no optimizer": zero is None,
        "has layers with experts of their own on each rank": getattr(engine, "has_moe_layers", False),
        "cuts layers across ranks (tensor parallelism)": getattr(engine, "mpu", None) is not None
        and _is_parallel(engine.mpu),
        "swaps its optimizer to disk (offload to NVMe)": getattr(zero, "swap_optimizer", False),
        "updates in the background (ZenFlow)": getattr(engine, "zenflow", False),
        "scales the loss by torch's GradScaler": getattr(zero, "torch_autocast_gradscaler", None) is not None
        or getattr(engine, "torch_autocast_z0_gradscaler", None) is not None,
    }
    found = next((why for why, is_there in obstacles.items() if is_there), None)
    known = isinstance(zero, torch.optim.Optimizer) or type(zero).__name__ in (STAGES_1_AND_2, STAGE_3)
    if found is None and not known:
        found = f"has a {type(zero).__name__}, which keeps its own gradients"
    if found is not None:
        raise UnsupportedError(
            f"this DeepSpeed engine {found}, so its steps cannot be guarded. Use ZeRO stage 1, 2 or 3 with the "
            "optimizer on the device or in host memory, or train with DistributedDataParallel and a Guard."
        )


def _is_parallel(mpu: Any) -> bool:
    # Foreign code: a unit that cannot be asked counts as parallel, and is refused.
    with contextlib.suppress(Exception):
        return int(mpu.get_model_parallel_world_size()) > 1
    return True
