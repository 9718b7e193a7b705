"""A hook of the site's build: a navigation entry with a `*` becomes the pages that match it, each once.

Recipes and benchmarks come and go by themselves: adding a page must not need a second edit somewhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Called by mkdocs when it has read mkdocs.yml."""
    root = Path(config.docs_dir)
    named = set(_list_pages(config.nav))
    config.nav = _expand(config.nav, root, named)
    return config


def _list_pages(entries: list[Any]) -> list[str]:
    """The pages that the navigation names itself."""
    pages: list[str] = []
    for entry in entries:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages += _list_pages(inner) if isinstance(inner, list) else [inner] if "*" not in inner else []
    return pages


def _expand(entries: list[Any], root: Path, named: set[str]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            found.append({title: _expand(i, root, named) if isinstance(i, list) else i for title, i in entry.items()})
        elif "*" in entry:
            pages = sorted(path.relative_to(root).as_posix() for path in root.glob(entry))
            found += [page for page in pages if page not in named]
        else:
            found.append(entry)
    return found
