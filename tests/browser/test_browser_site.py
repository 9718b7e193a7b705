"""The documentation opened from a folder, without a server: the search finds the right page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    pytest.importorskip("material", reason="pip install 'steadygrad[docs]'")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(target)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return target


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("turn off", "howto/turn-off.html"),
        ("disable", "howto/turn-off.html"),
        ("too many warnings", "howto/too-many-warnings.html"),
        ("NaN", "guide/symptoms.html"),
        ("DeepSpeed", "deepspeed.html"),
        ("notebook", "howto/notebooks.html"),
        ("exit code", "reference/exit-codes.html"),
    ],
)
def test_searching_finds_the_right_page_first(words: str, found: str, site: Path, page: Any) -> None:
    page.goto(f"file://{site}/index.html")
    page.click("input.md-search__input")
    page.keyboard.type(words)
    page.wait_for_selector(".md-search-result__item > a")
    page.wait_for_timeout(1000)  # until the last letters have been searched for
    first = page.query_selector(".md-search-result__item > a")
    assert first.get_attribute("href").partition(f"{site.name}/")[2].partition("?")[0].partition("#")[0] == found
