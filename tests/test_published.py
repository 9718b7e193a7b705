"""Published numbers are measured ones: README, docs/benchmarks.md and the picture are generated from results files."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Import the publishing programs from their own folder, as when they are run."""
    names = ("tables", "peer_tables", "sections", "publish", "story", "machine")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {name: __import__(name) for name in names}
    for name in names:  # so that no other test imports them
        monkeypatch.delitem(sys.modules, name)
    return modules


def test_the_pages_show_the_results(benchmarks: dict[str, ModuleType]) -> None:
    for page, mark, render in benchmarks["publish"].PLACES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert benchmarks["publish"].fill(text, mark, render()) == text, "run: python benchmarks/publish.py"


def test_the_picture_is_drawn_from_the_results(benchmarks: dict[str, ModuleType]) -> None:
    story = json.loads((RESULTS / "story.json").read_text(encoding="utf-8"))["results"]
    drawn = benchmarks["story"].draw(story)
    assert drawn == benchmarks["story"].PICTURE.read_text(encoding="utf-8"), "run: python benchmarks/story.py --draw"


def test_a_changed_result_changes_the_text(tmp_path: Path, benchmarks: dict[str, ModuleType]) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "crash.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    found["results"]["num_kills"] = 4711
    path.write_text(json.dumps(found), encoding="utf-8")

    for module, render in (("tables", "render_numbers"), ("sections", "render_sections")):
        before = getattr(benchmarks[module], render)(RESULTS)
        after = getattr(benchmarks[module], render)(tmp_path / "results")
        assert after != before
        assert re.search("4,?711", after)


def test_every_results_file_is_published_or_listed_as_unpublished(benchmarks: dict[str, ModuleType]) -> None:
    published = {name for _, files in benchmarks["sections"].SECTIONS.values() for name in files}
    there = {path.stem for path in RESULTS.glob("*.json")}
    assert there - published <= set(benchmarks["sections"].UNPUBLISHED)


def test_each_published_command_names_an_existing_program(benchmarks: dict[str, ModuleType]) -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page, _, _ in benchmarks["publish"].PLACES]
    commands = {match for page in pages for match in re.findall(r"python (benchmarks/[\w/]+\.py)", page)}
    assert len(commands) > 10
    assert not [command for command in commands if not (ROOT / command).is_file()]


def test_the_readme_has_the_right_counts() -> None:
    from steadygrad.config import DetectConfig
    from steadygrad.detect import standard_rules
    from steadygrad.diagnose.explanations.library import ENTRIES

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    counts = {"rules": len(standard_rules(DetectConfig())), "explanations": len(ENTRIES)}
    for word, count in counts.items():
        assert re.findall(rf"(\d+) {word}", readme) == [str(count)]


def test_the_readme_has_no_numbers_outside_the_marks(benchmarks: dict[str, ModuleType]) -> None:
    """Percentages, ratios, times and sizes appear only between the marks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = benchmarks["publish"].fill(text, "numbers", "")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert not re.findall(r"\d+(?:\.\d+)?\s?(?:%|x\b|ms\b|s\b|GiB|MiB|GB|MB)", text)


def test_the_readme_is_short(benchmarks: dict[str, ModuleType]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|\]\([^)]*\)", "", text, flags=re.DOTALL)
    assert len(text.split()) <= 700


def test_a_peer_with_a_better_number_is_named(benchmarks: dict[str, ModuleType]) -> None:
    say = benchmarks["peer_tables"].say_who_is_better
    ours = {"changed": 3, "warned": 1, "apart": 80, "cost": 1.05}
    other = {"changed": 0, "warned": 2, "apart": 81, "cost": 1.051}

    said = say({"steadygrad Guard": ours, "Other": other})

    assert "fewer healthy trainings changed: Other 0 (Guard 3)" in said
    assert "more silent errors told apart from their twins: Other 81 (Guard 80)" in said
    assert "warning" not in said
    assert "cheaper" not in said
    assert say({"steadygrad Guard": ours, "Other": ours}) == ""


def test_a_page_without_its_marks_is_refused(benchmarks: dict[str, ModuleType]) -> None:
    with pytest.raises(ValueError, match="0 places are marked with <!-- numbers -->"):
        benchmarks["publish"].fill("no marks", "numbers", "x")


def test_results_contain_no_local_paths() -> None:
    named = [p.name for p in RESULTS.glob("*.json") if re.search(r"/(home|root|work|tmp|Users)/", p.read_text())]
    assert not named


def test_contributing_names_only_what_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = {path for path in re.findall(r"`(?:python )?([\w.]+/[\w/.*]*)`", text) if "*" not in path}
    roots = (ROOT, ROOT / "src" / "steadygrad")
    assert len(paths) > 20
    assert not [path for path in paths if not any((root / path).exists() for root in roots)]
    named = {
        "src/steadygrad/detect/__init__.py": "def _all_rules",
        "src/steadygrad/detect/memory.py": "class Remembering",
        "tests/unit/rule_traces.py": "TROUBLE",
        "src/steadygrad/config/clip.py": "ClipStrategy =",
        "src/steadygrad/clip/__init__.py": "_CLIPPERS",
        "tests/tensor/test_clip.py": "STRATEGIES",
        "tests/zoo/cures/cure.py": "class Cure",
        "src/steadygrad/diagnose/explanations/entry.py": "class Entry",
        "src/steadygrad_recipes/__init__.py": "RECIPES =",
        "benchmarks/lr_sensitivity.py": "COLUMNS =",
        "benchmarks/tables.py": "SUMMARIES",
    }
    assert not [path for path, words in named.items() if words not in (ROOT / path).read_text(encoding="utf-8")]
