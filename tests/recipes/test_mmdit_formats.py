"""mmdit on .npy arrays and on texts with a tokenizer, sampling from a text or from latents, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from steadygrad.cli import main
from steadygrad.errors import UsageError
from steadygrad_recipes.mmdit.config import DataConfig, MMDiTConfig, ModelConfig, SamplingConfig
from steadygrad_recipes.mmdit.data import Rows, measure_rows, read_corpus
from steadygrad_recipes.mmdit.model import MMDiT, Shapes
from steadygrad_recipes.mmdit.program import read_given
from steadygrad_recipes.mmdit.texts import MappedRows

TEXTS = ["a red circle", "a blue square", "a red square with a circle", "blue"] * 5


def write_tokenizer(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<pad>", "<unk>"])
    made.train_from_iterator(TEXTS, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    return folder


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    rows = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    latents = np.random.default_rng(0).standard_normal((len(TEXTS), 2, 4)).astype(np.float32)
    np.save(folder / "a.npy", latents)
    return folder


def write_pair(folder: Path, name: str, num: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    np.save(folder / f"{name}_tokens.npy", generator.integers(0, 9, (num, 5)))
    latents = generator.standard_normal((num, 3, 4)).astype(np.float32)
    np.save(folder / f"{name}_latents.npy", latents)
    return latents


def read_latents(rows: Rows) -> np.ndarray:
    return np.stack([rows[index]["latents"].numpy() for index in range(len(rows))])


@pytest.mark.parametrize("names", ["a", "ab"], ids=["one file", "two files"])
def test_npy_arrays_stay_on_the_disk(tmp_path: Path, names: str) -> None:
    latents = np.concatenate([write_pair(tmp_path, name, 10, seed) for seed, name in enumerate(names)])

    corpus = read_corpus(DataConfig(path=str(tmp_path)))

    assert corpus.train.latents.shape == (9 * len(names), 3, 4)
    assert np.array_equal(np.concatenate([read_latents(corpus.train), read_latents(corpus.val)]), latents)
    written = np.load(tmp_path / f"{names[-1]}_latents.npy", mmap_mode="r+")
    written[0] = 7.0  # what changes on the disk is seen: nothing was copied
    written.flush()
    assert bool((corpus.train[10 * len(names) - 10]["latents"] == 7.0).all())


def test_bad_rows_of_mapped_files_are_left_out_without_reading_the_others(tmp_path: Path) -> None:
    latents = np.concatenate([write_pair(tmp_path, name, 10, seed) for seed, name in enumerate("ab")])
    written = np.load(tmp_path / "b_latents.npy", mmap_mode="r+")
    written[3, 1, 2] = np.nan
    written.flush()

    corpus = read_corpus(DataConfig(path=str(tmp_path), skip_bad_rows=True))

    assert corpus.left_out == ("b_latents.npy row 3: a latent that is NaN or Inf",)
    good = np.delete(latents, 13, axis=0)
    assert np.array_equal(np.concatenate([read_latents(corpus.train), read_latents(corpus.val)]), good)
    assert isinstance(corpus.train.latents, MappedRows)


def test_rows_are_measured_block_by_block_like_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate("ab"):
        write_pair(tmp_path, name, 10, seed)
    rows = read_corpus(DataConfig(path=str(tmp_path))).train
    monkeypatch.setattr("steadygrad_recipes.mmdit.data.BLOCK", 4)  # 18 rows: the last block is short

    found = measure_rows(rows)

    flat = torch.from_numpy(read_latents(rows)).double().flatten(0, 1)
    scaled = (flat - flat.mean(0)) / flat.std(0, correction=0)
    torch.testing.assert_close(found["latent_mean"].double(), flat.mean(0), rtol=1e-6, atol=1e-7)  # stored as float32
    torch.testing.assert_close(found["latent_std"].double(), flat.std(0, correction=0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found["latent_norm"].double(), scaled.norm(dim=-1).mean(), rtol=1e-6, atol=1e-7)


def test_texts_with_a_tokenizer_train_and_sample_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, folder = write_tokenizer(tmp_path / "tokenizer"), write_texts(tmp_path / "data")
    run = ["--run-dir", str(tmp_path / "run")]
    flags = ["--data.path", str(folder), "--data.tokenizer", str(tokenizer), "--training.max-steps", "2"]
    assert main(["train", "mmdit", "--quick", *flags, *run]) == 0
    capsys.readouterr()

    assert main(["train", "mmdit", "--sample", "--text", "a red circle", "--num-samples", "2", *run]) == 0
    assert "a red circle" in capsys.readouterr().out
    assert main(["train", "mmdit", "--sample", "--sampling.latents", str(folder / "a.npy"), *run]) == 0
    assert f"{len(TEXTS)} samples are in" in capsys.readouterr().out
    assert main(["train", "mmdit", "--sample", "--text", "a purple zebra", *run]) == 2
    assert "sampling.text: 'a purple zebra' has words that the tokenizer does not know" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (np.full((3, 4, 16), np.nan, np.float32), r"given\.npy: row 0 is NaN or Inf"),
        (np.zeros((0, 4, 16), np.float32), r"given\.npy: there is no row"),
        (np.zeros((3, 4, 15), np.float32), r"given\.npy has \[3, 4, 15\], and the model wants \[N, 4, 16\]"),
        (None, r"there is no file .*given\.npy"),
    ],
)
def test_latents_that_no_text_can_be_sampled_for_are_named(
    tmp_path: Path, latents: np.ndarray | None, message: str
) -> None:
    if latents is not None:
        np.save(tmp_path / "given.npy", latents)
    model = MMDiT(ModelConfig(hidden_size=8, num_layers=1, num_heads=2), Shapes(9, 5, 4, 16))
    config = MMDiTConfig(sampling=SamplingConfig(latents=str(tmp_path / "given.npy")))

    with pytest.raises(UsageError, match=message):
        read_given(model, config, None)


def test_samples_of_a_tokenizer_of_word_parts_are_texts(tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="a").save_pretrained(tmp_path / "words")
    folder, run = write_texts(tmp_path / "data"), tmp_path / "run"
    flags = ["--data.path", str(folder), "--data.tokenizer", str(tmp_path / "words"), "--training.max-steps", "1"]
    assert main(["train", "mmdit", "--quick", *flags, "--run-dir", str(run)]) == 0

    given = ["--text", "blue red circle", "--num-samples", "1"]
    assert main(["train", "mmdit", "--sample", *given, "--run-dir", str(run)]) == 0

    assert (run / "samples" / "samples.txt").read_text() == "blue red circle\n"


def test_a_word_that_the_model_does_not_know_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--run-dir", str(tmp_path / "run")]
    assert main(["train", "mmdit", "--quick", "--training.max-steps", "1", *run]) == 0

    assert main(["train", "mmdit", "--sample", "--text", "a small red circle", *run]) == 0
    assert main(["train", "mmdit", "--sample", "--text", "a purple circle", *run]) == 2
    assert "sampling.text: purple is not in the vocabulary" in capsys.readouterr().err


def test_what_cannot_be_read_is_named_with_file_and_row(tmp_path: Path) -> None:
    folder, tokenizer = write_texts(tmp_path / "data"), str(write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(UsageError, match=r"a\.jsonl holds texts, and there is no tokenizer"):
        read_corpus(DataConfig(path=str(folder)))
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"words": 3}\n')
    np.save(folder / "a.npy", np.concatenate([np.load(folder / "a.npy"), np.ones((1, 2, 4), np.float32)]))
    with pytest.raises(UsageError, match=r"1 of 21 rows in .*cannot be learned from: a\.jsonl line 21: no text"):
        read_corpus(DataConfig(path=str(folder), tokenizer=tokenizer))
    (folder / "a.npy").unlink()
    with pytest.raises(UsageError, match=r"has no a\.npy beside it"):
        read_corpus(DataConfig(path=str(folder), tokenizer=tokenizer))
    (folder / "a.jsonl").unlink()
    np.save(folder / "b_latents.npy", np.array([{"code": 1}], dtype=object), allow_pickle=True)
    (folder / "b_tokens.npy").write_bytes(b"no array")
    with pytest.raises(UsageError, match=r"b_tokens\.npy is not an \.npy file of plain numbers"):
        read_corpus(DataConfig(path=str(folder)))


def test_bad_lines_of_texts_are_all_named_or_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write_texts(folder)
    lines = (folder / "a.jsonl").read_text().splitlines()
    lines[3], lines[5], lines[7] = '{"text": " "}', "broken", '{"txt": "a red circle"}'
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    config = DataConfig(path=str(folder), tokenizer=str(write_tokenizer(tmp_path / "words")))

    with pytest.raises(UsageError, match=r"a\.jsonl line 4: no text; a\.jsonl line 6: not JSON"):
        read_corpus(config)

    corpus = read_corpus(dataclasses.replace(config, skip_bad_rows=True))
    assert corpus.left_out == (
        "a.jsonl line 4: no text",
        "a.jsonl line 6: not JSON (Expecting value at column 1)",
        "a.jsonl line 8: no text",
    )
    assert len(corpus.train) + len(corpus.val) == len(lines) - 3


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write_texts(folder)
    tokenizer = str(write_tokenizer(tmp_path / "words"))

    corpus = read_corpus(DataConfig(path=str(folder), tokenizer=tokenizer, max_text=2))

    assert any("are cut at 2 tokens: data.max_text" in note for note in corpus.notes)


def test_a_line_is_named_by_its_number_with_blank_lines_between(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "corpus")
    lines = (folder / "a.jsonl").read_text().splitlines()
    lines[3] = '{"text": 3}'
    (folder / "a.jsonl").write_text("\n\n".join(lines) + "\n")

    with pytest.raises(UsageError, match=r"a\.jsonl line 7: no text"):
        read_corpus(DataConfig(path=str(folder), tokenizer=str(write_tokenizer(tmp_path / "words"))))


def test_texts_of_train_and_val_get_one_length(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("train", "val"):
        write_texts(folder / name)
    (folder / "val" / "a.jsonl").write_text('{"text": "blue"}\n' * len(TEXTS))

    corpus = read_corpus(DataConfig(path=str(folder), tokenizer=str(write_tokenizer(tmp_path / "words"))))

    assert corpus.train.tokens.shape == corpus.val.tokens.shape
    assert bool((corpus.val.mask.sum(1) == 1).all())


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int32"])
def test_ids_of_any_whole_type_are_read(tmp_path: Path, dtype: str) -> None:
    write_pair(tmp_path, "a", 10, 0)
    tokens = np.load(tmp_path / "a_tokens.npy")
    np.save(tmp_path / "a_tokens.npy", tokens.astype(dtype))

    corpus = read_corpus(DataConfig(path=str(tmp_path)))

    assert corpus.vocab_size == tokens.max() + 1
    assert torch.equal(corpus.train[4]["tokens"], torch.tensor(tokens[4]))


def test_numbers_that_are_no_ids_are_refused_before_a_table_of_them_is_made(tmp_path: Path) -> None:
    write_pair(tmp_path, "a", 10, 0)
    np.save(tmp_path / "a_tokens.npy", np.full((10, 5), 10**12))

    with pytest.raises(UsageError, match=r"a_latents\.npy has the token 1000000000000: is that an id\?"):
        read_corpus(DataConfig(path=str(tmp_path)))


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    write_pair(tmp_path, "a", 10, 0)
    np.save(tmp_path / "b.npy", np.ones((3, 3)))
    (tmp_path / "more").mkdir()

    assert read_corpus(DataConfig(path=str(tmp_path))).notes == (f"not read, in {tmp_path}: b.npy, more",)


def test_latents_of_several_safetensors_stay_on_the_disk(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    for name in "ab":
        save_file(
            {"tokens": torch.ones(10, 3, dtype=torch.int32), "latents": torch.rand(10, 2, 4)},
            tmp_path / f"{name}.safetensors",
        )

    corpus = read_corpus(DataConfig(path=str(tmp_path)))

    assert isinstance(corpus.train.latents, MappedRows)
    content = (tmp_path / "b.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")  # behind the header
    with (tmp_path / "b.safetensors").open("r+b") as file:
        file.seek(begin)
        file.write(np.full((len(content) - begin) // 4, 7.0, np.float32).tobytes())
    assert bool((corpus.train[17]["latents"] == 7.0).all())  # what changes on the disk is seen: nothing was copied


def test_texts_beside_a_single_number_are_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "data")
    np.save(folder / "a.npy", np.float32(3))

    with pytest.raises(UsageError, match=r"a\.npy has the shape \[\]\. Write latents"):
        read_corpus(DataConfig(path=str(folder), tokenizer=str(write_tokenizer(tmp_path / "words"))))


def test_half_of_a_character_is_named_before_a_tokenizer_meets_it(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "data")
    lines = (folder / "a.jsonl").read_text().splitlines()
    lines[3] = r'{"text": "a \ud83d circle"}'
    (folder / "a.jsonl").write_text("\n".join(lines))
    words = str(write_tokenizer(tmp_path / "words"))

    corpus = read_corpus(DataConfig(path=str(folder), tokenizer=words, skip_bad_rows=True))

    reason = r"not Unicode text: \ud83d is half of a character, and the other half is missing"
    assert corpus.left_out == (f"a.jsonl line 4: {reason}",)
