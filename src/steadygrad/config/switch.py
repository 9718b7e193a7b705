"""Whether steadygrad is switched off in the environment."""

from __future__ import annotations

import os


def is_switched_off() -> bool:
    """Whether STEADYGRAD=off asks for the plain loop."""
    return os.environ.get("STEADYGRAD", "").lower() == "off"
