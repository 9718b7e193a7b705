"""mmdit on .npy arrays and on texts with a tokenizer, sampling from a text or from latents, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from steadygrad.cli import main
from steadygrad.errors import UsageError
from steadygrad_recipes.mmdit.config import DataConfig
from steadygrad_recipes.mmdit.data import read_corpus

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


def test_npy_arrays_are_memory_mapped(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    np.save(tmp_path / "a_tokens.npy", generator.integers(0, 9, (10, 5)))
    np.save(tmp_path / "a_latents.npy", generator.standard_normal((10, 3, 4)).astype(np.float32))

    corpus = read_corpus(DataConfig(path=str(tmp_path)))

    assert corpus.train.latents.shape == (9, 3, 4)
    written = np.load(tmp_path / "a_latents.npy", mmap_mode="r+")
    assert np.array_equal(corpus.train.latents.numpy(), written[:9])
    written[0] = 7.0  # what changes on the disk is seen: nothing was copied
    written.flush()
    assert bool((corpus.train.latents[0] == 7.0).all())


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
    with pytest.raises(UsageError, match=r"a\.jsonl:21 has no text"):
        read_corpus(DataConfig(path=str(folder), tokenizer=tokenizer))
    (folder / "a.npy").unlink()
    with pytest.raises(UsageError, match=r"has no a\.npy beside it"):
        read_corpus(DataConfig(path=str(folder), tokenizer=tokenizer))
    (folder / "a.jsonl").unlink()
    np.save(folder / "b_latents.npy", np.array([{"code": 1}], dtype=object), allow_pickle=True)
    (folder / "b_tokens.npy").write_bytes(b"no array")
    with pytest.raises(UsageError, match=r"b_tokens\.npy is no \.npy file of plain numbers"):
        read_corpus(DataConfig(path=str(folder)))
