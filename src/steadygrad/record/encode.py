"""Facts -> strict JSON. NaN and Inf become the strings "nan", "inf", "-inf": `float()` reads them back, and every
JSON parser accepts the line, which a bare NaN would break."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any) -> str:
    """Return one line of strict JSON."""
    return json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def to_plain(value: Any) -> Any:
    """Convert to dicts, lists, strings, finite numbers, booleans and None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, str | int | bool):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return str(value)
