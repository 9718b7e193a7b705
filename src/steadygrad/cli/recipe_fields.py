"""A recipe's config class -> a click command with an option for each field; the text below a field is its help.

A field is named by its path, `--optimizer.lr`, and by its last word where only one field has that; `_` is `-`. The
command returns only what was given; `recipe_config` merges defaults and files. Independent of particular recipes.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import enum
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from steadygrad.errors import UsageError

KINDS = {bool: "true/false", int: "number", float: "number", str: "text", types.NoneType: "none"}
ARTICLES = {"number": "a number", "true/false": "true or false"}
"""Kinds of values as they appear in a sentence."""


class FieldOption(click.Option):
    """The option of one field. A switch needs no value: `--protect` is `--protect true`."""

    def __init__(self, path: str, hint: Any, usual: Any, text: str) -> None:
        self.path, self.usual = path, usual
        self.types = typing.get_args(hint) if _is_union(hint) else (hint,)
        self.kind = " | ".join(map(_name_type, self.types))
        self.is_switch = bool in self.types
        alone: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if self.is_switch else {}
        # click makes an identifier of the first one: dots are not allowed in it
        names = [path.replace(".", "__"), spell_flag(path)]
        super().__init__(names, help=text, **alone)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Called by click; raises UsageError if the text is not a valid value of this field."""
        text = check_value(ctx, self, super().type_cast_value(ctx, value))
        if not isinstance(text, str) or (types.NoneType in self.types and text.lower() in ("none", "null")):
            return None
        for kind in (kind for kind in self.types if kind is not types.NoneType):
            # The first type of a union that takes the text wins, in the order of the annotation
            with contextlib.suppress(ValueError, click.BadParameter):
                return _convert(kind, text)
        wanted = " or ".join(ARTICLES.get(kind, kind) for kind in self.kind.split(" | "))
        raise UsageError(f"{self.opts[0]} must be {wanted}, got {text!r}. The default is {spell_value(self.usual)}.")

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002
        """Called by click for --help."""
        return f"{self.opts[0]} {self.kind}", f"{self.help}  [default: {spell_value(self.usual)}]".strip()


class FieldCommand(click.Command):
    """A command with an option for each field of a config class, besides `options`."""

    def __init__(
        self, name: str, config: type, *, aliases: Mapping[str, str], options: Sequence[click.Option] = (), **more: Any
    ) -> None:
        same = {"token_normalize_func": lambda word: word.replace("_", "-")}
        taken = {option.name for option in options}
        self.fields = [field for field in list_fields(config) if field.name not in taken]
        super().__init__(name, params=[*options, *self.fields], context_settings=same, **more)
        for other, path in _find_names([field.path for field in self.fields], aliases).items():
            if other not in taken:
                next(field for field in self.fields if field.path == path).opts.append(spell_flag(other))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Called by click; UsageError names the closest field, and all matching ones if the last word is ambiguous."""
        off = {f"--no-{field.opts[0][2:]}": f"{field.opts[0]}=false" for field in self.fields if field.is_switch}
        try:
            return super().parse_args(ctx, [off.get(word.replace("_", "-"), word) for word in args])
        except click.NoSuchOption as error:
            word, near = error.option_name, error.possibilities
        paths = [field.opts[0] for field in self.fields if field.path.endswith(f".{word[2:].replace('-', '_')}")]
        if paths:
            raise UsageError(f"{word} is a field of several parts: {' or '.join(paths)}. Write which.")
        meant = f"Did you mean {near[0]}?" if near else f"See them: {ctx.command_path} --help."
        raise UsageError(f"{word} is not a field of the recipe {self.name}. {meant}")

    def read_fields(self, ctx: click.Context) -> dict[str, Any]:
        """Return the fields that were given, path -> value."""
        # Only what was written: a default must not override the file or what the run remembers
        given = click.core.ParameterSource.COMMANDLINE
        return {f.path: ctx.params[f.name] for f in self.fields if ctx.get_parameter_source(f.name) is given}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Called by click for --help; lists the fields of each part under its own title."""
        sections: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
        for option in self.get_params(ctx):
            part = option.path.rpartition(".")[0] if isinstance(option, FieldOption) else None
            record = option.get_help_record(ctx)
            if record is not None:
                sections["Options" if part is None else f"Fields of {part}" if part else "Fields"].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def check_value(ctx: click.Context, option: click.Parameter, value: Any) -> Any:  # noqa: ARG001
    """Return the value; raise UsageError if it is the next flag, which click accepts: `--run-dir --quick`."""
    if isinstance(value, str) and value.startswith("--") and len(value) > 2:
        raise UsageError(f"{option.opts[0]} has no value. Write {option.opts[0]} VALUE.")
    return value


