"""Objects found among all that live: new ones without a search of everything, and no search without end."""

from __future__ import annotations

import gc

import pytest

from steadygrad.state import live_objects
from steadygrad.state.live_objects import is_affordable, list_live, list_young


class Thing:
    """Something to be found."""


class Derived(Thing):
    """A kind of it."""


def test_young_objects_are_found_and_old_ones_left_out() -> None:
    old = Thing()
    gc.collect()
    new = [Thing(), Derived()]
    found = list_young(Thing)
    assert all(any(one is thing for one in found) for thing in new)
    assert all(one is not old for one in found)
    assert any(one is old for one in list_live(Thing))


def test_an_exact_search_leaves_out_subclasses() -> None:
    plain, derived = Thing(), Derived()
    assert {id(plain), id(derived)} <= set(map(id, list_live(Thing)))
    found = list_live(Thing, is_exact=True)
    assert any(one is plain for one in found)
    assert all(type(one) is Thing for one in found)


def test_searches_take_a_bounded_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_objects, "_seconds", 0.0)
    assert is_affordable()
    list_live(Thing)
    assert live_objects._seconds > 0
    monkeypatch.setattr(live_objects, "_seconds", 1e9)
    assert not is_affordable()
