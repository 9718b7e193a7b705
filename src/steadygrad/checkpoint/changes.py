"""Settings changed between two starts of a run override the saved ones: `--resume --lr 0.000125`.

The settings that optimizers were created with are saved with the state. Those that differ at the next start are written
into the loaded state before it is restored. A learning rate is changed by its ratio, in the groups, in the schedule and
in what the policy made of it, so that the schedule continues where it was, only scaled. Pure: plain values in, the same
plain values changed, and a list of changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

Given = list[list[dict[str, Any]]]
"""The settings of each group of each optimizer."""
RATES = ("lr", "weight_decay")
"""Settings that a policy may have scaled, so they are changed by their ratio."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that the user changed."""

    optimizer: int
    group: int
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        where = f" of group {self.group}" if self.group else ""
        return f"{self.name}{where} {self.before} -> {self.after}"


def note_given(optimizers: Sequence[Any]) -> Given:
    """Return every group's settings as the user created it, even if a schedule has already changed them."""
    return [[_note_group(group) for group in optimizer.param_groups] for optimizer in optimizers]


def _note_group(group: Mapping[str, Any]) -> dict[str, Any]:
    noted = {name: _as_plain(value) for name, value in group.items() if name != "params"}
    if "initial_lr" in noted:
        # A scheduler sets `initial_lr` to what the user gave, and then changes `lr` at construction (warm-up)
        noted["lr"] = noted.pop("initial_lr")
    return {name: value for name, value in noted.items() if _is_plain(value)}


def _as_plain(value: Any) -> Any:
    return float(value) if hasattr(value, "item") and _has_one(value) else value


def _has_one(value: Any) -> bool:
    num = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    return num == 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def find_changes(given: Given, saved: Given) -> list[Change]:
    """Return the settings that differ from the saved ones; new groups do not count as a change."""
    return [
        Change(i, g, name, before[name], now[name])
        for i, (own, theirs) in enumerate(zip(given, saved))
        for g, (now, before) in enumerate(zip(own, theirs))
        for name in now
        if name in before and now[name] != before[name] and not _follows(name, now, before)
    ]


def _follows(name: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether it is a schedule's rate (`max_lr`), which changes along with the learning rate."""
    return name.endswith("_lr") and now.get("lr") != before.get("lr")


def apply_changes(changes: Sequence[Change], state: MutableMapping[str, Any]) -> None:
    """Write the changes into a loaded state."""
    for change in changes:
        group = state["optimizers"][change.optimizer]["groups"][change.group]
        place = sum(len(one["groups"]) for one in state["optimizers"][: change.optimizer]) + change.group
        if change.name not in RATES or not change.before:  # from 0 there is no ratio
            group[change.name] = change.after
            continue
        ratio = change.after / change.before
        for key in [key for key in group if key == change.name or (change.name == "lr" and key.endswith("_lr"))]:
            group[key] = group[key] * ratio
        if change.name == "lr":
            for schedule in _each_schedule(state["extras"].get("scheduler")):
                _scale_at(schedule, ("base_lrs", "max_lrs", "_last_lr"), place, ratio)
        rates = state["guard"]["actor"]["rates"][change.name]
        _scale_at(rates, ("raw",), place, ratio)


def _each_schedule(tree: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield a scheduler's state and those of the schedulers it contains."""
    if isinstance(tree, MutableMapping):
        yield tree
        for inner in tree.get("_schedulers") or ():
            yield from _each_schedule(inner)


def _scale_at(values: MutableMapping[str, Any], keys: Sequence[str], place: int, ratio: float) -> None:
    for key in keys:
        numbers = values.get(key)
        if isinstance(numbers, list) and place < len(numbers):
            values[key] = [number * ratio if i == place else number for i, number in enumerate(numbers)]
