"""Tables of rows: separators, marks and quotes are read right, and what cannot be read is named with its line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from steadygrad.errors import UsageError
from steadygrad_recipes.tables import read_csv, read_jsonl, read_lines, require_text

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
    [(gzip.compress(b"a,b"), "is compressed with gzip. Unpack it first"), ("a,b".encode("utf-16"), "has zero bytes")],
)
def test_a_packed_or_binary_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_text(write(tmp_path / "a.csv", content))
