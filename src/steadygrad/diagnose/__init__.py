"""A failing step -> its Cause. Runs only when something was found, and leaves no trace of its replays.

`diagnose` takes a function and its arguments; a `Capture` is a step that was noted before it ran, and
`diagnose_captures` is the same for those, with the generators and the autocast they ran with. The package itself can
be called, since Python puts a package over a function of the same name: `steadygrad.diagnose(fn, batch)` works
whatever was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.entry import diagnose, diagnose_capture, diagnose_captures
from steadygrad.diagnose.replay import is_replaying
from steadygrad.facts import Cause

__all__ = ["Capture", "diagnose", "diagnose_capture", "diagnose_captures", "is_replaying"]


class _CallablePackage(ModuleType):
    def __call__(self, /, *args: Any, **kwargs: Any) -> Cause | None:
        return diagnose(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
