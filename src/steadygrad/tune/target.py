"""What was named on the command line -> the training to tune: a recipe, or a function of a script.

A Target also knows how to write chosen settings: as the fields of a recipe's config, or for a script under the names
of `Settings`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from steadygrad.config import FixedNorm
from steadygrad.config.plain import to_plain
from steadygrad.errors import UsageError
from steadygrad.tune.settings import Settings, describe_clip, find_changed
from steadygrad.tune.tunable import Tunable, make_tunable


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Where a recipe's config holds a setting, and how to write a value there."""

    path: str
    write: Callable[[Any, Target], Any] = lambda value, _: value


@dataclass(slots=True, kw_only=True)
class Target:
    """A training to tune, and how to write the chosen settings."""

    name: str
    tunable: Tunable
    fields: Mapping[str, Field] | None = None
    """Setting -> field of the recipe's config; None for a script, which has no config."""
    config: Any = None
    """The recipe's config."""
    note: str = ""
    """A remark for the user about how it is tuned."""
    given: Settings = field(init=False)

    def __post_init__(self) -> None:
        self.given = self.tunable.given

    @property
    def is_recipe(self) -> bool:
        """Whether `steadygrad train` can train it."""
        return self.fields is not None

    def can_write(self, setting: str) -> bool:
        """Return whether a value of this setting can be written."""
        return self.fields is None or setting in self.fields

    def spell_settings(self, chosen: Settings) -> dict[str, Any]:
        """Return plain values for a file: a recipe's fields that differ from its defaults, or a script's settings."""
        if self.fields is None:
            return _spell_plainly(chosen, self.tunable)
        values = _find_given(self.config)
        for name in find_changed(self.given, chosen):
            if name in self.fields:
                item = self.fields[name]
                _set_path(values, item.path, to_plain(item.write(getattr(chosen, name), self)))
        return values

    def name_field(self, setting: str) -> str:
        """Return the name under which a setting is written."""
        return setting if self.fields is None or setting not in self.fields else self.fields[setting].path

    def read_field(self, setting: str, settings: Settings) -> str:
        """Return the written value of a setting, in words."""
        if self.fields is not None and setting in self.fields:
            value = self.fields[setting].write(getattr(settings, setting), self)
            return f"{value:.4g}" if isinstance(value, float) else str(value)
        return settings.describe().get(setting, "-")


def open_script(target: str) -> Target:
    """Turn `train.py:make` into a Target, from what `make()` returns."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UsageError(
            f"there is no script {file}, named by {target!r}. Give the path of a Python file: train.py:make."
        )
    function = getattr(_load(path), name, None)
    if not callable(function):
        raise UsageError(
            f"{path} has no function {name!r}. Write one that returns (model, optimizer, loss_fn, loader), and name "
            f"it: {path}:make."
        )
    torch.manual_seed(0)  # every worker must start from the same weights
    return Target(name=target, tunable=make_tunable(function(), f"{path.name}:{name}()"))


def _load(path: Path) -> Any:
    """Import the script as a module, so that code under `if __name__ == "__main__"` does not run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and workers look their module up by name
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        with contextlib.suppress(ValueError):  # the script may have removed it
            sys.path.remove(folder)
    return module


def _spell_plainly(chosen: Settings, tunable: Tunable) -> dict[str, Any]:
    values = chosen.to_dict()
    share, clip = values.pop("warmup"), values.pop("clip")
    if tunable.num_steps:
        values["warmup_steps"] = round(share * tunable.num_steps)
    elif share:
        values["warmup_share"] = share
    named = {"batch": "batch_size", "accumulation": "accumulation_steps"}
    plain = {named.get(name, name): value for name, value in values.items() if value is not None}
    precision = plain.pop("precision", None)
    autocast = {} if precision in (None, "fp32") else {"autocast": precision}
    return _round({**plain, "guard": {"clip": clip, **autocast}})


def _round(values: dict[str, Any]) -> dict[str, Any]:
    """Round numbers to four significant digits."""
    return {
        name: _round(value) if isinstance(value, dict) else float(f"{value:.4g}") if type(value) is float else value
        for name, value in values.items()
    }


def _find_given(config: Any) -> dict[str, Any]:
    """Return the values of a config that differ from its defaults, as plain values."""
    return _differences(to_plain(config), to_plain(type(config)()))


def _differences(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(usual.get(name), Mapping):
            inner = _differences(value, usual[name])
            if inner:
                found[name] = inner
        elif value != usual.get(name):
            found[name] = value
    return found


def _set_path(values: dict[str, Any], path: str, value: Any) -> None:
    *parts, last = path.split(".")
    for part in parts:
        values = values.setdefault(part, {})
    values[last] = value


def write_norm(clip: Any, target: Target) -> float | None:
    """Return a clip threshold in the form that recipes use."""
    if clip is None or isinstance(clip, FixedNorm):
        return None if clip is None else float(f"{clip.max_norm:.4g}")
    raise UsageError(f"{target.name} clips by a fixed norm, and {describe_clip(clip)} was chosen. Search without clip.")
