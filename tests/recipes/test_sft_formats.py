"""Rows in the formats people have, written by the libraries that write them, and what is said about bad ones."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from steadygrad.cli import main
from steadygrad.errors import ConfigError, UsageError
from steadygrad_recipes.sft import read_prompts
from steadygrad_recipes.sft.config import LongPrompts, SftConfig, TinyModel
from steadygrad_recipes.sft.data import Example, Examples, parse_row, read_file
from steadygrad_recipes.sft.fine_tune import drop_refused
from steadygrad_recipes.sft.metrics import load_checker, score
from steadygrad_recipes.sft.model import load_folder, make_model, make_tokenizer
from steadygrad_recipes.sft.rows import encode_all

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
        ("a.parquet", "no parquet", r"a\.parquet cannot be read as a parquet file"),
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


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError(3)", r"check, .* raised KeyError: 3 at .*mine\.py:2\."),
        ("return None", "returned None"),
        ("return 7", "returned 7"),
    ],
)
def test_a_checker_that_fails_is_found_before_the_training(
    tmp_path: Path, body: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"def check(answer, completion):\n    {body}\n")
    with pytest.raises(UsageError, match=words):
        score(["a"], [Example("?", "three")], checker=load_checker(f"{tmp_path / 'mine.py'}:check"))

    run = ["--run-dir", str(tmp_path / "run"), "--checker", f"{tmp_path / 'mine.py'}:check"]
    assert main(["train", "sft", "--quick", *run]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "run").exists()


def test_a_checker_may_give_parts(tmp_path: Path) -> None:
    examples = [Example("?", "three"), Example("?", "four")]
    assert score(["a", "b"], examples, checker=lambda answer, _: 0.5 if answer == "a" else True).accuracy == 0.75


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "How many?"}, "How many?"),
        ({"question": "How many?"}, "How many?"),
        ({"instruction": "Count.", "input": "a b"}, "Count.\n\na b"),
        ({"messages": CHAT}, (CHAT[0],)),
        ({"messages": [CHAT[0]]}, (CHAT[0],)),
    ],
)
def test_prompts_need_no_completion(tmp_path: Path, row: dict[str, Any], prompt: Any) -> None:
    (tmp_path / "asked.jsonl").write_text(json.dumps(row) + "\n")

    assert [example.prompt for example in read_prompts(tmp_path / "asked.jsonl")] == [prompt]


def test_a_comma_outside_quotes_is_an_error_not_a_shorter_answer(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,completion\nhi,"a, b"\nho,c, d\n')

    with pytest.raises(ConfigError, match=r"rows\.csv:3: more cells than the header's 2: ' d'"):
        read_file(tmp_path / "rows.csv")


def test_a_spreadsheet_is_not_read_as_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK\x03\x04\x00\x00")

    with pytest.raises(UsageError, match=r"rows\.xlsx is not text in UTF-8"):
        read_file(tmp_path / "rows.xlsx")


def test_4_bits_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="load_in_4bit must be false without model"):
        SftConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="merge must be false with load_in_4bit"):
        SftConfig(load_in_4bit=True, model="base", merge=True)


def test_rows_left_out_are_listed_and_rows_without_a_prompt_are_not_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": f"word {i}"}) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"text": ""}', "broken"]) + "\n")
    small = ["--tiny.width", "16", "--tiny.num-layers", "1", "--epochs", "1", "--skip-bad-rows"]

    assert (
        main(["train", "sft", *small, "--data", str(tmp_path / "rows.jsonl"), "--run-dir", str(tmp_path / "run")]) == 0
    )

    listed = (tmp_path / "run" / "left_out.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{tmp_path / 'rows.jsonl'}:{i}" for i in (21, 22)]
    said = capsys.readouterr().out
    assert "No held-out row has a prompt, so no answer was scored." in said
    assert "accuracy" not in said


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None, "completion": "a"}, "the prompt is empty"),
        ({"instruction": None, "input": "", "output": "a"}, "the prompt is empty"),
        ({"instruction": "q", "input": ["a"], "output": "a"}, "instruction and input must be text, found list"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{}]}]}, "calls tools, which cannot be learned here"),
        ({"messages": [CHAT[0], {"text": "three"}]}, "a message needs `role` and `content`"),
    ],
)
def test_a_row_without_an_answer_to_a_prompt_is_named(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_row(row)


def test_messages_may_be_named_either_way_and_keep_what_else_they_have() -> None:
    given = [{"from": "human", "value": "?"}, {"role": "tool", "content": "3", "name": "count", "id": None}]
    row = {"messages": [*given, {"from": "gpt", "value": "three"}]}

    wanted = ({"role": "user", "content": "?"}, {"role": "tool", "content": "3", "name": "count"})
    assert parse_row(row) == Example(wanted, "three")
    assert parse_row({"conversations": CHAT}) == Example((CHAT[0],), "three")


def test_without_a_part_called_train_none_is_chosen(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(PAIRS)
    datasets.DatasetDict({"test": made, "validation": made}).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.json").write_text(json.dumps({"test": PAIRS, "validation": PAIRS}))

    for name in ("saved", "a.json"):
        with pytest.raises(ConfigError, match="has the parts test, validation, and none is called train"):
            read_file(tmp_path / name)
    (tmp_path / "a.json").write_text(json.dumps({"test": PAIRS[:1], "train": PAIRS, "tags": ["x"]}))
    assert read_file(tmp_path / "a.json") == WANTED


def test_a_damaged_folder_of_datasets_is_named_with_its_row(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(PAIRS * 900).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + b"\xff" * 200 + content[middle + 200 :])

    with pytest.raises(ConfigError, match=r"saved: row \d+ cannot be read: .* The file is damaged"):
        read_file(tmp_path / "saved", [])


def test_a_truncated_arrow_file_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(PAIRS * 5)
    made.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict({"test": made, "train": made}).save_to_disk(tmp_path / "parts")
    for file in (tmp_path / "saved" / "data-00001-of-00002.arrow", *(tmp_path / "parts" / "train").glob("*.arrow")):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        folder = file.parent if file.parent.name == "saved" else file.parent.parent

        with pytest.raises(ConfigError, match=rf"^{re.escape(str(file))} cannot be read: .* The file is damaged"):
            read_file(folder)


def test_a_saved_folder_without_rows_says_so_and_only_the_part_that_is_used_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    empty, made = datasets.Dataset.from_dict({"prompt": [], "completion": []}), datasets.Dataset.from_list(PAIRS)
    empty.save_to_disk(tmp_path / "empty")
    datasets.DatasetDict({"train": empty, "test": made}).save_to_disk(tmp_path / "empty_part")
    datasets.DatasetDict({"train": made, "test": empty}).save_to_disk(tmp_path / "other_part")

    for name in ("empty", "empty_part"):
        with pytest.raises(ConfigError, match=f"{name} has no row"):
            read_file(tmp_path / name)
    assert read_file(tmp_path / "other_part") == WANTED


def test_if_no_row_can_be_used_the_first_faults_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Question,Answer\n?,three\n")

    with pytest.raises(ConfigError, match=r"has no row that can be used: .*a\.csv:2: no .*it has Question, Answer"):
        read_file(tmp_path / "a.csv", [])


def test_a_quote_that_is_not_closed_takes_no_other_rows_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\na?,b\nc?,"d\ne?,f\n')

    with pytest.raises(ConfigError, match=r"a\.csv:3: unexpected end of data, in lines 3 to 4"):
        read_file(tmp_path / "a.csv")


def test_prompts_are_read_from_the_same_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(PAIRS).save_to_disk(tmp_path / "saved")
    (tmp_path / "A.JSONL").write_text('{"prompt": "a?"}\n{"prompt": "d?"}\n')
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa?\r\n\r\nd?\r\n")

    for name in ("saved", "A.JSONL", "a.txt"):
        assert [example.prompt for example in read_prompts(tmp_path / name)] == ["a?", "d?"]
    (tmp_path / "a.txt").write_bytes(b"a?\n\xfc?\n")
    with pytest.raises(ConfigError, match=r"a\.txt:2: not UTF-8 text"):
        read_prompts(tmp_path / "a.txt")


def test_a_merged_model_computes_what_model_and_lora_compute(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from steadygrad_recipes.sft.model import load_trained

    small = ["--tiny.width", "16", "--tiny.num-layers", "1", "--num-synthetic", "40", "--max-steps", "3"]
    run = ["--learning-rate", "0.1", "--num-answers", "1", "--use-cpu", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "sft", *small, *run, "--merge"]) == 0
    tokens = torch.arange(12)[None]

    with_lora, _ = load_trained(tmp_path / "run" / "model", SftConfig(), tmp_path / "run")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged")

    wanted = with_lora.eval()(input_ids=tokens).logits
    found = merged.eval()(input_ids=tokens).logits
    # One matrix is rounded once, its two parts are multiplied one after the other
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (base.eval()(input_ids=tokens).logits - wanted).abs().max() > 0.1
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "merged").eos_token


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": 5, "content": "x"}, CHAT[1]], "the role of a message is int, not text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}, CHAT[1]],
         "the content of message 1, of user, is list, not text"),
        ([CHAT[0], {"role": "assistant", "content": None}], "the content of message 2, of assistant, is NoneType, not"),
    ],
)  # fmt: skip
def test_a_message_that_is_no_text_is_named_by_its_number(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_row({"messages": messages})
    if "message 2" not in reason:  # else the answer, which a prompt does not need
        with pytest.raises(ValueError, match=reason):
            parse_row({"messages": messages}, needs_completion=False)


@pytest.mark.parametrize(("name", "place"), [("a.jsonl", ":2"), ("a.json", ": row 2")])
def test_half_of_a_character_is_named_before_a_tokenizer_meets_it(tmp_path: Path, name: str, place: str) -> None:
    rows = [json.dumps(row) for row in (PAIRS[0], {"prompt": "a \ud83d", "completion": "b"}, PAIRS[1])]
    text = "\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]"
    (tmp_path / name).write_text(text)
    left_out: list[str] = []

    assert read_file(tmp_path / name, left_out) == WANTED
    reason = r"not Unicode text: \ud83d is half of a character, and the other half is missing"
    assert left_out == [f"{tmp_path / name}{place}: {reason}"]


def test_text_of_parquet_that_is_not_utf_8_is_named_by_its_row(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ends = pyarrow.array([0, 1, 3], pyarrow.int32()).buffers()[1]
    broken = pyarrow.StringArray.from_buffers(2, ends, pyarrow.py_buffer(b"a\xff\xfe"))
    parquet.write_table(pyarrow.table({"prompt": broken, "completion": ["x", "y"]}), tmp_path / "a.parquet")

    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read .*Column 0: .*UTF8 sequence at string index 1"):
        read_file(tmp_path / "a.parquet")


TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}
{% endif %}{{ m.role }}: {{ m.content }}{% endfor %}"""


