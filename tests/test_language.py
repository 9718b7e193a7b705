"""The English that users read: README, docs, examples, and every string of the library that is printed or rendered.

A fixed list of recurring habits, each with its replacement. It is not a grammar checker: it keeps corrected habits from
coming back. Text in backticks or in a code block of a page counts as code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "docs" / "_site").glob("*.py")),
]
HABITS = {
    r"how-manieth": "serial number, or: number of this ..., from 1",
    r"\b(?:is|are|was|were|be) told\b(?! apart| to| otherwise)": "is reported / gets an error / is printed",
    r"\btells? (?:it|them) so\b": "says so, reports it",
    r"\bbrings? (?:a|an|another) (?:warning|error|hint|message)": "logs a warning, raises an error",
    r"\bthat (?:is|are) no (?:scalar|tensor|number|module|function|file|folder|list|string|float|integer)": "is not a",
    r"\bnot alike\b|\bunlike each other\b": "different",
    r"\bat its end stands?\b|\bat the end stands?\b": "the last line prints",
    r"\bwhere (?:the|a|its) \w+ lies?\b": "the path of",
    r"\bworth a line\b": "no incidents",
    r"\bback 1 times\b|(?<![\d.])1 (?:steps|times|batches|errors|incidents|runs)\b": "one step",
    r"\bsomebody\b|\bnobody\b": "name the caller, or use the passive",
    r"\bhardly meant\b": "probably a mistake",
    r"\bspoilt\b": "corrupt",
    r"\bat rest\b": "idle",
    r"\bcut short\b": "truncated",
    r"\bin the place of\b": "instead of",
    r"\binside of\b": "inside",
    r"\banew\b": "again, from scratch",
    r"\bnow and then\b": "periodically",
    r"\bwhoever\b|\bwhomever\b|\bthereof\b|\bhitherto\b|\blest\b": "name who is meant",
    r"\bcan not\b": "cannot",
    r"\bthe same as always\b|\bas ever\b": "as before",
    r"\boutside of\b": "outside",
    r"\blet through\b": "re-raised, accepted",
    r"\bfalls and falls\b": "keeps falling",
    r"\bcannot be promised\b": "is not guaranteed",
    r"\b(?:a|an) [\w-]+ of (?:its|their|your|our) own(?=[.,;:)]|$)": "its own ...",
    r"\b(?:guard|optimizer|scheduler|monitor|layers?) (?:is|are|was|were) made\b": "created",
    r"\bmake the (?:guard|optimizer|model|monitor|layer)s? (?:with|after|before|from)\b": "create",
    r"\b(?!that|had)([a-z]{2,}) \1\b": "a word twice",
}
"""Pattern -> its replacement."""


def read_prose(page: Path) -> str:
    """Return a page without its code, keeping the line count."""
    text = page.read_text(encoding="utf-8")
    blanked = re.sub(r"^( *)```.*?^\1```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", " . ", blanked)


def read_strings(source: Path) -> Iterator[tuple[int, str]]:
    """Return docstrings and messages of a program; values in f-strings become dots."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else " . " for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, re.sub(r"`[^`\n]*`", " . ", node.value)


def find_habits(text: str) -> Iterator[tuple[int, str, str]]:
    """Return line, words and advice of each habit."""
    joined = re.sub(r"(?<=\S)\n[ \t]*(?=[^\s|#*\-\d>])", " ", text)  # a phrase may cross a line end
    for pattern, advice in HABITS.items():
        for match in re.finditer(pattern, joined, re.IGNORECASE):
            yield joined.count("\n", 0, match.start()), match[0], advice


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_plain_english(page: Path) -> None:
    found = [f"{words!r}: {advice}" for _, words, advice in find_habits(read_prose(page))]
    assert found == []


def test_messages_and_docstrings_are_plain_english() -> None:
    found = [
        f"{source.relative_to(ROOT)}:{line} {words!r}: {advice}"
        for source in SOURCES
        for line, text in read_strings(source)
        for _, words, advice in find_habits(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "The how-manieth save",
        "Settings given otherwise now win, and are told",
        "a loss that is no scalar",
        "brings a warning when the Guard is made",
        "Ranks that are not alike",
        "At its end stands where the report lies",
        "Nothing happened that is worth a line",
        "the steps go back 1 times",
        "once somebody\nasks",
        "hardly meant",
        "cut short or spoilt",
        "code outside of any module",
        "the error is let through",
        "a process of its own.",
        "before the optimizer is made",
        "Make the optimizer with fused=True",
        "the the step",
    ],
)
def test_each_habit_is_found(text: str) -> None:
    assert list(find_habits(text))


def test_code_is_not_checked(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Call `somebody`.\n\n```python\nnobody = 1\n```\n\n    text\n", encoding="utf-8")
    assert list(find_habits(read_prose(page))) == []
