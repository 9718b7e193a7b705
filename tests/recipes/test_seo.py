"""The recipe seo: what is read from pages and tables, that it learns, what it predicts, that a killed run goes on."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from seo_trainings import make_training, rows, train
from torch import Tensor

from steadygrad import ConfigError, UsageError
from steadygrad.cli import main
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import encode_text, load_data
from steadygrad_recipes.seo.features import FEATURES, parse_page
from steadygrad_recipes.seo.readers import read_rows
from steadygrad_recipes.seo.trainer import measure_errors, score_losses

PAGE = """<!doctype html><html lang="en"><head><title>Bread at home</title>
<meta name="Description" content="How to bake bread at home.">
<meta name="viewport" content="width=device-width"><meta property="og:title" content="Bread">
<link rel="canonical" href="https://www.site.example/bread"><script src="/a.js"></script>
<script type="application/ld+json">{"@type": "Recipe"}</script>
<script type="application/ld+json">broken</script></head>
<body><h1>Bread</h1><h3>Flour</h3><p>Bake it slowly. Eat it warm!</p>
<a href="/flour">flour</a><a href="https://site.example/oven">oven</a><a href="#top">top</a>
<a rel="nofollow sponsored" href="https://shop.example/">shop</a>
<img src="a.jpg" alt="a loaf"><img src="b.jpg"><div itemtype="https://schema.org/Thing"></div>
<script>var hidden = "words that nobody reads";</script></body></html>"""


# --- pages ------------------------------------------------------------------------------------------------------------


def test_the_features_of_a_page_are_what_a_person_would_count() -> None:
    page = parse_page(PAGE)

    known = {
        "title_length": 13,
        "meta_description_length": 26,
        "num_h1": 1,
        "num_h2": 0,
        "num_h3": 1,
        "heading_skips": 1,
        "num_words": 12,  # bread flour bake it slowly eat it warm flour oven top shop
        "num_internal_links": 2,
        "num_external_links": 1,
        "share_nofollow": 1 / 3,
        "num_images": 2,
        "share_images_with_alt": 0.5,
        "num_structured_data": 2,
        "num_open_graph": 1,
        "has_canonical": 1,
        "has_viewport": 1,
        "has_lang": 1,
        "is_noindex": 0,
        "num_scripts": 1,
        "title_in_h1": 1 / 3,
        "title_in_description": 1.0,
    }
    assert {name: page.features[name] for name in known} == pytest.approx(known)
    assert tuple(page.features) == FEATURES
    assert "nobody" not in page.text


@pytest.mark.parametrize(
    "html", ["", "<", "<html", "plain text", "<title>" * 50, "\x00<a href='http://['>x</a>", "<p>" * 500]
)
def test_broken_markup_gives_finite_numbers(html: str) -> None:
    page = parse_page(html)

    assert all(math.isfinite(value) for value in page.features.values())


def test_easy_text_reads_better_than_hard_text() -> None:
    easy = parse_page("<body>The cat sat. The dog ran. It was fun.</body>")
    hard = parse_page(
        "<body>Institutional interoperability necessitates comprehensive methodological standardisation</body>"
    )

    assert easy.features["readability"] > 90
    assert hard.features["readability"] < 10


def test_a_word_has_the_same_number_in_every_process() -> None:
    config = UltraOptimizedConfig(num_buckets=100, max_words=4)

    assert encode_text("Bread and, bread", config) == [15, 76, 15, 0]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_folder_of_pages_is_read_with_its_scores_and_what_is_missing_is_told(tmp_path: Path) -> None:
    for name in ("a.html", "b.html", "deep/c.htm", "forgotten.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PAGE)
    with (tmp_path / "scores.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "score_overall", "score_title"])
        table.writerows([["a.html", "70", "81.5"], ["b.html", "60", ""], ["deep/c.htm", "x", "1"]])
        table.writerows(
            [["gone.html", "5", "5"], ["../outside.html", "5", "5"], ["a.html", "", ""], ["a.html", "nan", ""]]
        )

    read = read_rows(tmp_path)

    assert [row.scores for row in read.rows] == [{"overall": 70.0, "title": 81.5}, {"overall": 60.0}]
    assert read.rows[0].features["num_images"] == 2
    reasons = dict(line.split(": ", 1) for line in read.left_out)
    assert reasons["scores.csv:4"] == "overall is 'x', not a number"
    assert reasons["scores.csv:5"] == "file gone.html cannot be read: No such file or directory"
    assert reasons["scores.csv:6"].startswith("file ../outside.html lies outside ")
    assert reasons["scores.csv:7"] == "has no score: no column that begins with score_, no scores object"
    assert reasons["scores.csv:8"] == "overall is nan"
    assert reasons["forgotten.html"] == "has no row in scores.csv"
    assert len(read.rows) + len(read.left_out) == 8


def test_lines_of_pages_and_of_features_are_read(tmp_path: Path) -> None:
    lines = [
        {"html": PAGE, "scores": {"overall": 3}},
        {"features": {"num_words": 100, "clicks": 7}, "text": "bread", "scores": {"overall": 4, "title": None}},
        {"num_words": 50, "score_overall": 1},
        {"scores": {"overall": 4}},
        [1, 2],
        {"html": PAGE, "scores": "many"},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n{broken\n"
    (tmp_path / "pages.jsonl").write_text(text)

    read = read_rows(tmp_path / "pages.jsonl")

    assert [row.scores for row in read.rows] == [{"overall": 3.0}, {"overall": 4.0}, {"overall": 1.0}]
    assert read.rows[1].features == {"num_words": 100.0, "clicks": 7.0}
    assert [line.partition(":")[2].partition(":")[0] for line in read.left_out] == ["4", "5", "6", "8"]
    assert "has neither file nor html nor features nor text" in read.left_out[0]
    assert "not JSON" in read.left_out[3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "there is no file or folder .*nowhere to read pages from.*Give --data"),
        (lambda folder: folder, "has neither scores.csv nor scores.jsonl. Write one"),
        (lambda folder: write(folder / "pages.txt", "x"), "ends in '.txt', which is not a table of pages. Use .csv"),
        (lambda folder: write(folder / "pages.jsonl", "1\n"), "has no page with a score: pages.jsonl:1: is int"),
        (lambda folder: write(folder / "pages.csv", "file\n"), "has no page with a score: it has no rows"),
    ],
)
def test_what_cannot_be_read_is_told(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read_rows(make(tmp_path))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_too_few_pages_are_told(tmp_path: Path) -> None:
    table = write(tmp_path / "pages.jsonl", json.dumps({"num_words": 1, "score_overall": 1}) + "\n")
    with pytest.raises(UsageError, match="there is 1 page with scores, too few"):
        load_data(UltraOptimizedConfig(data=str(table)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("val_share", 1.0), ("dropout", 1.0), ("hidden", 0), ("num_buckets", 1), ("use_amp", "yes")],
)
def test_a_setting_that_cannot_be_meant_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"UltraOptimizedConfig.{name} must"):
        UltraOptimizedConfig(**{name: value})  # type: ignore[arg-type]


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_score_that_nobody_gave_has_no_loss_and_no_gradient() -> None:
    predicted = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    wanted, given = torch.tensor([[0.0, math.inf], [1.0, 7.0]]), torch.tensor([[True, False], [True, False]])

    losses = score_losses(predicted, wanted, given)
    losses.mean().backward()

    assert losses.tolist() == [2.5, 0.0]
    assert predicted.grad is not None
    assert predicted.grad[:, 1].tolist() == [0.0, 0.0]


def test_r2_is_one_for_perfect_and_zero_for_the_mean() -> None:
    wanted, given = torch.tensor([[1.0], [2.0], [6.0], [99.0]]), torch.tensor([[True], [True], [True], [False]])

    assert measure_errors(wanted, wanted, given, ["a"]) == {"mae_a": 0.0, "r2": 1.0}
    assert measure_errors(torch.full((4, 1), 3.0), wanted, given, ["a"])["r2"] == pytest.approx(0.0, abs=1e-6)


# --- training ---------------------------------------------------------------------------------------------------------


def test_it_learns_what_the_mean_of_the_scores_does_not_know() -> None:
    trainer, data = make_training(epochs=12, learning_rate=3e-3)

    train(trainer, data)

    last = trainer.val_history[-1]
    assert last["r2"] > 0.85  # the mean of the scores has 0
    assert last["loss"] < 0.15  # and 1
    assert set(last) >= {"mae_title", "mae_content", "mae_technical", "mae_links", "mae_overall"}


def test_the_words_of_a_page_are_used() -> None:
    """`content` follows from which words stand there; with all features gone only they can tell."""
    blank = [type(row)({}, row.text, {"content": row.scores["content"]}) for row in rows()]
    trainer, data = make_training(blank, epochs=10, learning_rate=1e-2)

    train(trainer, data)

    assert trainer.val_history[-1]["r2"] > 0.3  # 0 without a look at the words


def test_scores_that_nobody_gave_are_no_bad_input() -> None:
    some = [
        dataclasses.replace(row, scores={"title": row.scores["title"]}) if i % 3 else row
        for i, row in enumerate(rows())
    ]
    trainer, data = make_training(some, epochs=4, learning_rate=3e-3)

    train(trainer, data)

    assert trainer.incidents == []
    assert trainer.val_history[-1]["r2"] > 0.3


def test_a_page_is_scored_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = tmp_path / "run", write(tmp_path / "page.html", PAGE)
    settings = ["--num-synthetic", "60", "--epochs", "2", "--hidden", "16", "--num-buckets", "256", "--device", "cpu"]
    assert main(["train", "seo", *settings, "--run-dir", str(run)]) == 0

    assert main(["train", "seo", "--predict", str(page), "--run-dir", str(run)]) == 0

    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{page}: title=")
    scores = dict(pair.split("=") for pair in line.partition(": ")[2].split(", "))
    assert list(scores) == ["title", "content", "technical", "links", "overall"]
    assert all(-50 < float(score) < 150 for score in scores.values())
    assert main(["train", "seo", "--predict", str(tmp_path / "none.html"), "--run-dir", str(run)]) == 2
    assert "there is no page" in capsys.readouterr().err


def test_rows_that_were_left_out_are_told_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps({"num_words": i, "score_overall": i}) for i in range(12)]
    write(tmp_path / "pages.jsonl", "\n".join([*good, *["{broken"] * 7]))
    settings = [
        "--epochs",
        "1",
        "--hidden",
        "8",
        "--max-words",
        "4",
        "--device",
        "cpu",
        "--run-dir",
        str(tmp_path / "run"),
    ]

    assert main(["train", "seo", "--data", str(tmp_path / "pages.jsonl"), *settings]) == 0

    told = capsys.readouterr().out
    listed = tmp_path / "run" / "left_out.txt"
    assert f"7 rows were left out, each is named in {listed}:" in told
    assert len(listed.read_text().splitlines()) == 7
    assert "pages.jsonl:13: not JSON" in told
    assert "... and 2 more" in told


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"clicks": 3, "views": 2, "score_overall": 5}, "other features than this data has: views, words"),
        ({"words": 3, "clicks": 2, "score_title": 5}, "other scores than this data has: overall, title"),
    ],
)
def test_a_resume_with_other_columns_is_refused_and_leaves_the_run_as_it_was(
    row: dict[str, int], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "pages.jsonl", tmp_path / "run"
    write(data, "\n".join(json.dumps({"words": i, "clicks": i % 3, "score_overall": i}) for i in range(12)))
    settings = ["--data", str(data), "--hidden", "8", "--max-words", "4", "--device", "cpu", "--run-dir", str(run)]
    assert main(["train", "seo", *settings, "--epochs", "1"]) == 0
    before = (run / "seo.json").read_text()
    write(data, "\n".join([json.dumps(row)] * 12))

    assert main(["train", "seo", "--resume", "latest", *settings, "--epochs", "2"]) == 2

    assert message in capsys.readouterr().err
    assert (run / "seo.json").read_text() == before


def test_a_run_that_was_killed_goes_on_bit_for_bit(
    tmp_path: Path,
    kill_at: Callable[[Sequence[str], int], None],
    read_weights: Callable[[Path], dict[str, Tensor]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ["--num-synthetic", "60", "--epochs", "3", "--batch-size", "8", "--hidden", "16", "--num-buckets", "256"]
    settings += ["--max-words", "32", "--device", "cpu", "--save-every", "4"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", "seo", *settings, "--run-dir", str(whole)]) == 0
    kill_at(["train", "seo", *settings, "--run-dir", str(cut)], 11)

    assert main(["train", "seo", "--resume", "latest", "--run-dir", str(cut)]) == 0

    assert "Resumed at step " in capsys.readouterr().out
    one, other = read_weights(whole), read_weights(cut)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["inlet.weight"], torch.zeros_like(one["inlet.weight"]))