@pytest.mark.parametrize("skip_bad_rows", [False, True])
def test_rows_that_the_chat_template_refuses_are_named_or_left_out(tmp_path: Path, skip_bad_rows: bool) -> None:
    system = {"role": "system", "content": "Be brief."}
    chats = [CHAT, [system, *CHAT], CHAT]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    rows = read_file(tmp_path / "a.jsonl")
    tokenizer = make_tokenizer(rows, 300)
    tokenizer.chat_template = TEMPLATE
    encoded, held_out = (encode_all(tokenizer, part, 64, LongPrompts.CUT_START) for part in (rows, rows[:1]))
    config = SftConfig(skip_bad_rows=skip_bad_rows)
    reason = "the model's chat template refuses it (TemplateError: System role not supported)"

    if not skip_bad_rows:
        with pytest.raises(
            ConfigError, match=re.escape(f"1 of 4 rows cannot be used:\n  {tmp_path}/a.jsonl:2: {reason}")
        ):
            drop_refused(Examples(rows, rows[:1]), encoded, held_out, config, tmp_path)
        return
    kept = drop_refused(Examples(rows, rows[:1], ("other",)), encoded, held_out, config, tmp_path)
    assert kept == Examples([rows[0], rows[2]], rows[:1], ("other", f"{tmp_path}/a.jsonl:2: {reason}"))
    assert len(encoded.rows) == 2
    assert (tmp_path / "left_out.txt").read_text() == f"other\n{tmp_path}/a.jsonl:2: {reason}\n"


def test_damaged_weights_of_a_folder_are_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(WANTED, 300)
    make_model(TinyModel(), tokenizer, 64, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(ConfigError, match=r"cannot be read as a causal language model .*not fully covered\. Save both"):
        load_folder(tmp_path)
