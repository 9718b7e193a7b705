"""Capture: a step about to run -> what it takes to run it again exactly. Cheap: references and generator states only.

Taken before the forward, it copies no tensor and waits for nothing, so it can be taken at every step. It holds the
batch until it is dropped. `find_changes` says where the batch was changed in place since: a replay is then not exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.diagnose.argument_names import spell_inputs
from steadygrad.diagnose.frames import Caller, find_caller
from steadygrad.diagnose.step_arguments import find_wrappers, name_inputs
from steadygrad.state.random_state import capture_random
from steadygrad.state.trained_parameters import unwrap

DEVICES = ("cuda", "cpu")
"""Kinds of devices whose autocast is remembered."""


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Which autocasts are open, in which dtypes."""

    dtypes: tuple[tuple[str, torch.dtype], ...]
    cache: bool

    @classmethod
    def take(cls) -> AutocastState:
        """Capture the current autocasts."""
        # One question for all devices, at every step.
        may_be_open = torch._C._is_any_autocast_enabled()
        is_open = [device for device in DEVICES if torch.is_autocast_enabled(device)] if may_be_open else []
        if not is_open and torch.is_autocast_cache_enabled():
            return CLOSED
        dtypes = tuple((device, torch.get_autocast_dtype(device)) for device in is_open)
        return cls(dtypes, torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Inside, exactly these are open."""
        wanted = dict(self.dtypes)
        with contextlib.ExitStack() as stack:
            for device in DEVICES:
                # One that is open now and was not then must be closed inside, so it is entered with enabled=False.
                if device in wanted or torch.is_autocast_enabled(device):
                    stack.enter_context(
                        torch.autocast(device, wanted.get(device), enabled=device in wanted, cache_enabled=self.cache)
                    )
            yield


CLOSED = AutocastState((), cache=True)
"""No autocast is open: the same object at every step of most runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One step, before it ran."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    model: nn.Module | None
    random: Mapping[str, Any] | None
    autocast: AutocastState
    versions: tuple[tuple[str, int], ...]
    is_model_call: bool = False
    """Only the model's forward is known: its loss was computed elsewhere."""
    caller: Caller | None = None
    """For a model's call: the user's line that made it, which a replay does not run."""

    @classmethod
    def take(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        model: nn.Module | None,
        devices: Iterable[torch.device] = (),
        is_model_call: bool = False,
    ) -> Capture:
        """Take it before the forward, under the autocast that the forward will run in."""
        # Runs before every forward, so only counters are read: a checksum would read the batch, and wait for it.
        inputs: Iterable[tuple[str, Tensor]] = (
            # The names that `name_inputs` gives, without opening what is closed.
            [(str(i), tensor) for i, tensor in enumerate(args)]
            if not kwargs and all(type(arg) is Tensor for arg in args)
            else name_inputs(args, kwargs)
        )
        versions = tuple([(name, read_version(tensor)) for name, tensor in inputs])
        return cls(
            fn=fn,
            args=args,
            kwargs=kwargs,
            model=model,
            random=capture_random(devices),
            autocast=AutocastState.take(),
            versions=versions,
            is_model_call=is_model_call,
            caller=find_caller() if is_model_call else None,
        )

    def find_changes(self) -> tuple[str, ...]:
        """Return the tensors of the batch that were changed in place since; writes past torch are not seen."""
        before = dict(self.versions)
        inputs = name_inputs(self.args, self.kwargs)
        changed = [(name, tensor) for name, tensor in inputs if before.get(name, -1) != read_version(tensor)]
        if not changed:
            return ()
        names = {id(tensor): name for name, tensor in spell_inputs(self.fn, self.args, self.kwargs)}
        return tuple(names.get(id(tensor), name) for name, tensor in changed)

    @property
    def call(self) -> tuple[CodeType, int] | None:
        """Code and instruction of the program's call of the model; None where it is not known."""
        if self.caller is None or self.caller.instruction < 0:
            return None
        return self.caller.code, self.caller.instruction

    @property
    def wrappers(self) -> tuple[nn.DataParallel[Any], ...]:
        """DataParallel models that the step may call."""
        return find_wrappers(self.fn, self.args, self.kwargs, self.model)

    @property
    def is_compiled(self) -> bool:
        """Whether the step, or a part of the model, was compiled."""
        modules = [] if self.model is None else list(self.model.modules())
        # Private to torch: the first is set by torch.compile(model), the second by model.compile().
        parts = [hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules]
        return any(parts) or hasattr(self.fn, "_torchdynamo_orig_callable")

    @property
    def inner_model(self) -> nn.Module | None:
        """The model whose modules have names."""
        return None if self.model is None else unwrap(self.model)


def read_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 where that is not counted."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors keep no version
        return -1
