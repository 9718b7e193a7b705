"""The exceptions that steadygrad raises on purpose.

    SteadygradError
    ├── ConfigError (ValueError)      a setting is wrong; raised on construction, before the first step
    ├── UsageError (RuntimeError)     a call that cannot work: no graph, no gradient, a closed guard
    ├── UnsupportedError (TypeError)  an engine, dtype or layout that is refused by name
    └── TrainingHalted (RuntimeError) the policy, or `on_nonfinite=Action.RAISE`, ended the run
        └── NonFiniteError            ... because loss or gradients were not finite

Every message has three beats: what was found, where, and what to do.
"""

from __future__ import annotations

from steadygrad.facts import Incident


class SteadygradError(Exception):
    """Root of the tree: `except SteadygradError` catches all that this library raises on purpose."""


class ConfigError(SteadygradError, ValueError):
    """A setting has a value that cannot be meant."""


class UsageError(SteadygradError, RuntimeError):
    """A call that cannot work in the state it was made in."""


class UnsupportedError(SteadygradError, TypeError):
    """Something that steadygrad refuses by name rather than getting it wrong."""


class TrainingHalted(SteadygradError, RuntimeError):
    """Training was ended on purpose; `incidents` tells the whole story."""

    def __init__(self, message: str, incidents: tuple[Incident, ...] = ()) -> None:
        super().__init__(message)
        self.incidents = incidents


class NonFiniteError(TrainingHalted):
    """Loss or gradients were not finite, and the configuration asked for an exception. No weight was touched."""
