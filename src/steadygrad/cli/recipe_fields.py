"""A recipe's config class <-> words on the command line: its fields with their help, and text -> values.

A field is named by its path, `--trainer.learning-rate`, or by its last word where only one field has that. Help comes
from the field's metadata, the `#:` comment above or beside it, or the text below it. Nothing here knows a recipe.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import enum
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.errors import UsageError

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
ARTICLES = {"number": "a number", "true/false": "true or false"}
"""Kinds of values as they stand in a sentence."""


@dataclass(frozen=True, slots=True)
class Field:
    """One setting of a recipe."""

    path: str
    hint: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """How it is written on the command line."""
        return spell_flag(self.path)

    @property
    def is_switch(self) -> bool:
        """Whether it can stand without a value."""
        return bool in _options(self.hint)

    @property
    def kind(self) -> str:
        """Its type, in words."""
        return " | ".join(_name_type(option) for option in (*_options(self.hint),))


def spell_flag(path: str) -> str:
    """`trainer.learning_rate` as it is written on the command line: `--trainer.learning-rate`."""
    return "--" + path.replace("_", "-")


def list_fields(config: type, prefix: str = "") -> Iterator[Field]:
    """Every setting of a config class, those of nested ones behind their name and a dot."""
    hints, helps = typing.get_type_hints(config), read_help(config)
    for item in dataclasses.fields(config):
        path, hint = f"{prefix}{item.name}", hints[item.name]
        nested = next((option for option in _options(hint) if dataclasses.is_dataclass(option)), None)
        if isinstance(nested, type):
            yield from list_fields(nested, f"{path}.")
            continue
        default = item.default if item.default is not dataclasses.MISSING else None
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        yield Field(path, hint, default, str(item.metadata.get("help", helps.get(item.name, ""))))


def read_help(config: type) -> dict[str, str]:
    """Field -> its documentation in the source, of the class and those it comes from; empty where there is none."""
    found: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        with contextlib.suppress(OSError, TypeError):
            found |= _read_source(textwrap.dedent(inspect.getsource(owner)))
    return found


def _read_source(source: str) -> dict[str, str]:
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    lines, found = source.splitlines(), {}
    for place, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        following = body[place + 1] if place + 1 < len(body) else None
        text = _find_comment(lines, node)
        if not text and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = str(following.value.value)
        found[node.target.id] = " ".join(text.split())
    return found


def _find_comment(lines: Sequence[str], node: ast.AnnAssign) -> str:
    """The `#:` comment behind the field, or the lines of it above."""
    behind = re.search(r"#:\s*(.*)$", lines[(node.end_lineno or node.lineno) - 1])
    if behind:
        return behind[1]
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        above.insert(0, line.strip().removeprefix("#:"))
    return " ".join(above)


# --- text -> values -------------------------------------------------------------------------------------------------


def find_field(name: str, fields: Sequence[Field], aliases: Mapping[str, str], recipe: str) -> Field:
    """The field that `name` means; UsageError names the nearest when there is none, and all when there are several."""
    wanted = name.replace("-", "_")
    wanted = aliases.get(wanted, wanted)
    by_path = {field.path: field for field in fields}
    if wanted in by_path:
        return by_path[wanted]
    leaves = [field for field in fields if field.path.rpartition(".")[2] == wanted]
    if len(leaves) == 1:
        return leaves[0]
    if leaves:
        raise UsageError(f"--{name} is a field of several parts: {' or '.join(f.flag for f in leaves)}. Write which.")
    known = {*by_path, *(field.path.rpartition(".")[2] for field in fields), *aliases}
    near = difflib.get_close_matches(wanted, known, n=1)
    meant = f"Did you mean --{near[0].replace('_', '-')}?" if near else f"See them: steadygrad train {recipe} --help."
    raise UsageError(f"--{name} is no field of the recipe {recipe}. {meant}")


def read_value(field: Field, text: str) -> Any:
    """The value that `text` means for this field; UsageError when it can be none."""
    options = _options(field.hint)
    if text.lower() in ("none", "null") and type(None) in options:
        return None
    for option in options:
        value = _convert(option, text)
        if value is not None:
            return value
    wanted = " or ".join(ARTICLES.get(kind, kind) for kind in field.kind.split(" | "))
    raise UsageError(f"{field.flag} must be {wanted}, got {text!r}. The default is {spell_value(field.default)}.")


def spell_value(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple | list):
        return ",".join(spell_value(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, enum.Enum) else value)


def _convert(option: Any, text: str) -> Any:
    """`text` as one type; None when it cannot be."""
    if option is bool:
        return WORDS.get(text.lower())
    if option in (int, float):
        try:
            number = option(text)
        except ValueError:
            return None
        return number if math.isfinite(number) else None  # 1e400 is Inf, and trains nothing
    if typing.get_origin(option) is tuple:
        items = [item.strip() for item in text.strip("[]()").split(",") if item.strip()]
        kind = (*typing.get_args(option), str)[0]
        values = [_convert(kind, item) for item in items]
        return None if any(value is None for value in values) else tuple(values)
    return text if option is not type(None) else None


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Write into nested plain values."""
    *parts, last = path.split(".")
    for part in parts:
        values = values.setdefault(part, {})
    values[last] = value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested plain values, those of `above` where both have one."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under dotted paths, or nested already, as nested ones."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        made: dict[str, Any] = {}
        set_path(made, str(path), nest(value) if isinstance(value, Mapping) else value)  # YAML reads `on:` as True
        nested = merge(nested, made)
    return nested


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _name_type(option: Any) -> str:
    if option is type(None):
        return "none"
    if typing.get_origin(option) is tuple:
        return f"{_name_type((*typing.get_args(option), str)[0])},..."
    if isinstance(option, type) and issubclass(option, enum.Enum):
        return "|".join(str(one.value) for one in option)
    names = {bool: "true/false", int: "number", float: "number", str: "text"}
    return names.get(option, getattr(option, "__name__", str(option)))
