"""The places where a recipe's fields are set -> its config. Later ones win.

A wrong field is reported the way the user wrote it: with the file's name if from a file, as a flag if from the command
line, so that they know what to fix and where. Nothing here depends on a particular recipe.
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
    """Values set in one place."""

    values: Mapping[Any, Any]
    """Nested, or by path: 'optimizer.lr'; stored by path."""
    file: Path | None = None
    """None: the command line, or the program itself."""
    is_remembered: bool = False
    """Whether a run wrote the file, from valid settings: then the value that breaks a rule comes from elsewhere."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", flatten(self.values))

    def holds(self, path: str) -> bool:
        """Whether a value for the field, or for one inside it, was set here."""
        return any(f"{given}.".startswith(f"{path}.") for given in self.values)


def read_source(file: Path) -> Source:
    """Read the fields in a YAML or TOML file."""
    try:
        return Source(values=read_mapping(file), file=file)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values, some perhaps under dotted paths already, into one mapping of path to value.

    >>> flatten({"a.b": 1, "a": {"c": 2}})
    {'a.b': 1, 'a.c': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():  # YAML reads `on:` as True
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def nest(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Nest values given by path; later ones win.

    >>> nest({"a.b": 1, "a.c": 2}, {"a.b": 3})
    {'a': {'b': 3, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for path, value in (item for source in sources for item in source.items()):
        *parts, last = path.split(".")
        inner = nested
        for part in parts:
            if not isinstance(inner.get(part), dict):  # a single value where a nested part must be
                inner[part] = {}
            inner = inner[part]
        inner[last] = value
    return nested


def build_config(config: type, sources: Sequence[Source], flag: Callable[[str], str]) -> Any:
    """Build the config from all sources; `flag` formats a field as it is written on the command line."""
    made, wrong = try_build(config, nest(*(source.values for source in sources)))
    if not wrong:
        return made
    lines = [_describe(one, sources, flag) for one in wrong]
    raise ConfigError(lines[0] if len(lines) == 1 else list_wrong(lines))


def _describe(wrong: WrongField, sources: Sequence[Source], flag: Callable[[str], str]) -> str:
    if not wrong.path:  # it is not known which field it was
        file = next((source.file for source in reversed(sources) if source.file is not None), None)
        return wrong.line if file is None else f"{file}: {wrong.line}"
    givers = [source for source in sources if wrong.is_alone or not source.is_remembered]
    file = _find_file(wrong.path, givers)
    others = "" if wrong.is_alone else "".join(f" {one}." for one in _name_others(wrong, givers, file))
    return f"{flag(wrong.path) if file is None else f'{file}: {wrong.path}'}{wrong.text}{others}"


def _find_file(path: str, sources: Sequence[Source]) -> Path | None:
    """Return the file that the field's value comes from; None if it is not from a file."""
    return next((source.file for source in reversed(sources) if source.holds(path)), None)


def _name_others(wrong: WrongField, sources: Sequence[Source], file: Path | None) -> Iterator[str]:
    """Yield where a rule's other fields come from: the file may set `epochs`, which must exceed `stage1_epochs`."""
    part, _, name = wrong.path.rpartition(".")
    rule = wrong.text.partition(", got ")[0]
    for word in dict.fromkeys(re.findall(r"\w+", rule)):
        path = f"{part}.{word}" if part else word
        other = _find_file(path, sources)
        if word != name and other not in (None, file):
            yield f"{path} is from {other}"
