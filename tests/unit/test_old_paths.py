"""Import paths that the documentation named before: they work for one release, give the same things, and warn."""

from __future__ import annotations

import importlib

import pytest

MOVED = {
    "steadygrad.checkpoint.scan.scan_checkpoint": "steadygrad.scan.checkpoint_scan",
    "steadygrad.checkpoint.clean.clean_checkpoint": "steadygrad.scan.clean",
    "steadygrad.checkpoint.diff.diff_checkpoints": "steadygrad.scan.diff",
    "steadygrad.checkpoint.foreign.load_checkpoint": "steadygrad.scan.foreign",
}


@pytest.mark.parametrize("path", MOVED)
def test_an_old_path_gives_the_same_thing_and_warns(path: str) -> None:
    module, _, name = path.rpartition(".")
    expected = getattr(importlib.import_module(MOVED[path]), name)

    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now {MOVED[path]}.{name}"):
        found = getattr(importlib.import_module(module), name)

    assert found is expected


def test_a_name_that_was_never_there_is_an_attribute_error() -> None:
    old = importlib.import_module("steadygrad.checkpoint.diff")
    with pytest.raises(AttributeError, match=r"steadygrad\.scan\.diff"):
        _ = old.no_such_name
