"""The places where a recipe's fields are given -> its config. What comes later wins.

A wrong field is told as a person wrote it: one of a file behind the file's name, one of the command line as its flag.
So they know what to mend, and where. Nothing here knows a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.config.plain import WrongField, list_wrong, read_mapping, try_build
from steadygrad.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Values that were given in one place."""

    values: Mapping[Any, Any]
    """Nested, or under paths: 'optimizer.lr'; kept under paths."""
    file: Path | None = None
    """None: the command line, or the program itself."""
    is_remembered: bool = False
    """Whether a run wrote the file, from settings that did fit: what breaks a rule then was given beside it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", flatten(self.values))

    def holds(self, path: str) -> bool:
        """Whether a value for the field, or for one inside it, was given here."""
        return any(f"{given}.".startswith(f"{path}.") for given in self.values)


def read_source(file: Path) -> Source:
    """The fields in a YAML or TOML file."""
    try:
        return Source(values=read_mapping(file), file=file)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values, or some under dotted paths already, as one mapping of path to value.

    >>> flatten({"a.b": 1, "a": {"c": 2}})
    {'a.b': 1, 'a.c': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():  # YAML reads `on:` as True
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def nest(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Values under paths as nested ones; what comes later wins.

    >>> nest({"a.b": 1, "a.c": 2}, {"a.b": 3})
    {'a': {'b': 3, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for path, value in (item for source in sources for item in source.items()):
        *parts, last = path.split(".")
        inner = nested
        for part in parts:
            if not isinstance(inner.get(part), dict):  # a single value, which stands where a part must be
                inner[part] = {}
            inner = inner[part]
        inner[last] = value
    return nested


def build_config(config: type, sources: Sequence[Source], flag: Callable[[str], str]) -> Any:
    """The config of all sources; `flag` is how a field is written on the command line."""
    made, wrong = try_build(config, nest(*(source.values for source in sources)))
    if not wrong:
        return made
    lines = [_tell(one, sources, flag) for one in wrong]
    raise ConfigError(lines[0] if len(lines) == 1 else list_wrong(lines))


def _tell(wrong: WrongField, sources: Sequence[Source], flag: Callable[[str], str]) -> str:
    if not wrong.path:  # nobody says which field it was
        file = next((source.file for source in reversed(sources) if source.file is not None), None)
        return wrong.line if file is None else f"{file}: {wrong.line}"
    givers = [source for source in sources if wrong.is_alone or not source.is_remembered]
    file = _find_file(wrong.path, givers)
    others = "" if wrong.is_alone else "".join(f" {one}." for one in _name_others(wrong, givers, file))
    return f"{flag(wrong.path) if file is None else f'{file}: {wrong.path}'}{wrong.text}{others}"


def _find_file(path: str, sources: Sequence[Source]) -> Path | None:
    """The file that the field's value is from; None when it is from none."""
    return next((source.file for source in reversed(sources) if source.holds(path)), None)


def _name_others(wrong: WrongField, sources: Sequence[Source], file: Path | None) -> Iterator[str]:
    """Where a rule's other fields are from: the file may set `epochs`, which `stage1_epochs` must be less than."""
    part, _, name = wrong.path.rpartition(".")
    rule = wrong.text.partition(", got ")[0]
    for word in dict.fromkeys(re.findall(r"\w+", rule)):
        path = f"{part}.{word}" if part else word
        other = _find_file(path, sources)
        if word != name and other not in (None, file):
            yield f"{path} is from {other}"