def check_path(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return the value, which may not be empty either: as a path that would be the present folder."""
    if value == "":
        raise UsageError(f"{option.opts[0]} is empty. Write {option.opts[0]} VALUE, or leave it out.")
    return check_value(ctx, option, value)


def list_fields(config: type, prefix: str = "") -> Iterator[FieldOption]:
    """Yield every setting of a config class; nested ones are prefixed with their part's name and a dot."""
    hints, helps = typing.get_type_hints(config), read_help(config)
    for item in dataclasses.fields(config):
        path, hint = f"{prefix}{item.name}", hints[item.name]
        nested = next(filter(dataclasses.is_dataclass, typing.get_args(hint) if _is_union(hint) else (hint,)), None)
        if isinstance(nested, type):
            yield from list_fields(nested, f"{path}.")
            continue
        usual = None if item.default is dataclasses.MISSING else item.default
        if item.default_factory is not dataclasses.MISSING:
            usual = item.default_factory()
        yield FieldOption(path, hint, usual, str(item.metadata.get("help", helps.get(item.name, ""))))


def read_help(config: type) -> dict[str, str]:
    """Map each field of the class and its bases to the docstring below it in the source; empty if there is none."""
    found: dict[str, str] = {}
    # Bases first, so that a class that repeats a field gives it its own help
    for owner in filter(dataclasses.is_dataclass, reversed(config.__mro__)):
        with contextlib.suppress(OSError, TypeError):  # a class created at run time has no source
            body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]).body
            for node, below in zip(body, [*body[1:], None]):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.setdefault(node.target.id, "")
                    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                        found[node.target.id] = " ".join(str(below.value.value).split())
    return found


def spell_flag(path: str) -> str:
    """Format `trainer.learning_rate` as it is written on the command line: `--trainer.learning-rate`."""
    return "--" + path.replace("_", "-")


def spell_value(value: Any) -> str:
    """Format a value as it is written on the command line."""
    if isinstance(value, tuple | list):
        return ",".join(spell_value(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, enum.Enum) else value)


def _find_names(paths: Sequence[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Map the fields' other names to their paths: aliases, and last words that only one of them has."""
    last_words = collections.Counter(path.rpartition(".")[2] for path in paths)
    names = {word: path for path in paths if last_words[word := path.rpartition(".")[2]] == 1 and word != path}
    return names | {alias: names.get(meant, meant) for alias, meant in aliases.items()}


def _convert(kind: Any, text: str) -> Any:
    """Convert `text` to one type; raise ValueError or click's BadParameter if it cannot be."""
    if typing.get_origin(kind) is tuple:
        inner = (*typing.get_args(kind), str)[0]
        return tuple(_convert(inner, item.strip()) for item in text.strip("[]()").split(",") if item.strip())
    if kind not in (bool, int, float):
        return text  # for an Enum too: its config lists the valid values
    value = click.types.convert_type(kind)(text)
    if not math.isfinite(value):
        raise ValueError(text)  # 1e400 parses as Inf, which cannot train anything
    return value


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _name_type(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"{_name_type((*typing.get_args(kind), str)[0])},..."
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(one.value) for one in kind)
    return KINDS.get(kind, getattr(kind, "__name__", str(kind)))
