"""Facts -> strict JSON. NaN and Inf become the strings "nan", "inf", "-inf": `float()` reads them back, and every
JSON parser accepts the line, which a bare NaN would break."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any) -> str:
    """Return one line of strict JSON."""
    try:
        # Hot: each step's line. Nearly all are plain and finite; copying them first would cost more than encoding.
        return _ENCODER.encode(value)
    except (TypeError, ValueError):  # NaN, Inf, or a key that is not a string
        return _ENCODER.encode(to_plain(value))


def take_fields(fact: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are, without going into them."""
    names = fact.__dataclass_fields__
    return dict(zip(names, map(getattr, itertools.repeat(fact), names)))


def _convert(value: Any) -> Any:
    """Convert what the encoder does not know, one level at a time."""
    return take_fields(value) if dataclasses.is_dataclass(value) else to_plain(value)


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False, default=_convert)


def to_plain(value: Any) -> Any:
    """Convert to dicts, lists, strings, finite numbers, booleans and None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):  # before str and int, which StrEnum and IntEnum also are
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
