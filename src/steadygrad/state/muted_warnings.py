"""Warnings muted for a while, without making the program's own appear a second time.

`warnings.catch_warnings` also silences, but on leaving it Python forgets which warnings it has already shown, so the
program's next step would print each of them once more.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any, cast

_EVERYTHING = ("ignore", re.compile(""), Warning, None, 0)
"""Written with a pattern: `simplefilter("ignore")`, which a program may call meanwhile, makes an entry without one."""


@contextlib.contextmanager
def warnings_muted() -> Iterator[None]:
    """Ignore every warning given inside."""
    filters = cast("list[Any]", warnings.filters)
    filters.insert(0, _EVERYTHING)  # not by simplefilter(): that is what makes Python forget
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a program that called resetwarnings() has removed it
            filters.remove(_EVERYTHING)
