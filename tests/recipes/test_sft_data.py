"""The recipe `sft` before any training: settings, files, masks, the order of rows, answers, checkpoints' seals."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from sft_trainings import make_config, write_rows

from steadygrad.config import Precision
from steadygrad.errors import ConfigError, UsageError
from steadygrad_recipes.mmdit.texts import encode_texts
from steadygrad_recipes.sft import QUICK, Config
from steadygrad_recipes.sft.config import LongPrompts, SftConfig, TinyModel
from steadygrad_recipes.sft.data import Example, count_known, make_examples, parse_row, read_examples, read_file

pytest.importorskip("transformers")
from steadygrad_recipes.sft.checkpoints import find_checkpoint, find_damage, write_seal
from steadygrad_recipes.sft.fine_tune import describe_data
from steadygrad_recipes.sft.metrics import answer, is_right, parse_answer, score, score_commonest
from steadygrad_recipes.sft.model import add_lora, load_folder, make_model, make_tokenizer
from steadygrad_recipes.sft.rows import Encoded, EpochSampler, Padder, encode, encode_all, has_labels

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::steadygrad")]

ROWS = make_examples(60, 99)


# --- settings -------------------------------------------------------------------------------------------------------


def test_what_the_seed_sets_is_the_default() -> None:
    config = SftConfig()
    assert (config.max_grad_norm, config.warmup_steps) == (1.0, 50)
    assert SftConfig(model="some/folder").rate == 2e-4
    assert config.precision is None  # bf16 where there is, else fp16
    assert (config.eval_every, config.save_every) == (1000, 1000)
    assert config.protect
    assert config.safe_loss


def test_the_made_model_starts_from_nothing_and_learns_faster_unless_told() -> None:
    assert SftConfig().rate == 5e-3
    assert SftConfig(learning_rate=1e-4).rate == 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"learning_rate": 0.0},
            r"SftConfig.learning_rate must be a finite number above 0, got 0.0. The default is None",
        ),
        ({"batch_size": 0}, r"SftConfig.batch_size must be a whole number, at least 1, got 0"),
        ({"keep_last": 1}, r"SftConfig.keep_last must be a whole number, at least 2, got 1"),
        ({"lora_dropout": 1.0}, r"SftConfig.lora_dropout must be at least 0 and below 1, got 1.0"),
        ({"long_prompts": "drop"}, r"SftConfig.long_prompts: must be one of cut_start, cut_end, got 'drop'"),
        ({"precision": "fp8"}, r"SftConfig.precision: must be one of bf16, fp16, fp32, got 'fp8'"),
        ({"lora_targets": "q_proj"}, r"SftConfig.lora_targets must be a tuple of names, got 'q_proj'"),
        ({"protect": "no"}, r"SftConfig.protect must be True or False, got 'no'"),
        ({"lora_rank": 0, "base_precision": "fp16"}, r"base_precision is fp16 .*lora_rank=0.* Use fp32, or LoRA"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_with_what_to_write(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SftConfig(**changes)


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TinyModel.width must be a multiple of twice num_heads, got 36"):
        TinyModel(width=36)


def test_texts_of_a_file_become_settings() -> None:
    config = SftConfig(precision="bf16", long_prompts="cut_end")
    assert (config.precision, config.long_prompts) == (Precision.BF16, LongPrompts.CUT_END)
    assert Config(**QUICK).epochs == QUICK["epochs"]


# --- files ----------------------------------------------------------------------------------------------------------


def test_rows_of_a_file_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert read_file(Path(path)) == ROWS


def test_a_prompt_may_be_messages_and_a_completion_one_message() -> None:
    asked = [{"role": "user", "content": "How?"}]
    row = {"prompt": asked, "completion": [{"role": "assistant", "content": "So."}]}
    assert parse_row(row) == Example(tuple(asked), "So.")


BAD = {
    b"{": "not JSON",
    b"[1]": "a JSON object is needed, found list",
    b'{"prompt": "a"}': "no `completion`; it has prompt",
    b'{"question": "a"}': "no `prompt` and `completion`, `messages`, ",
    b'{"prompt": 3, "completion": "b"}': "the prompt must be text or a list of messages",
    b'{"prompt": "", "completion": "b"}': "the prompt is empty",
    b'{"prompt": "a", "completion": " "}': "the completion is empty: there is nothing to learn",
    b'{"prompt": "a", "completion": ["x"]}': "the completion must be text or a list of one message, found a list of 1",
    b'{"prompt": "\xff", "completion": "b"}': "not UTF-8 text",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_named_with_its_line_and_its_reason(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as told:
        read_file(path)
    assert f"1 of 2 rows cannot be used:\n  {path}:3: {BAD[line]}" in str(told.value)
    assert "skip_bad_rows=True" in str(told.value)


def test_bad_rows_are_left_out_only_when_asked_and_each_is_kept_account_of(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ROWS[:20])
    with path.open("a") as file:
        file.write("".join(f"{line.decode('latin-1')}\n" for line in list(BAD)[:7]))
    with pytest.raises(ConfigError, match=r"7 of 27 rows cannot be used(.|\n)*and 2 more"):
        read_examples(str(path), None)
    examples = read_examples(str(path), None, skip_bad_rows=True)
    assert len(examples.training) + len(examples.validation) == 20
    assert [reason.split(":")[1] for reason in examples.left_out] == [str(n) for n in range(21, 28)]


@pytest.mark.parametrize(("name", "words"), [("gone.jsonl", "does not exist"), (".", "is not a folder saved by")])
def test_a_file_that_is_none_says_what_to_give(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{words}.* Give a file \(\.jsonl"):
        read_file(tmp_path / name)


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="has no row that can be used"):
        read_file(tmp_path / "empty.jsonl")


def test_rows_are_held_out_and_no_row_is_in_both(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    examples = read_examples(path, None, share=0.25)
    assert len(examples.validation) == 15
    assert sorted(map(str, [*examples.training, *examples.validation])) == sorted(map(str, ROWS))
    assert read_examples(path, None, share=0.25) == examples


def test_rows_with_one_prompt_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    chats = [Example(({"role": "user", "content": row.prompt},), row.completion) for row in ROWS[:20]]
    rows = [*ROWS, *ROWS[20:], *chats, *[Example(row.prompt, "other") for row in chats]]
    examples = read_examples(write_rows(tmp_path / "rows.jsonl", rows), None, share=0.2)

    trained, held_out = ({row.question for row in side} for side in (examples.training, examples.validation))
    assert not trained & held_out
    assert len(examples.validation) == pytest.approx(0.2 * len(rows), abs=1)
    assert len(examples.training) + len(examples.validation) == len(rows)
    assert count_known(examples) == 0


def test_where_all_rows_share_a_prompt_equal_rows_stay_on_one_side(tmp_path: Path) -> None:
    rows = [Example("Write a line.", f"line {number // 2}") for number in range(80)]
    examples = read_examples(write_rows(tmp_path / "rows.jsonl", rows), None, share=0.25)

    assert not set(examples.training) & set(examples.validation)
    assert len(examples.validation) == 20
    assert count_known(examples) == 20


def test_where_all_rows_are_the_same_that_is_said(tmp_path: Path) -> None:
    examples = read_examples(write_rows(tmp_path / "rows.jsonl", [Example("a", "b")] * 20), None, share=0.2)

    assert (len(examples.training), len(examples.validation), count_known(examples)) == (16, 4, 4)
    lines = list(describe_data(examples, Encoded([], 0, 0), Encoded([], 0, 0), make_config()))
    assert "4 rows to validate on with a prompt, or a text, that is trained on too: a good score" in lines[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_tokenizing_shows_how_far_it_is_on_a_terminal_only(
    stream: type[io.StringIO], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", "xterm")

    encode_all(tokenizer, ROWS, 40, LongPrompts.CUT_END)
    encode_texts([row.completion for row in ROWS], tokenizer, 4)

    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert shown.count(f"{len(ROWS)}/{len(ROWS)}") >= 2 if stream is Terminal else shown == ""


def test_too_few_rows_to_hold_some_out_is_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS[:3])
    with pytest.raises(ConfigError, match=r"3 rows in .* a share of 0.1 is held out.*Give more rows"):
        read_examples(path, None)


def test_the_made_questions_are_right_and_no_two_alike() -> None:
    rows = make_examples(900, 99)
    assert len(set(rows)) == 900
    assert Example("How many cm are in 3 m?", "<answer>300</answer>") in make_examples(990, 99)
    with pytest.raises(ConfigError, match="num_synthetic is 991, and there are 990 questions"):
        make_examples(991, 99)


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(ROWS, 384)


def test_exactly_the_prompt_is_masked(tokenizer: Any) -> None:
    for example in ROWS[:10]:
        row, cut = encode(tokenizer, example, 256, LongPrompts.CUT_START)
        learned = [token for token, label in zip(row["input_ids"], row["labels"]) if label != -100]
        assert not cut
        assert tokenizer.decode(learned) == example.completion + "<eos>"
        assert tokenizer.decode(row["input_ids"]) == f"{example.prompt}{example.completion}<eos>"
        assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"]))


def test_no_text_is_unknown_to_the_made_tokenizer(tokenizer: Any) -> None:
    text = "Größe: 12 µm — 漢字 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_long_prompt_loses_its_start_and_keeps_every_label(tokenizer: Any) -> None:
    example = Example("Well, " * 60 + ROWS[0].prompt, ROWS[0].completion)
    whole, _ = encode(tokenizer, example, 1000, LongPrompts.CUT_START)
    row, cut = encode(tokenizer, example, 40, LongPrompts.CUT_START)
    assert cut
    assert row["input_ids"] == whole["input_ids"][-40:]
    assert [x for x in row["labels"] if x != -100] == [x for x in whole["labels"] if x != -100]


def test_cut_at_its_end_it_has_no_label_at_all_and_that_is_counted(tokenizer: Any) -> None:
    long = Example("Well, " * 60 + ROWS[0].prompt, ROWS[0].completion)
    encoded = encode_all(tokenizer, [long, ROWS[1]], 40, LongPrompts.CUT_END)
    assert (encoded.num_cut, encoded.num_unlabelled) == (1, 1)
    assert [has_labels(row) for row in encoded.rows] == [False, True]
    assert encoded.drop_unlabelled() == [encoded.rows[1]]


def test_a_completion_longer_than_all_keeps_its_beginning(tokenizer: Any) -> None:
    row, _ = encode(tokenizer, Example("Say it.", "well " * 90), 16, LongPrompts.CUT_START)
    assert len(row["input_ids"]) == 16
    assert [label != -100 for label in row["labels"]] == [False, *[True] * 15]


def test_padding_is_neither_attended_to_nor_learned(tokenizer: Any) -> None:
    batch = Padder(tokenizer.pad_token_id)(
        [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, tokenizer.pad_token_id]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, 9, -100]]


def test_messages_need_a_chat_template(tokenizer: Any) -> None:
    example = Example(({"role": "user", "content": "How?"},), "So.")
    with pytest.raises(ConfigError, match=r"has no chat template. Give prompts as text"):
        encode(tokenizer, example, 64, LongPrompts.CUT_START)
    tokenizer = make_tokenizer(ROWS, 384)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant] "
    row, _ = encode(tokenizer, example, 64, LongPrompts.CUT_START)
    assert tokenizer.decode(row["input_ids"]) == "[user] How? [assistant] So.<eos>"


# --- the order of the rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [None, 8])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(group_size: int | None) -> None:
    lengths = [10 + (7 * i) % 23 for i in range(101)]
    epoch = 0
    sampler = EpochSampler(lengths, 3, group_size, find_epoch=lambda: epoch)
    orders = [list(sampler)]
    epoch = 1
    orders.append(list(sampler))
    epoch = 0
    orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert all(sorted(order) == list(range(101)) for order in orders)


def test_grouped_rows_need_less_padding() -> None:
    lengths = [10 + (7 * i) % 23 for i in range(128)]

    def padding(group_size: int | None) -> int:
        order = list(EpochSampler(lengths, 0, group_size, find_epoch=lambda: 0))
        batches = [[lengths[i] for i in order[start : start + 8]] for start in range(0, 128, 8)]
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    assert padding(8) < 0.2 * padding(None)


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "marked", "expected"),
    [
        ("so <answer>300</answer> cm", True, "300"),
        ("<answer>300", True, None),
        ("300", True, None),
        ("<answer> </answer>", True, None),
        (" Paris \n", False, "Paris"),
        ("  ", False, None),
    ],
)
def test_an_answer_is_what_stands_between_the_marks(text: str, marked: bool, expected: str | None) -> None:
    assert parse_answer(text, marked=marked) == expected


def test_numbers_are_right_within_the_tolerance_and_text_when_alike() -> None:
    assert is_right("104.9", "100")
    assert not is_right("105.1", "100")
    assert not is_right("nan", "100")
    assert not is_right(None, "100")
    assert is_right("paris", "Paris")
    assert not is_right("Rome", "Paris")


def test_scores_count_right_answers_and_answers() -> None:
    examples = [Example("a", "<answer>1</answer>"), Example("b", "<answer>2</answer>"), Example("c", "Paris")]
    scores = score(["<answer>1</answer>", "no idea", "Rome"], examples)
    assert (scores.accuracy, scores.answer_rate, scores.num_prompts) == (1 / 3, 2 / 3, 3)
    assert str(scores) == "accuracy=0.333, answer_rate=0.667"
    assert score_commonest([examples[0], *examples[:2]], examples).accuracy == 1 / 3


# --- models ---------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SftConfig.model: .*gone is not a folder. Give the folder of a model"):
        load_folder(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"has no config.json"):
        load_folder(tmp_path)


def test_a_pickled_model_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    import torch

    model = make_model(TinyModel(width=16, num_heads=2), tokenizer, 32, 0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"cannot be read as a causal language model.*as safetensors"):
        load_folder(tmp_path)


def test_only_lora_matrices_are_trained_and_a_wrong_target_is_told(tokenizer: Any) -> None:
    model = make_model(TinyModel(width=16, num_heads=2), tokenizer, 32, 0)
    with pytest.raises(ConfigError, match=r"SftConfig.lora_targets: \('c_attn',\) does not fit LlamaForCausalLM"):
        add_lora(model, SftConfig(lora_targets=("c_attn",)))
    with_lora = add_lora(model, SftConfig(model="given", lora_targets=("q_proj",), lora_rank=2))
    trained = [name for name, p in with_lora.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all("lora_" in name and "q_proj" in name for name in trained)


def test_answering_leaves_every_part_in_its_mode(tokenizer: Any) -> None:
    model = make_model(TinyModel(width=16, num_heads=2), tokenizer, 32, 0)
    model.train()
    list(model.children())[-1].eval()
    before = [part.training for part in model.modules()]
    answer(model, tokenizer, ROWS[:2], max_new_tokens=1)
    assert [part.training for part in model.modules()] == before


# --- seals ----------------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "optimizer.pt").write_bytes(b"moments" * 100)
    write_seal(path)
    return path


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_told(tmp_path: Path) -> None:
    first, second, third, fourth = (make_checkpoint(tmp_path, step) for step in (9, 10, 100, 1000))
    (fourth / "seal.json").unlink()
    (third / "optimizer.pt").write_bytes(b"moment?" * 100)
    (second / "optimizer.pt").unlink()
    told: list[str] = []

    assert find_checkpoint(tmp_path, told.append) == first
    assert [line.rpartition(": ")[2] for line in told] == [
        "it was never finished.",
        "optimizer.pt is damaged.",
        "optimizer.pt is missing.",
    ]
    assert find_damage(first) is None
    assert find_checkpoint(first, told.append) == first


@pytest.mark.parametrize("content", ["[]", "1", "null", '{"optimizer.pt": 7}', '{"optimizer.pt": [7]}', "{", "\udcff"])
def test_a_seal_that_is_no_list_of_files_is_damaged(tmp_path: Path, content: str) -> None:
    checkpoint = make_checkpoint(tmp_path, 1)
    (checkpoint / "seal.json").write_text(content, errors="surrogateescape")
    assert find_damage(checkpoint) == "its seal.json is damaged"


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no whole checkpoint in .* \(0 looked at\). Give the run directory"):
        find_checkpoint(tmp_path, print)
