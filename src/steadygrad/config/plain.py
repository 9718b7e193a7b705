"""Plain values, as read from a file, <-> settings. One error names every unknown or wrong field."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steadygrad.config.checks import as_enum
from steadygrad.errors import ConfigError
from steadygrad.facts.kinds import KINDS
from steadygrad.words import spell_count


@dataclasses.dataclass(frozen=True, slots=True)
class WrongField:
    """A field that settings refuse."""

    path: str
    """Its path in the plain values, 'clip.alpha'; empty for the values as a whole."""
    text: str
    """What is wrong with it, to follow its name: ': unknown; ...' or ' must be ..., got ...'."""
    line: str
    """Both in one line, as `build` reports them."""

    @property
    def is_alone(self) -> bool:
        """Whether the value is wrong regardless of the other fields; some rules involve several fields."""
        return self.text.startswith(": ")


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a .yaml, .yml or .toml file."""
    if not path.is_file():
        raise ConfigError("no such file. Give the path of a YAML or TOML file.")
    if path.suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(_read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}.") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"the suffix {path.suffix!r} is not known. Use .yaml, .yml or .toml.")
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading YAML needs PyYAML. Run: pip install 'steadygrad[yaml]', or use TOML.") from None
    try:
        values = yaml.safe_load(_read_text(path))  # safe: a tag in the file must not build an object
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {_spell_yaml(error)}.") from None
    if values is None:
        raise ConfigError("the file is empty. Write `{}` into it to take every default.")
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"the file must hold a mapping of fields, found a {type(values).__name__}. Write lines of field: value."
        )
    return values


def _spell_yaml(error: Any) -> str:
    """Format where and what in one line: yaml's own text takes several."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"{problem} (at line {mark.line + 1}, column {mark.column + 1})"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text ({error.reason} at byte {error.start}). Save the file as UTF-8.") from None


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """Build an instance of the dataclass `cls` from plain values; raise all errors in one ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{cls.__name__} must be given as a mapping of field to value, got {values!r}. {{}} will do.")
    made, wrong = try_build(cls, values)
    if wrong:
        raise ConfigError(list_wrong([one.line for one in wrong]))
    return made


def try_build(cls: type, values: Mapping[str, Any]) -> tuple[Any, list[WrongField]]:
    """Return an instance of `cls` and every field that it refuses, so the caller can add where each was written."""
    errors: list[WrongField] = []
    return _build(cls, values, "", errors), errors


def list_wrong(lines: Sequence[str]) -> str:
    """Format how many fields are wrong, and each on its own line."""
    return "\n  ".join([f"{spell_count(len(lines), 'wrong field')}:", *lines])


def _add(errors: list[WrongField], where: str, problem: str) -> None:
    """Add a field whose value is wrong by itself."""
    errors.append(WrongField(where, f": {problem}", f"{where}: {problem}"))


def _build(cls: type, values: Mapping[str, Any], path: str, errors: list[WrongField]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    wrong: set[str] = set()
    for name, value in values.items():
        where = f"{path}{name}"
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            if name in KINDS and "actions" in known:
                meant = f"an answer to a kind of finding belongs into {path}actions. "
            _add(errors, where, f"unknown; {meant}{cls.__name__} has {', '.join(sorted(known))}.")
            continue
        before = len(errors)
        arguments[name] = _convert(hints[name], value, where, errors)
        if len(errors) > before:
            wrong.add(name)
            del arguments[name]
    return _construct(cls, arguments, wrong, path, errors)


def _construct(cls: type, arguments: dict[str, Any], wrong: set[str], path: str, errors: list[WrongField]) -> Any:
    """Build an instance of `cls`; report each refused field and leave it at its default to find the next one.

    An error whose rule involves a field already reported (`min_values` with a wrong `window`) is omitted: it may be a
    mere consequence.
    """
    while True:
        try:
            return cls(**arguments)
        except (ConfigError, TypeError) as raised:
            error = raised if isinstance(raised, ConfigError) else ConfigError(str(raised))
            if not any(re.search(rf"\b{name}\b", f"{error.field} {error.rule}") for name in wrong):
                where = path.rstrip(".")
                line = f"{where or cls.__name__}: {error}"
                errors.append(WrongField(f"{path}{error.field}" if error.field else where, error.problem, line))
            if error.field not in arguments:
                return None
            # Each round takes one argument away, so the loop ends.
            wrong.add(error.field)
            del arguments[error.field]


def _convert(hint: Any, value: Any, where: str, errors: list[WrongField]) -> Any:
    """Convert `value` to the annotation `hint`; on failure add an error and return None."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    if any(dataclasses.is_dataclass(o) for o in options):
        return _convert_object(options, value, where, errors)
    for option in options:
        if isinstance(option, type) and issubclass(option, enum.Enum):
            try:
                return as_enum(option, value, where)
            except ConfigError as error:
                _add(errors, where, str(error).removeprefix(f"{where}: "))
                return None
        if option is bool and isinstance(value, bool):
            return value
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):  # text too: YAML 1.1 reads 1e-3 as text
                return float(value)
        if option is str and isinstance(value, str):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(value)
        if typing.get_origin(option) is collections.abc.Mapping and isinstance(value, Mapping):
            return dict(value)
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    one_text = isinstance(value, str) and any(typing.get_origin(option) is tuple for option in options)
    _add(errors, where, f"must be {names}, got {value!r}." + (f" Write [{value!r}]." if one_text else ""))
    return None


def _convert_object(options: tuple[Any, ...], value: Any, where: str, errors: list[WrongField]) -> Any:
    if not isinstance(value, Mapping):
        _add(errors, where, f"must be a mapping of fields, got {value!r}.")
        return None
    if len(options) == 1:
        return _build(options[0], value, f"{where}.", errors)
    kinds = {option.kind: option for option in options}
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        _add(errors, f"{where}.kind", f"must be one of {', '.join(kinds)}, got {kind!r}.")
        return None
    return _build(kinds[kind], {k: v for k, v in value.items() if k != "kind"}, f"{where}.", errors)


def to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        plain = [f for f in dataclasses.fields(value) if f.metadata.get("plain", True)]
        fields = {f.name: getattr(value, f.name) for f in plain}
        return kind | {name: to_plain(v) for name, v in fields.items() if not callable(v)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {key: to_plain(v) for key, v in value.items()}
    return value
