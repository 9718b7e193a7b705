"""The options of `steadygrad run`, as plain values that can be passed to another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from steadygrad.config import GuardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `steadygrad run`."""

    config: GuardConfig = field(default_factory=GuardConfig)
    observe: bool = False
    run_dir: Path | None = None
    started_in: Path = field(default_factory=Path.cwd)
    """The user's own working directory: the script may go to another."""
