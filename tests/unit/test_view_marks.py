"""Every action has a name and a symbol in every view."""

from __future__ import annotations

import re
from pathlib import Path

import steadygrad.view.render as render
from steadygrad.facts import Action
from steadygrad.view.marks import MARKS, find_mark


def test_every_action_with_an_effect_has_a_mark() -> None:
    assert set(Action) - {Action.NONE} <= set(MARKS)


def test_every_colour_of_a_mark_is_in_the_style_sheet() -> None:
    sheets = "".join(path.read_text(encoding="utf-8") for path in Path(render.__path__[0], "assets").glob("*.css"))
    variables = set(re.findall(r"(--[\w-]+):", sheets))
    assert {mark.paint for mark in MARKS.values()} <= variables


def test_an_action_of_a_newer_version_is_shown_under_its_own_name() -> None:
    assert find_mark("sing").words == "sing"
