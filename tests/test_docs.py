"""README and docs: every Python block runs and prints what it shows, links work, and numbers are the measured ones.

The blocks of a page run in order in one namespace, in a new directory. A comment `#> text` is what the block prints at
that point; together they must be its whole output. tests/test_site.py builds the pages as a site.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
WITHOUT_CODE = ("docs/api/", "docs/recipes/", "docs/screenshots.md")
"""Pages without blocks: their content comes from docstrings, or is typed at a prompt."""
NEEDS = {"docs/deepspeed.md": "deepspeed"}
"""Pages whose code needs a library that may be missing."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def find_blocks(text: str) -> list[str]:
    """Return the Python blocks, each after as many empty lines as precede it, so that tracebacks show the line."""
    found = BLOCK.finditer(text)
    return ["\n" * text.count("\n", 0, match.start(2)) + textwrap.dedent(match[2]) for match in found]


def run_blocks(page: Path) -> int:
    """Run the Python blocks of a page, check their output, and return their number."""
    namespace: dict[str, object] = {"__name__": "docs"}
    blocks = find_blocks(page.read_text(encoding="utf-8"))
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(page), "exec"), namespace)
        assert printed.getvalue().splitlines() == re.findall(r"#> (.*)$", block, re.MULTILINE)
    return len(blocks)


@pytest.fixture
def _same_log_level() -> Iterator[None]:
    """Restore the log level: a page may show how to quiet the log."""
    logger = logging.getLogger("steadygrad")
    level = logger.level
    yield
    logger.setLevel(level)


@pages
@pytest.mark.usefixtures("_same_log_level")
def test_every_python_block_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = NEEDS.get(page.relative_to(ROOT).as_posix(), "torch")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEADYGRAD", raising=False)
    num_blocks = run_blocks(page)
    assert num_blocks or page.relative_to(ROOT).as_posix().startswith(WITHOUT_CODE)


def test_the_first_two_pages_run_again_in_a_folder_with_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader runs README's program, the one of the start page, then README's again: `runs/first` exists already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEADYGRAD", raising=False)
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "README.md"):
        run_blocks(page)


@pages
def test_links_point_to_existing_files(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_readme_shows_the_numbers_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- numbers -->\n\n(.*)\n<!-- /numbers -->", readme, re.DOTALL)
    assert shown is not None
    assert shown[1] == load_tables().render_headline(), "run: python benchmarks/publish.py"


def test_the_tables_change_with_the_results(tmp_path: Path) -> None:
    tables = load_tables()
    machine = '{"gpu": "A GPU", "torch": "2.11.0", "python": "3.12.3"}'
    times = '{"plain": 10.0, "Guard": 10.149}'
    results = '{"B=4": {"base": "plain", "milliseconds": ' + times + "}}"
    (tmp_path / "whole_step_cuda.json").write_text(f'{{"machine": {machine}, "results": {results}}}')

    rendered = tables.render_numbers(tmp_path)

    assert "| Guard | 10.15 (1.01) |" in rendered
    assert "A GPU, torch 2.11.0, Python 3.12.3: `python benchmarks/whole_step.py --device cuda`" in rendered


def load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
