"""Rows in the formats people have, written by the libraries that write them, and what is said about bad ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from steadygrad.errors import ConfigError
from steadygrad_recipes.sft import read_prompts
from steadygrad_recipes.sft.data import Example, parse_row, read_file
from steadygrad_recipes.sft.metrics import load_checker, score

CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "three"}]
KINDS: dict[str, tuple[dict[str, Any], Example]] = {
    "messages": ({"messages": CHAT}, Example((CHAT[0],), "three")),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "three"}]},
        Example((CHAT[0],), "three"),
    ),
    "alpaca": ({"instruction": "Count.", "input": "a b c", "output": "three"}, Example("Count.\n\na b c", "three")),
    "alpaca without input": ({"instruction": "Count.", "input": "", "output": "3"}, Example("Count.", "3")),
    "question": ({"question": "How many?", "answer": "three"}, Example("How many?", "three")),
    "text": ({"text": "Once upon a time."}, Example("", "Once upon a time.")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_may_name_its_parts_as_people_do(kind: str) -> None:
    row, wanted = KINDS[kind]

    assert parse_row(row) == wanted


PAIRS = [{"prompt": "a?", "completion": "b, c"}, {"prompt": "d?", "completion": "é"}]
WANTED = [Example("a?", "b, c"), Example("d?", "é")]


def test_a_json_array_and_one_inside_an_object(tmp_path: Path) -> None:
    for name, content in (("list", PAIRS), ("inside", {"version": 1, "data": PAIRS})):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        assert read_file(path) == WANTED


@pytest.mark.parametrize("kind", ["messages", "sharegpt", "question"])
def test_a_json_object_that_is_one_row(tmp_path: Path, kind: str) -> None:
    row, wanted = KINDS[kind]
    path = tmp_path / "row.json"
    path.write_text(json.dumps({"id": 1, **row}))
    assert read_file(path) == [wanted]
    path.write_text(json.dumps({"conversations": [row, row]}))
    assert read_file(path) == [wanted, wanted]


def test_csv_and_tsv(tmp_path: Path) -> None:
    for ending, delimiter in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / f"rows.{ending}"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(PAIRS)
        assert read_file(path) == WANTED
    assert [example.prompt for example in read_prompts(path)] == ["a?", "d?"]


def test_parquet_and_a_folder_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(PAIRS)
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": made.select([0]), "train": made}).save_to_disk(tmp_path / "splits")

    for name in ("rows.parquet", "saved", "splits"):
        assert read_file(tmp_path / name) == WANTED


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[1, 2]", r"a\.json: row 1: a JSON object is needed, found int"),
        ("a.json", "{", r"a\.json is not JSON"),
        ("a.csv", "x,y\n1,2\n", r"a\.csv:2: no `prompt` and `completion`.*it has x, y"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "?"}]}\n', r"a\.jsonl:1: a chat is a list of two"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]}\n',
            r"a\.jsonl:1: the last message is user's",
        ),
        ("a.parquet", "no parquet", r"a\.parquet is not a parquet file"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_row(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=message):
        read_file(tmp_path / name)


def test_a_folder_that_datasets_did_not_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder saved by datasets"):
        read_file(tmp_path)


def test_a_checker_of_ones_own_decides_what_is_right(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def check(answer, completion):\n    return answer.strip().lower() == completion.lower()\n")
    checker = load_checker(f"{file}:check")

    assert score([" THREE "], [Example("?", "three")], checker=checker).accuracy == 1.0
    with pytest.raises(ConfigError, match="other"):
        load_checker(f"{file}:other")
