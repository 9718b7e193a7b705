"""Names in a file -> names in a model. What stands before them on either side ("state_dict.", "model.", "module.") is
found by counting: the prefix under which most of the model's names are there. Knows no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from steadygrad.errors import MismatchError

FAVOURED = ("", "state_dict.", "model.", "model_state_dict.", "module.", "state_dict.model.", "net.", "params.")
"""Of two prefixes with as many weights behind them, the earlier of these is meant: the model, not its average."""
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""torch puts these into names when it wraps a module; they mean nothing."""


@dataclass(frozen=True, slots=True)
class NameMatch:
    """`names`: the model's name -> the file's."""

    prefix: str
    names: dict[str, str]
    unexpected: tuple[str, ...]


def match_names(stored: Collection[str], wanted: Collection[str], prefix: str | None, path: str | Path) -> NameMatch:
    """Match names; MismatchError where nothing matches, or where the match is ambiguous."""
    files, owns = ({_unwrap(name): name for name in names} for names in (stored, wanted))
    outer, inner = (prefix, "") if prefix is not None else _choose(files, owns, path)
    names = {}
    for short, name in owns.items():
        key = outer + short.removeprefix(inner)
        if key in files and short.startswith(inner):
            names[name] = files[key]
    if not names:
        shown = ", ".join(list(stored)[:3]) or "none"
        where = f" under {prefix!r}" if prefix else ""
        raise MismatchError(
            f"{path} has none of the model's weights{where}: it holds {shown}, "
            f"the model {', '.join(list(wanted)[:3])}. Check that it is a checkpoint of this model."
        )
    used = set(names.values())
    unexpected = tuple(name for short, name in files.items() if short.startswith(outer) and name not in used)
    return NameMatch(outer, names, unexpected)


def _unwrap(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _choose(files: Collection[str], owns: Collection[str], path: str | Path) -> tuple[str, str]:
    """Return (what to take off the file's names, what to take off the model's); one of them is empty."""
    outer, inner = _count_prefixes(files, owns), _count_prefixes(owns, files)
    if inner and max(inner.values()) > max(outer.values(), default=0):
        best = _find_best(inner)
        if len(best) > 1:
            raise MismatchError(
                f"{path} holds {', '.join(list(files)[:3])}, and {len(best)} parts of the model have such weights: "
                f"{', '.join(map(repr, best[:4]))}. Check that it is a checkpoint of this model, or load it into one."
            )
        return "", best[0]
    best = _find_best(outer) if outer else [""]
    if len(best) > 1:
        raise MismatchError(
            f"{path} has the model's weights {len(best)} times: under {', '.join(map(repr, best[:4]))}. "
            f"Say which with prefix={best[0]!r}."
        )
    return best[0], ""


def _count_prefixes(longer: Collection[str], shorter: Collection[str]) -> Counter[str]:
    """Return how many names of `longer` are one of `shorter` behind each prefix."""
    counts: Counter[str] = Counter()
    for name in longer:
        start = 0
        while True:
            if name[start:] in shorter:
                counts[name[:start]] += 1
            dot = name.find(".", start)
            if dot < 0:
                break
            start = dot + 1
    return counts


def _find_best(counts: Counter[str]) -> list[str]:
    """Return the prefixes with the most names behind them, or of several the one that is meant."""
    most = max(counts.values())
    best = [prefix for prefix, count in counts.items() if count == most]
    favoured = [prefix for prefix in FAVOURED if prefix in best]
    return favoured[:1] or best
