"""The places where a recipe's fields are given -> its config. What comes later wins.

A wrong field is told as a person wrote it: one of a file behind the file's name, one of the command line as its flag.
So they know what to mend, and where. Nothing here knows a recipe.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.cli.recipe_fields import merge, nest
from steadygrad.config.plain import WrongField, list_wrong, read_mapping, try_build
from steadygrad.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Values that were given in one place, nested."""

    values: Mapping[str, Any]
    file: Path | None = None
    """None: the command line, or the program itself."""
    is_remembered: bool = False
    """Whether a run wrote the file, from settings that did fit: what breaks a rule then was given beside it."""

    def holds(self, path: str) -> bool:
        """Whether a value for the field was given here."""
        values: Any = self.values
        for part in path.split("."):
            if not isinstance(values, Mapping) or part not in values:
                return False
            values = values[part]
        return True


def read_source(file: Path) -> Source:
    """The fields in a YAML or TOML file."""
    try:
        return Source(values=nest(read_mapping(file)), file=file)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def build_config(config: type, sources: Sequence[Source], flag: Callable[[str], str]) -> Any:
    """The config of all sources; `flag` is how a field is written on the command line."""
    values: dict[str, Any] = functools.reduce(merge, (source.values for source in sources), {})
    made, wrong = try_build(config, values)
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
