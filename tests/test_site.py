"""The documentation as a site: it builds without warnings, loads nothing external, and its tables match the source."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import steadygrad

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
)
MODULES = ("diagnose", "losses", "nn")
"""Exported names that are modules: their contents are documented on separate pages."""


def load(name: str) -> ModuleType:
    """Import a program of docs/_site."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for library in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(library, reason="pip install 'steadygrad[docs]'")
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return target


def test_every_page_is_built_and_nothing_else(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")} - {Path("404.html")}
    assert built == pages
    assert not (site / "_site").exists()


def test_every_page_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    missing = [
        page for page in DOCS.rglob("*.md") if f'href="{page.relative_to(DOCS).with_suffix(".html")}"' not in start
    ]
    assert [page.name for page in missing if page.name != "index.md" or page.parent != DOCS] == []


def test_no_page_loads_anything_external(site: Path) -> None:
    found = {page.name: ELSEWHERE.findall(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert {name: links for name, links in found.items() if links} == {}


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/x"></script>',
        '<link rel="a" href=//cdn.example/x.css>',
        "<img src='http://e/x'>",
    ],
)
def test_an_external_resource_is_found(text: str) -> None:
    assert ELSEWHERE.search(text)
    assert not ELSEWHERE.search('<a href="https://example.org">text</a><script src="assets/x.js"></script>')


def test_every_list_is_rendered_as_a_list(site: Path) -> None:
    """Without an empty line before it, or an indent of four, a list becomes part of a paragraph, unlike on GitHub."""
    fallen = {}
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        found = [one for one in re.findall(r"<p>(.*?)</p>", text, re.DOTALL) if re.search(r"\n\s*(-|\d+\.)\s", one)]
        if found:
            fallen[page.name] = found
    assert fallen == {}


def test_every_scene_has_small_pictures_at_every_width_in_both_themes() -> None:
    program = load("screenshots")
    text = (DOCS / "screenshots.md").read_text(encoding="utf-8")
    scenes = ("healthy", "survived", "lost", "running", "compared", "incidents", "million")
    pictures = [
        DOCS / "assets" / f"report-{scene}-{width}-{theme}.webp"
        for scene in scenes
        for width in program.WIDTHS
        for theme in program.THEMES
    ]
    assert len(pictures) == 42
    for picture in pictures:
        assert f"(assets/{picture.name}#only-" in text
        assert picture.read_bytes()[8:12] == b"WEBP"
    assert sum(picture.stat().st_size for picture in pictures) < 1_500_000


def test_the_reference_has_every_exported_name(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    headings = {name.rpartition(".")[2] for name in re.findall(r'id="(steadygrad\.[\w.]+)"', text)}
    assert set(steadygrad.__all__) - headings - {"__version__", *MODULES} == set()


def test_examples_in_docstrings_are_rendered_as_code(site: Path) -> None:
    page = (site / "api" / "guard.html").read_text(encoding="utf-8")
    assert "<blockquote>" not in page
    assert '<span class="gp">&gt;&gt;&gt; </span>' in page


@pytest.mark.parametrize(
    "name", ["lightning", "transformers", "accelerate", "deepspeed", "torchtitan-and-ray", "howto/rl-and-gans"]
)
def test_a_framework_page_begins_with_user_code(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    first = re.search(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert first is not None
    assert first[1] == "diff"
    assert first.start() < 50, "before the words"
    assert len(first[2].splitlines()) <= 6


def test_the_recording_shows_what_the_demo_prints() -> None:
    from steadygrad_recipes.demo.narration import TITLES

    picture = (DOCS / "assets" / "demo.svg").read_text(encoding="utf-8")
    for title in (*TITLES.values(), "Guarded survived", "the step was skipped, no weight was touched"):
        assert title in picture, "run: python docs/_site/recording.py"
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", ""), "it must load nothing"


def test_every_page_has_a_link_to_edit_it(site: Path) -> None:
    page = (site / "howto" / "turn-off.html").read_text(encoding="utf-8")
    assert "https://github.com/steadygrad/steadygrad/edit/main/docs/howto/turn-off.md" in page


def test_there_are_two_colour_schemes_and_a_place_for_versions(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert {"default", "slate"} <= set(re.findall(r'data-md-color-scheme="?(\w+)', page))
    assert '"provider": "mike"' in page


# --- the tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["rules.md", "policies.md", "reference/kinds.md"])
def test_the_tables_match_the_source(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert load("tables").fill(page, text) == text, "run: python docs/_site/tables.py"


def test_a_hand_written_number_is_found() -> None:
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    wrong = text.replace("| `exploding_norm` | 100 |", "| `exploding_norm` | 50 |")
    assert wrong != text
    assert load("tables").fill("rules.md", wrong) == text


def test_every_threshold_is_described() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.*) \|$", load("tables").render_thresholds(), re.MULTILINE)
    assert len(rows) > 40
    assert [name for name, text in rows if not text] == []


def test_every_command_is_listed() -> None:
    from steadygrad.cli.commands import steadygrad as group

    named = re.findall(r"^\| `steadygrad (\w+)", (DOCS / "commands.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(group.commands)


# --- build helpers ----------------------------------------------------------------------------------------------------


def test_a_star_in_the_navigation_adds_the_remaining_pages(tmp_path: Path) -> None:
    for name in ("index.md", "b.md", "a.md"):
        (tmp_path / "part").mkdir(exist_ok=True)
        (tmp_path / "part" / name).touch()
    nav = [{"Part": ["part/index.md", "part/*.md"]}, "gone*.md"]
    hook = load("nav")
    assert hook._expand(nav, tmp_path, set(hook._list_pages(nav))) == [
        {"Part": ["part/index.md", "part/a.md", "part/b.md"]}
    ]


def test_an_example_ends_at_an_empty_line() -> None:
    pytest.importorskip("griffe", reason="pip install 'steadygrad[docs]'")
    fenced = load("doctests").fence("Says so.\n\n>>> 1 + 1\n2\n\nAnd then more.")
    assert fenced.splitlines() == ["Says so.", "", "", "```pycon", ">>> 1 + 1", "2", "```", "", "And then more."]
    assert load("doctests").fence(">>> 1") == "\n```pycon\n>>> 1\n```"


# --- the picture of the architecture ----------------------------------------------------------------------------------


def find_blocks(heading: str) -> list[str]:
    """Return the lines of the first text block below a heading of docs/architecture.md."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return text.partition("```text\n")[2].partition("```")[0].splitlines()


def test_the_layout_lists_exactly_the_parts() -> None:
    package = Path(steadygrad.__file__).parent
    parts = {f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    parts |= {path.name for path in package.glob("*.py")}
    named = [found[1] for line in find_blocks("Layout") if (found := re.match(r"  (\S+)", line)) and line[2] != " "]
    assert sorted(named) == sorted(parts)


def test_the_import_picture_matches_the_enforced_layers() -> None:
    import test_architecture

    unseen = {"__main__", "_version", "demo"}
    enforced = [[part for part in line if part not in unseen] for line in test_architecture.LAYERS]
    drawn = [line.split(" | ") for line in find_blocks("Imports go one way")]
    assert drawn == [line for line in enforced if line]
