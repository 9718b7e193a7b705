"""EngineDrive: lets a Guard work inside a DeepSpeed engine, which keeps backward, step, scheduler and checkpoints.

`engine.step()` asks the Guard at the end of accumulation, when gradients are averaged and before a weight changes.
Checkpoints stay the engine's: they are refused while any rank holds a value that is not finite, read back after they
were written, and carry the Guard's own state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from steadygrad.act.engine_scale import EngineScale
from steadygrad.act.forwards import Watching, watch_forwards
from steadygrad.act.patches import Patches
from steadygrad.act.zero import Partitions, is_engine
from steadygrad.config import AdaGC, FixedNorm, GuardConfig
from steadygrad.errors import ConfigError, DamagedCheckpoint, UsageError
from steadygrad.facts import Action, Finding, Severity, StepRecord
from steadygrad.measure.check import find_nonfinite
from steadygrad.scan.checkpoint_scan import scan_checkpoint

OWN_STATE = "steadygrad"
"""The Guard's own state in the client state of the engine's checkpoints."""
SHOWN = 5
"""Names listed in a message."""


class Driven(Watching, Protocol):
    """A Guard, as seen from an engine."""

    @property
    def last(self) -> StepRecord | None: ...
    @property
    def num_steps(self) -> int: ...
    def step(self) -> Any: ...
    def note(self, finding: Finding) -> None: ...
    def watch_backward(self, loss: Tensor) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class EngineDrive:
    """The pieces of an engine, and their connection to a Guard."""

    def __init__(self, engine: Any) -> None:
        if not is_engine(engine):
            raise UsageError(
                f"from_deepspeed's argument must be the engine that deepspeed.initialize returned first, got "
                f"{type(engine).__name__}."
            )
        self._engine = engine
        self.optimizer = Partitions(engine)
        self.scaler = EngineScale(self.optimizer) if self.optimizer.loss_scale is not None else None
        self.group: Any = engine.data_parallel_group
        self._gather: Callable[[Any], list[Any]] = lambda value: [value]
        self._patches = Patches()
        self._hooks: list[RemovableHandle] = []
        self._is_stepping = False

    @property
    def is_accumulating(self) -> bool:
        """Whether the engine is not at the end of a step: only then a Guard steps."""
        return not self._is_stepping

    def weigh(self, _loss: Tensor) -> NoReturn:
        """Refuse: the engine runs backward."""
        raise UsageError(
            "a DeepSpeed engine runs backward and step itself. Write loss = engine(batch); engine.backward(loss); "
            "engine.step(), as without a guard."
        )

    def check_saving(self) -> NoReturn:
        """Refuse: the engine saves and loads."""
        raise UsageError(
            "a DeepSpeed engine saves its own partitions. Call engine.save_checkpoint(folder) and "
            "engine.load_checkpoint(folder): the guard verifies them, and its own state is in them."
        )

    def choose(self, config: GuardConfig) -> GuardConfig:
        """Return the settings of a Guard on this engine, or raise an error for one that it cannot honour."""
        refused = {
            "drop_bad_microbatches": config.drop_bad_microbatches,
            "on_nonfinite": config.on_nonfinite is Action.SANITIZE,
            "checkpoint.every": config.checkpoint.every is not None,
            "clip": isinstance(config.clip, AdaGC) and self.scaler is not None,  # would unscale as well
        }
        for name, is_set in refused.items():
            if is_set:
                raise ConfigError(
                    f"GuardConfig.{name} is set, but a DeepSpeed engine owns gradients and checkpoints. Leave it at "
                    "its default: a bad step is skipped whole, and engine.save_checkpoint saves."
                )
        theirs = float(self._engine.gradient_clipping() or 0.0)
        if theirs and config.clip not in (None, GuardConfig().clip, FixedNorm(max_norm=theirs)):
            raise ConfigError(
                f"GuardConfig.clip is {config.clip!r}, and the engine clips at gradient_clipping={theirs:g} too. Set "
                "gradient_clipping to 0 in DeepSpeed's config, or leave GuardConfig.clip at its default."
            )
        return dataclasses.replace(config, clip=None if theirs else config.clip)

    # --- the step -----------------------------------------------------------------------------------------------------

    def attach(self, guard: Driven, gather: Callable[[Any], list[Any]]) -> None:
        """Connect the engine to `guard` until `detach()`; `gather` returns the value of each rank."""
        self._gather = gather
        engine, run_backward = self._engine, self._engine.backward

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            # DeepSpeed 0.19: backward(loss, retain_graph, scale_wrt_gas).
            scales = kwargs.get("scale_wrt_gas", args[1] if len(args) > 1 else True)
            share = engine.gradient_accumulation_steps() if scales else 1
            guard.watch_backward(loss if share == 1 else loss / share)
            return run_backward(loss, *args, **kwargs)

        def step(*_args: Any, **_kwargs: Any) -> None:
            self._step(guard)

        self._patches.replace(engine, "backward", backward)
        self._patches.replace(engine.optimizer, "step", step)
        self._patches.replace(engine, "save_checkpoint", self._make_save(guard, engine.save_checkpoint))
        self._patches.replace(engine, "load_checkpoint", self._make_load(guard, engine.load_checkpoint))
        self._hooks += watch_forwards(self._engine, guard)

    def _step(self, guard: Driven) -> None:
        """Let the Guard make the engine's step; if it does not, clear the gradients as after an overflow."""
        partitions = self.optimizer
        partitions.begin()
        num_before, self._is_stepping = partitions.num_steps, True
        try:
            guard.step()
        finally:
            self._is_stepping = False
            # Also after an error, a halt for one: gradients that stayed would be added to the next step's.
            if partitions.num_steps == num_before:
                loss = None if guard.last is None else guard.last.loss
                partitions.discard(keep_scale=loss is not None and not math.isfinite(loss))

    def detach(self) -> None:
        """Disconnect, leaving the engine as it was."""
        self._patches.undo()
        while self._hooks:
            self._hooks.pop().remove()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _make_save(self, guard: Driven, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return the engine's `save_checkpoint`, which refuses what is not finite and reads back what it wrote."""

        def save_checkpoint(save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
            # This and the reading back are collectives: DeepSpeed has all ranks call save_checkpoint.
            bad = self._find_bad()
            if bad:
                guard.note(_report(guard, f"nothing was saved to {save_dir}: these are not finite: {bad}"))
                return False
            state = {**(client_state or {}), OWN_STATE: guard.state_dict()}
            tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
            saved = save(save_dir, tag, state, *args, **kwargs)
            damaged = self._read_back(Path(save_dir) / tag)
            if damaged:
                guard.note(_report(guard, f"the checkpoint {Path(save_dir) / tag} is damaged: {damaged}"))
            return saved and not damaged

        return save_checkpoint

    def _make_load(self, guard: Driven, load: Callable[..., Any]) -> Callable[..., Any]:
        """Return the engine's `load_checkpoint`, which restores the Guard's own state too."""

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            path, client_state = load(*args, **kwargs)
            # Taken out again: the program must get back the client state that it saved.
            state = client_state.pop(OWN_STATE, None) if isinstance(client_state, dict) else None
            if state is not None:
                guard.load_state_dict(state)
            return path, client_state

        return load_checkpoint

    def _find_bad(self) -> str:
        """Return what is not finite on any rank, the same text on all; empty if everything may be saved."""
        found = self._gather(find_nonfinite(self.optimizer.list_state())[:SHOWN])
        return "; ".join(f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(found) if names)

    def _read_back(self, folder: Path) -> str:
        """Read the files that were written, each on one rank; return what is wrong with them, on every rank."""
        rank, num = self._engine.global_rank, len(self._gather(None))
        problems: list[str] = []
        for path in sorted(folder.rglob("*.pt"))[rank % num :: num]:
            try:
                scan = scan_checkpoint(path)
            except (DamagedCheckpoint, OSError, ValueError) as error:
                problems.append(f"{path.name} cannot be read ({error})")
                continue
            problems += [f"{path.name}: {problem}" for problem in scan.problems]
            problems += [f"{path.name}: {tensor.name} is not finite" for tensor in scan.bad_tensors]
        return "; ".join(problem for one in self._gather(problems[:SHOWN]) for problem in one)


def _report(guard: Driven, message: str) -> Finding:
    return Finding(
        kind="checkpoint_failed",
        severity=Severity.ERROR,
        step=max(0, guard.num_steps - 1),
        message=message,
        advice="Load the newest checkpoint that was saved before, and look at the incidents since then.",
    )
