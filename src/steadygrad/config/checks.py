"""The checks that every setting goes through: what was found, in which field, and what to write instead."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from steadygrad.errors import ConfigError


def require(condition: bool, owner: object, name: str, rule: str, hint: str) -> None:
    """Raise a ConfigError about `owner.name` unless the condition holds."""
    if not condition:
        value = getattr(owner, name)
        raise ConfigError.about(type(owner).__name__, name, f" must {rule}, got {value!r}. {hint}", rule=rule)


def require_argument(condition: bool, where: str, rule: str, value: object, hint: str) -> None:
    """Raise a ConfigError about a function's argument unless the condition holds; `where` names the function."""
    if not condition:
        raise ConfigError(f"{where} must {rule}, got {value!r}. {hint}")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # false for NaN


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # True is an int


def require_whole(owner: object, name: str, *, least: int, hint: str, why: str = "") -> None:
    value = getattr(owner, name)
    require(is_whole(value) and value >= least, owner, name, f"be a whole number, at least {least}{why}", hint)


def require_booleans(owner: Any) -> None:
    """Require every field of `owner` with a boolean default to be a boolean: a string such as "no" counts as true."""
    for item in dataclasses.fields(owner):
        if isinstance(item.default, bool):
            fits = isinstance(getattr(owner, item.name), bool)
            require(fits, owner, item.name, "be True or False", f"The default is {item.default}.")


def set_names(owner: object, name: str, example: str) -> None:
    """Store the field as a tuple of strings. A single string is refused: its letters would become the names."""
    value = getattr(owner, name)
    fits = isinstance(value, list | tuple | set | frozenset) and all(isinstance(one, str) for one in value)
    meant = value if isinstance(value, str) else example
    require(fits, owner, name, "be a tuple of names", f"Write {name}=({meant!r},).")
    object.__setattr__(owner, name, tuple(value))


def require_kinds(owner: object, kinds: Mapping[str, type]) -> None:
    """Require each of these fields of `owner` to have its type: a settings object, not a mapping or a name."""
    for name, kind in kinds.items():
        fits = isinstance(getattr(owner, name), kind)
        require(fits, owner, name, f"be a {kind.__name__}", f"Write {name}={kind.__name__}(...).")


def require_positive(owner: Any, *, but: tuple[str, ...] = ()) -> None:
    """Require every field of `owner` with a numeric default to be positive, and an integer if the default is one."""
    for item in dataclasses.fields(owner):
        value = getattr(owner, item.name)
        # A string, because every module of settings has `from __future__ import annotations`.
        optional = item.type == "int | None" and value is not None
        if item.name in but or not (is_number(item.default) or optional):
            continue
        whole = optional or isinstance(item.default, int)
        fits = is_number(value) and value > 0 and (isinstance(value, int) or not whole)
        rule = "be a whole number above 0" if whole else "be a number above 0"
        require(fits, owner, item.name, rule, f"The default is {item.default}.")


def as_enum(cls: type[enum.Enum], value: Any, where: str) -> Any:
    try:
        return value if isinstance(value, cls) else cls(value)
    except ValueError:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        names = ", ".join(dict.fromkeys(name.lower() for name in cls.__members__))
        raise ConfigError(f"{where}: must be one of {names}, got {value!r}.") from None
