"""The exceptions that steadygrad raises on purpose.

    SteadygradError
    ├── ConfigError (ValueError)      a setting is wrong; raised on construction, before the first step
    ├── UsageError (RuntimeError)     a call that cannot work: no graph, no gradient, a closed guard
    │   └── CheckpointError           a checkpoint that cannot be written, read or used
    │       ├── DamagedCheckpoint     a folder that was truncated, changed or never finished
    │       │   └── NoCheckpoint      nothing there, or a file of another kind
    │       ├── NonFiniteStateError   a state that must not be saved, or should not have been
    │       ├── UnsafePickleError     a file that would run code when it is read
    │       └── MismatchError         a checkpoint of another model
    ├── UnsupportedError (TypeError)  an engine, dtype or layout that is refused by name
    └── TrainingHalted (RuntimeError) the policy, or `on_nonfinite=Action.RAISE`, ended the run
        └── NonFiniteError            ... because loss or gradients were not finite

Every message has three beats: what was found, where, and what to do.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from steadygrad.facts import Incident


class SteadygradError(Exception):
    """Root of the tree: `except SteadygradError` catches everything that this library raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Past __init__: the default would call it with the finished message, and some take what the message is made of
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(SteadygradError, ValueError):
    """A setting has an invalid value.

    `field` is its name and `rule` what it must satisfy, where one field is at fault; `problem` is the message without
    the field's name in front, for a caller that knows where the value was written.
    """

    def __init__(self, message: str, *, field: str = "", rule: str = "", problem: str = "") -> None:
        super().__init__(message)
        self.field, self.rule, self.problem = field, rule, problem or f": {message}"

    @classmethod
    def about(cls, owner: str, field: str, problem: str, *, rule: str = "") -> Self:
        """Build the error for one field: `owner` is its class, `problem` the text that follows the field's name."""
        return cls(f"{owner}.{field}{problem}", field=field, rule=rule or problem, problem=problem)


class UsageError(SteadygradError, RuntimeError):
    """A call that cannot work in the state it was made in."""


class UnsupportedError(SteadygradError, TypeError):
    """Something that steadygrad refuses by name rather than getting it wrong."""


class TrainingHalted(SteadygradError, RuntimeError):
    """Training was ended on purpose; `incidents` holds every incident of the run."""

    def __init__(self, message: str, incidents: tuple[Incident, ...] = ()) -> None:
        super().__init__(message)
        self.incidents = incidents


class NonFiniteError(TrainingHalted):
    """Loss or gradients were not finite, and the configuration asked for an exception. No weight was touched."""


# --- checkpoints --------------------------------------------------------------------------------------------------


class CheckpointError(UsageError):
    """A checkpoint could not be written, read or used."""


class DamagedCheckpoint(CheckpointError):
    """A folder whose contents are not what was written."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"{folder} cannot be used: {reason}. Use the checkpoint before it; resume() does so automatically."
        )
        self.folder, self.reason = folder, reason


class NoCheckpoint(DamagedCheckpoint):
    """A path where there never was a checkpoint."""

    def __init__(self, folder: Path, reason: str) -> None:
        # Past DamagedCheckpoint's message: there is no checkpoint before this one to fall back on
        CheckpointError.__init__(self, f"{folder} is not a checkpoint: {reason}. Give the folder or the file of one.")
        self.folder, self.reason = folder, reason


class NonFiniteStateError(CheckpointError):
    """A state with NaN or Inf in it. `tensors` says how many elements of which."""

    def __init__(self, where: str, tensors: Mapping[str, int]) -> None:
        shown = ", ".join(f"{name} ({count})" for name, count in list(tensors.items())[:5])
        more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
        plural = "" if len(tensors) == 1 else "s"
        super().__init__(
            f"{where} holds values that are not finite in {len(tensors)} tensor{plural}: {shown}{more}. "
            "Go back to the last good checkpoint, or save with clean=True to replace them."
        )
        self.tensors = dict(tensors)


class UnsafePickleError(CheckpointError):
    """A pickle that needs more than plain containers and tensors. Nothing of it was run."""

    def __init__(self, path: Path, wanted: Sequence[str]) -> None:
        names = ", ".join(wanted) if wanted else "something that could not be read"
        super().__init__(
            f"{path} was refused: reading it would run {names}. Nothing was run. Ask for weights as safetensors; if "
            "you know who wrote the file, load it with trust=True, or scan it with --trust."
        )
        self.wanted = list(wanted)


class MismatchError(CheckpointError):
    """The checkpoint does not fit the model or the optimizers."""
