"""Tables of rows: separators, marks and quotes are read right, and what cannot be read is named with its line."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from steadygrad.errors import UsageError
from steadygrad_recipes.tables import read_csv, read_jsonl, read_lines, require_text, resolve_inside, write_lines

ROWS = [{"a": "1", "b": "x y"}, {"a": "3"}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_csv_of_any_program_gives_the_same_rows(tmp_path: Path, separator: str, end: str, mark: bytes) -> None:
    text = "a, b\n1,x y\n\n,,\n3,\n".replace(",", separator).replace("\n", end)

    found = list(read_csv(write(tmp_path / "a.csv", mark + text.encode())))

    assert [row for _, row in found] == ROWS
    assert [line for line, _ in found] == [2, 5]


def test_a_row_over_several_lines_is_named_by_its_first(tmp_path: Path) -> None:
    found = list(read_csv(write(tmp_path / "a.csv", 'a,b\n"1\n2",x\n3,y\n')))

    assert found == [(2, {"a": "1\n2", "b": "x"}), (4, {"a": "3", "b": "y"})]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('a,b\n1,2\n3,"4\n5,6\n7,8\n', 3, "unexpected end of data, in lines 3 to 5: is a quote not closed or doubled"),
        ('a,b\n1,2\n3,"4" inch\n', 3, "in lines 3 to 3: is a quote not closed or doubled"),
        ("a,b\n1,2\n3,4,5\n", 3, "more cells than the header's 2: '5'"),
        (b"a,b\n1,2\n3,\xfc\n", 3, "not UTF-8 text"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_affects_no_other(
    tmp_path: Path, content: str | bytes, line: int, reason: str
) -> None:
    good, (number, bad) = read_csv(write(tmp_path / "a.csv", content))

    assert good == (2, {"a": "1", "b": "2"})
    assert number == line
    assert isinstance(bad, ValueError)
    assert reason in str(bad)


@pytest.mark.parametrize(("header", "reason"), [("a,b,a", "'a' is there 2 times"), (b"\xfc,b", "not UTF-8 text")])
def test_a_header_that_cannot_be_used_is_refused(tmp_path: Path, header: str | bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=f"a.csv: its first line .*{reason}"):
        list(read_csv(write(tmp_path / "a.csv", header)))


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"a,b\n", b"\n\n"])
def test_a_table_without_rows_has_none(tmp_path: Path, content: bytes) -> None:
    assert list(read_csv(write(tmp_path / "a.csv", content))) == []
    assert [row for _, row in read_jsonl(write(tmp_path / "a.jsonl", b"\n"))] == []


def test_json_lines_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbf[1]", b"{", b"", b'"\xfc"', b"[" * 100_000, '"\u2028"'.encode(), b"9" * 5000]

    found = dict(read_jsonl(write(tmp_path / "a.jsonl", b"\r\n".join(lines))))

    assert (found[1], found[6]) == ([1], "\u2028")
    assert [str(found[line])[:30] for line in (2, 4, 5)] == [
        "not JSON (Expecting property n",
        "not UTF-8 text",
        "not JSON that can be read: it ",
    ]
    assert isinstance(found[7], ValueError)
    assert 3 not in found


def test_lines_of_a_text_have_no_mark(tmp_path: Path) -> None:
    found = list(read_lines(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\n\xfc\ntwo\x0cthree")))

    assert [(line, str(text)) for line, text in found] == [(1, "one"), (3, "not UTF-8 text"), (4, "two\x0cthree")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"a,b", mtime=0), "is compressed with gzip. Unpack it first"),
        ("a,b".encode("utf-16"), "has zero bytes"),
    ],
)
def test_a_packed_or_binary_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_text(write(tmp_path / "a.csv", content))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (rb'{"a": "\ud83d"}', r"not Unicode text: \ud83d is half of a character, and the other half is missing"),
        (rb'{"\uDE00": 1}', r"not Unicode text: \ude00 is half of a character, and the other half is missing"),
        (b'{"a": "\xed\xa0\xbd"}', "not UTF-8 text"),
        (b'{"a": "cut', "not JSON (Unterminated string at column 7)"),
        (b'{"a":', "not JSON (Expecting value at column 6)"),
    ],
)
def test_a_line_of_json_that_is_no_text_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    rows = list(read_jsonl(write(tmp_path / "a.jsonl", rb'{"a": "\ud83d\ude00 \\ud83d"}' + b"\n" + line + b"\n{}\n")))

    assert rows[0] == (1, {"a": "\U0001f600 \\ud83d"})
    assert str(rows[1][1]) == reason
    assert rows[2] == (3, {})


def test_a_name_leads_nowhere_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "up").symlink_to(tmp_path.parent)

    assert resolve_inside(tmp_path, "x/../a.jpg") == tmp_path.resolve() / "a.jpg"
    for name in ("../a", "up/a", "/etc/passwd"):
        with pytest.raises(ValueError, match="lies outside"):
            resolve_inside(tmp_path, name)
    for name in ("a\0b", "a\ud800"):
        with pytest.raises(ValueError, match="is not a name that a file can have"):
            resolve_inside(tmp_path, name)


def test_names_that_are_not_utf_8_are_written_with_escapes(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.txt", ["ü", os.fsdecode(b"\xe9")])

    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "ü\n\\udce9\n"
