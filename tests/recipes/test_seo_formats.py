"""What seo reads and scores besides pages: feature rows, crawlers' exports; and what it refuses."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from steadygrad.cli import main
from steadygrad.errors import UsageError
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import load_data
from steadygrad_recipes.seo.features import decode_page
from steadygrad_recipes.seo.readers import read_rows, read_unscored, require_html

EXPORT = [
    {"Address": "https://a.example/", "Content Type": "text/html; charset=utf-8", "Status Code": "200",
     "Title 1": "Red shoes", "Title 1 Length": "9", "Word Count": "1,204", "Size (bytes)": "2048",
     "score_overall": "70"},
    {"Address": "https://a.example/x.pdf", "Content Type": "application/pdf", "Status Code": "200",
     "Title 1": "", "Title 1 Length": "0", "Word Count": "0", "Size (bytes)": "9", "score_overall": "1"},
    {"Address": "https://a.example/gone", "Content Type": "text/html", "Status Code": "404",
     "Title 1": "Gone", "Title 1 Length": "4", "Word Count": "2", "Size (bytes)": "10", "score_overall": "2"},
]  # fmt: skip


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_crawlers_export_gives_our_features_its_texts_and_what_is_no_page(tmp_path: Path) -> None:
    read = read_rows(write_csv(tmp_path / "export.csv", EXPORT))

    (row,) = read.rows
    assert row.features["num_words"] == 1204
    assert row.features["html_kilobytes"] == 2
    assert row.features["title_length"] == 9
    assert (row.text, row.scores) == ("Red shoes", {"overall": 70.0})
    assert read.left_out == [
        "export.csv:3: https://a.example/x.pdf is application/pdf, not a page",
        "export.csv:4: https://a.example/gone was answered with status 404",
    ]


def test_feature_rows_are_scored_by_a_model_of_feature_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"speed": str(i), "age": str(i % 3), "score_rank": str(2 * i)} for i in range(40)]
    table = write_csv(tmp_path / "rows.csv", rows)
    run = str(tmp_path / "run")
    assert main(["train", "seo", "--quick", "--epochs", "1", "--data", str(table), "--run-dir", run]) == 0
    unscored = write_csv(tmp_path / "new.csv", [{"speed": "3"}])
    capsys.readouterr()

    assert main(["train", "seo", "--predict", str(unscored), "--run-dir", run]) == 0
    printed = capsys.readouterr().out
    assert "new.csv:2: rank=" in printed
    assert "counted as 0 where a row does not have them, as in training: age" in printed

    page = tmp_path / "page.html"
    page.write_text("<html><body><p>Words.</p></body></html>")
    assert main(["train", "seo", "--predict", str(page), "--run-dir", run]) == 2
    assert "has none of the features that this run was trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.pdf", b"%PDF-1.7\n\0\0"), ("notes.txt", b"plain words, 1 < 2"), ("a.html", b"\x89PNG\r\n\0<html>")],
)
def test_a_file_that_is_no_page_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(UsageError, match="is not an HTML page: it begins with"):
        require_html(path)


def test_rows_that_cannot_be_scored_are_named(tmp_path: Path) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text('{"features": {"speed": 1}}\n{"features": {"speed": "fast"}}\n')

    rows, left_out = read_unscored(table)

    assert [place for place, _ in rows] == ["rows.jsonl:1"]
    assert left_out == ["rows.jsonl:2: speed is 'fast', not a number"]


# --- tables that are not what they seem -----------------------------------------------------------------------------


def test_a_row_with_more_cells_than_the_header_is_left_out_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("clicks,score_overall\n1,2\n3,4,5\n6,7,\n")

    read = read_rows(tmp_path / "rows.csv")

    assert [row.scores["overall"] for row in read.rows] == [2, 7]
    assert read.left_out == ["rows.csv:3: more cells than the header's 2: '5'"]


def test_a_table_with_semicolons_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("clicks;score_overall\n1;2\n")

    assert read_rows(tmp_path / "rows.csv").rows[0].features == {"clicks": 1.0}


def test_a_table_in_utf_16_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("clicks,score_overall\n1,2\n", encoding="utf-16")

    with pytest.raises(UsageError, match=r"rows\.csv is not text in UTF-8: it has zero bytes, as UTF-16"):
        read_rows(tmp_path / "rows.csv")


def test_a_file_that_is_not_a_page_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("file,score_overall\na.html,1\na.pdf,2\n")
    (tmp_path / "a.html").write_text("<title>a</title>")
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n")

    read = read_rows(tmp_path)

    assert len(read.rows) == 1
    assert read.left_out == [
        "scores.csv:3: file a.pdf is not an HTML page: it begins with '%PDF-1.7' and has no HTML tag"
    ]


def test_too_few_pages_are_reported_with_the_rows_that_were_left_out(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("clicks,score_overall\n1,2\n3,many\n")

    with pytest.raises(UsageError, match=r"too few .* Left out: rows\.csv:3: overall is 'many', not a number\."):
        load_data(UltraOptimizedConfig(data=str(tmp_path / "rows.csv")))


def test_scores_that_are_all_equal_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("clicks,score_overall\n" + "1,2\n" * 8)

    small = ["--epochs", "1", "--hidden", "8", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "seo", "--data", str(tmp_path / "rows.csv"), *small]) == 0

    assert "Every score of overall is 2: there is nothing to learn from it." in capsys.readouterr().out


GOOD = [{"features": {"clicks": number}, "score_overall": number} for number in range(6)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"features": {"clicks": 10**400}, "score_x": 1}, "clicks has more digits than a number can have"),
        ({"features": "many", "score_x": 1}, "features must be an object of name to number, found str"),
        ({"html": 5, "score_x": 1}, "html is int, not text"),
        ({"html": "%PDF-1.7", "score_x": 1}, "html is not an HTML page: it begins with '%PDF-1.7' and has no HTML tag"),
        ({"features": {"clicks": 1}, "score_x": 1e300}, "x is 1e+300, too large a score"),
        ("words", "is str, not an object"),
    ],
)
def test_each_row_that_cannot_be_used_is_named_with_its_reason(tmp_path: Path, row: object, reason: str) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*GOOD, row]))

    read = read_rows(tmp_path / "rows.jsonl")

    assert len(read.rows) == len(GOOD)
    assert read.left_out == [f"rows.jsonl:7: {reason}"]


def test_null_is_an_empty_cell(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"features": {"clicks": 1, "age": null}, "scores": {"x": 1}}\n')

    assert read_rows(tmp_path / "rows.jsonl").rows[0].features == {"clicks": 1.0}


def test_a_page_with_two_rows_is_used_once(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<title>a</title>")
    (tmp_path / "scores.csv").write_text("file,score_overall\na.html,1\na.html,9\n")

    read = read_rows(tmp_path)

    assert [row.scores["overall"] for row in read.rows] == [1]
    assert read.left_out == ["scores.csv:3: a.html has a row already, scores.csv:2"]


def test_two_tables_of_scores_are_refused(tmp_path: Path) -> None:
    for name in ("scores.csv", "scores.jsonl"):
        (tmp_path / name).write_text("file,score_overall\n")

    with pytest.raises(UsageError, match=r"has both scores\.csv and scores\.jsonl"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "<title>Käse</title>".encode(),
        "<title>Käse</title>".encode("utf-16"),
        '<meta charset="iso-8859-2"><title>Käse</title>'.encode("iso-8859-2"),
        "<title>Käse</title>".encode("cp1252"),
        '<meta charset="no-such-name"><title>Käse</title>'.encode("cp1252"),
    ],
)
def test_a_page_is_decoded_as_a_browser_would(content: bytes) -> None:
    assert "Käse" in decode_page(content)


def test_a_feed_is_not_a_page(tmp_path: Path) -> None:
    path = tmp_path / "feed.html"
    path.write_text('<?xml version="1.0"?><rss><title>News</title></rss>')

    with pytest.raises(UsageError, match=r"is not an HTML page: .* and is XML without <html>"):
        require_html(path)


def test_a_comma_of_an_export_is_read_where_it_separates_thousands(tmp_path: Path) -> None:
    (row,) = read_rows(write_csv(tmp_path / "export.csv", [{**EXPORT[0], "Word Count": "1,204"}])).rows

    assert row.features["num_words"] == 1204


@pytest.mark.parametrize(("name", "cell"), [("Response Time", "0,613"), ("Flesch", "-3,5"), ("Word Count", "many")])
def test_a_number_of_an_export_that_cannot_be_read_does_not_count_as_0(tmp_path: Path, name: str, cell: str) -> None:
    rows = [{name: "1", **EXPORT[0]}, {**EXPORT[0], "Address": "https://a.example/b", name: cell}]

    read = read_rows(write_csv(tmp_path / "export.csv", rows))

    assert len(read.rows) == 1
    assert read.left_out == [f"export.csv:3: {name} is {cell!r}, not a number; decimals have a point"]


def test_an_address_that_an_export_has_twice_is_used_once(tmp_path: Path) -> None:
    read = read_rows(write_csv(tmp_path / "export.csv", [EXPORT[0], EXPORT[0]]))

    assert len(read.rows) == 1
    assert read.left_out == ["export.csv:3: https://a.example/ has a row already, export.csv:2"]


def test_a_page_is_the_same_however_its_path_is_written(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        (tmp_path / name).write_text("<title>a</title>")
    (tmp_path / "scores.csv").write_text("file,score_overall\na.html,1\n./a.html,9\n./b.html,2\n")

    read = read_rows(tmp_path)

    assert [row.scores["overall"] for row in read.rows] == [1, 2]
    assert read.left_out == ["scores.csv:3: ./a.html has a row already, scores.csv:2"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"file": "a\0.html"}, "file a\0.html is not a name that a file can have"),
        ({"file": "loop.html"}, "file loop.html cannot be read: Too many levels of symbolic links"),
        ({"file": "../up.html"}, "file ../up.html lies outside"),
        ({"html": "<p>x", "score_x": True}, "x is True, not a number"),
        ({"features": {"clicks": 1}, "text": {"a": "b"}}, "text is dict, not text"),
        ({"html": "<p>\ud83d"}, r"not Unicode text: \ud83d is half of a character, and the other half is missing"),
    ],
)
def test_a_row_of_any_content_is_named_and_ends_nothing(tmp_path: Path, row: dict[str, object], reason: str) -> None:
    (tmp_path / "loop.html").symlink_to("loop.html")
    good = {"html": "<p>x", "score_x": 1}
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(one) + "\n" for one in (good, {"score_x": 1, **row})))

    read = read_rows(table)

    assert len(read.rows) == 1
    assert read.left_out[0].startswith(f"rows.jsonl:2: {reason}")


def test_a_page_whose_name_is_not_utf_8_is_listed(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    rows = ["file,score_overall", *(f"{i}.html,{i}" for i in range(8))]
    for i in range(8):
        (pages / f"{i}.html").write_text(f"<title>{i}</title>")
    (pages / "scores.csv").write_text("\n".join(rows))
    try:
        (pages / os.fsdecode(b"caf\xe9.html")).write_text("<title>x</title>")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")

    assert main(["train", "seo", "--epochs", "1", "--data", str(pages), "--run-dir", str(tmp_path / "run")]) == 0

    assert (tmp_path / "run" / "left_out.txt").read_text() == "caf\\udce9.html: has no row in scores.csv\n"


def test_a_file_that_is_not_a_page_keeps_no_other_from_being_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, pages = str(tmp_path / "run"), tmp_path / "pages"
    assert main(["train", "seo", "--quick", "--epochs", "1", "--num-synthetic", "60", "--run-dir", run]) == 0
    pages.mkdir()
    (pages / "a.html").write_text("<title>Bread</title><p>Bake it slowly.</p>")
    (pages / "b.html").write_bytes(b"%PDF-1.7")
    (pages / "c.html").symlink_to("c.html")
    capsys.readouterr()

    assert main(["train", "seo", "--predict", str(pages), "--run-dir", run]) == 0

    printed = " ".join(capsys.readouterr().out.split())
    assert "a.html: " in printed
    assert "not scored:" in printed
    assert "b.html is not an HTML page" in printed
    assert "c.html cannot be read: Too many levels of symbolic links" in printed


def test_a_row_without_a_known_feature_keeps_no_other_from_being_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"speed": str(i), "score_rank": str(2 * i)} for i in range(40)]
    run = str(tmp_path / "run")
    table = write_csv(tmp_path / "rows.csv", rows)
    assert main(["train", "seo", "--quick", "--epochs", "1", "--data", str(table), "--run-dir", run]) == 0
    unscored = write_csv(tmp_path / "new.csv", [{"speed": "3", "age": ""}, {"speed": "", "age": "2"}])
    capsys.readouterr()

    assert main(["train", "seo", "--predict", str(unscored), "--run-dir", run]) == 0

    printed = capsys.readouterr().out
    assert "new.csv:2: rank=" in printed
    assert "not scored: new.csv:3 has none of the features that this run was trained on" in printed
