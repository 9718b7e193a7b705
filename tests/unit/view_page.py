"""Parses a page into the tree that a browser makes of it, so that tests check what a reader sees.

A page that is not well nested fails here.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder

from steadygrad.view.read.run import open_run
from steadygrad.view.render.html import VOID
from steadygrad.view.render.report import render_report


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tree = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self.tree.end(tag)

    def handle_endtag(self, tag: str) -> None:
        closed = self.tree.end(tag).tag
        assert closed == tag, f"</{tag}> closes <{closed}>"

    def handle_data(self, data: str) -> None:
        self.tree.data(data)


def parse_page(html: str) -> Element:
    """Return the element `html` of a document."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    return parser.tree.close()


def read_report(*runs: Path) -> Element:
    """Return the report of some run directories."""
    return parse_page(render_report([open_run(run).read_all() for run in runs]))


def read_text(element: Element | None) -> str:
    """Return the visible text of an element, or nothing if it is missing."""
    return "" if element is None else " ".join(" ".join(element.itertext()).split())


def list_texts(element: Element, path: str) -> list[str]:
    """Return the text of each element at a path, in page order."""
    return [read_text(one) for one in element.findall(path)]


def read_pairs(element: Element, path: str = "dl") -> list[tuple[str, str]]:
    """Return name and value of each line of the lists at a path."""
    return list(zip(list_texts(element, f"{path}/div/dt"), list_texts(element, f"{path}/div/dd"), strict=True))


def read_table(page: Element, corner: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this title."""
    (table,) = (one for one in page.iter("table") if read_text(one.find("thead/tr/th")) == corner)
    return [[read_text(cell) for cell in row] for row in table.findall("tbody/tr")]


def read_drawn(page: Element, run: str = "run0") -> dict[str, Any]:
    """Return the numbers that the page's script draws of a run."""
    (data,) = page.findall(".//script[@id='data']")
    return json.loads(data.text or "")["runs"][run]  # type: ignore[no-any-return]
