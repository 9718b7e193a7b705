"""The mmdit recipe reads folders of tokens and latents, and names every row that it cannot learn from."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad_recipes.mmdit.config import DataConfig
from steadygrad_recipes.mmdit.data import Corpus, measure_rows, read_corpus, write_rows
from steadygrad_recipes.mmdit.synthetic import VOCAB, make_corpus


def make_arrays(num: int = 10, **changes: Tensor) -> dict[str, Tensor]:
    return {"tokens": torch.arange(num * 4).view(num, 4) % 7, "latents": torch.randn(num, 2, 3), **changes}


def read(folder: Path, **settings: object) -> Corpus:
    return read_corpus(DataConfig(path=str(folder), **settings))  # type: ignore[arg-type]


def test_safetensors_and_npz_files_of_one_folder_are_one_corpus(tmp_path: Path) -> None:
    one, two = make_arrays(6), make_arrays(4)
    save_file(one, tmp_path / "a.safetensors")
    numpy.savez(tmp_path / "b.npz", **{name: tensor.numpy() for name, tensor in two.items()})

    corpus = read(tmp_path, val_fraction=0.2)

    assert (len(corpus.train), len(corpus.val)) == (8, 2)
    assert torch.equal(corpus.train.tokens, torch.cat([one["tokens"], two["tokens"]])[:8])
    assert torch.equal(torch.cat(list(corpus.val.iterate_latents())), two["latents"][2:])
    assert vars(corpus.shapes) == {"vocab_size": 7, "text_length": 4, "num_latents": 2, "latent_dim": 3}
    assert {k: v.dtype for k, v in corpus.train[0].items()} == {
        "tokens": torch.int64,
        "mask": torch.bool,
        "latents": torch.float32,
    }


def test_train_and_val_folders_are_kept_apart(tmp_path: Path) -> None:
    for name, num in (("train", 5), ("val", 3)):
        (tmp_path / name).mkdir()
        save_file(make_arrays(num), tmp_path / name / "rows.safetensors")

    corpus = read(tmp_path)

    assert (len(corpus.train), len(corpus.val)) == (5, 3)


def test_one_latent_a_text_may_be_a_vector_and_in_half_precision(tmp_path: Path) -> None:
    save_file(make_arrays(latents=torch.randn(10, 3).bfloat16()), tmp_path / "a.safetensors")

    corpus = read(tmp_path)

    assert corpus.train.latents.shape == (9, 1, 3)
    assert corpus.train.latents.dtype is torch.bfloat16


def test_padding_is_known_by_mask_or_by_token(tmp_path: Path) -> None:
    tokens = torch.tensor([[3, 4, 0, 0], [5, 6, 1, 0]] * 5)
    save_file(make_arrays(tokens=tokens), tmp_path / "a.safetensors")
    assert torch.equal(read(tmp_path, pad_token_id=0).train.mask, tokens[:9] != 0)

    marked = torch.where(tokens == 0, -100, tokens)
    save_file(make_arrays(tokens=marked, mask=tokens != 0), tmp_path / "a.safetensors")
    corpus = read(tmp_path)
    assert torch.equal(corpus.train.mask, tokens[:9] != 0)
    assert int(corpus.train.tokens.min()) == 0  # -100 on padding is no id


def test_words_come_from_a_list_or_from_a_tokenizers_vocabulary(tmp_path: Path) -> None:
    save_file(make_arrays(), tmp_path / "a.safetensors")
    (tmp_path / "vocab.json").write_text(json.dumps(list("abcdefgh")))
    assert (read(tmp_path).vocab, read(tmp_path).vocab_size) == (tuple("abcdefgh"), 8)

    (tmp_path / "vocab.json").write_text(json.dumps({"b": 1, "a": 0, **{c: i + 2 for i, c in enumerate("cdefg")}}))
    assert read(tmp_path).vocab == tuple("abcdefg")


def test_bad_rows_end_the_program_and_each_is_named(tmp_path: Path) -> None:
    spoil(tmp_path)

    with pytest.raises(UsageError) as caught:
        read(tmp_path, vocab_size=7)

    message = str(caught.value)
    assert message.startswith(f"4 of 10 rows in {tmp_path} cannot be learned from: ")
    for told in (
        "a.safetensors row 3: no word",
        "row 5: a token outside the vocabulary",
        "row 1: a latent that is NaN",
    ):
        assert told in message
    assert "a.safetensors row 7: a latent that is all zero" in message
    assert message.endswith("Fix them, or leave them out: data.skip_bad_rows.")


def test_bad_rows_that_are_left_out_are_told(tmp_path: Path) -> None:
    spoil(tmp_path)

    corpus = read(tmp_path, vocab_size=7, skip_bad_rows=True)

    assert len(corpus.train) + len(corpus.val) == 6
    assert corpus.notes[0].startswith(f"left out 4 of 10 rows in {tmp_path}: ")
    assert torch.cat(list(corpus.train.iterate_latents())).isfinite().all()


def test_a_row_with_two_faults_is_one_row(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["tokens"][0, 0], arrays["latents"][0, 0, 0] = 99, math.nan
    save_file(arrays, tmp_path / "a.safetensors")

    with pytest.raises(UsageError, match=r"^1 of 10 rows"):
        read(tmp_path, vocab_size=7)


def spoil(folder: Path) -> None:
    arrays = make_arrays(mask=torch.ones(10, 4, dtype=torch.bool))
    arrays["latents"][1, 0, 2] = math.nan
    arrays["mask"][3] = False
    arrays["tokens"][5, 1] = 7
    arrays["latents"][7] = 0
    save_file(arrays, folder / "a.safetensors")


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"ids": torch.zeros(2, 4)}, "has no tokens and no latents, it holds ids. Write tokens [N, L]"),
        (make_arrays(tokens=torch.rand(10, 4)), "has tokens [10, 4] of torch.float32"),
        (make_arrays(latents=torch.randn(10, 2, 3, 3)), "and latents [10, 2, 3, 3] of torch.float32"),
        (make_arrays(latents=torch.randn(9, 2, 3)), "has 10 texts of 4, 9 latents"),
        (make_arrays(mask=torch.ones(10, 5)), "a mask of [10, 5]. Write one row of each for each text."),
    ],
)
def test_a_file_of_another_shape_is_told_with_what_to_write(
    tmp_path: Path, arrays: dict[str, Tensor], told: str
) -> None:
    save_file(arrays, tmp_path / "a.safetensors")

    with pytest.raises(UsageError) as caught:
        read(tmp_path)

    assert told in str(caught.value)
    assert str(tmp_path / "a.safetensors") in str(caught.value)


def test_a_missing_folder_and_an_empty_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data.path is not a folder: .*nowhere. Give a folder of .safetensors"):
        read(tmp_path / "nowhere")
    (tmp_path / "readme.txt").touch()
    with pytest.raises(UsageError, match=r"no .safetensors, .npz, .npy or .jsonl file in .*, it holds readme.txt. Put"):
        read(tmp_path)


def test_files_that_differ_in_shape_are_told(tmp_path: Path) -> None:
    save_file(make_arrays(), tmp_path / "a.safetensors")
    save_file(make_arrays(tokens=torch.zeros(10, 5).long()), tmp_path / "b.safetensors")

    with pytest.raises(UsageError, match=r"b.safetensors has rows of \[L, T, D\] = \[5, 2, 3\], a.safetensors has"):
        read(tmp_path)


def test_a_file_cut_short_is_told_and_a_pickle_inside_is_not_run(tmp_path: Path) -> None:
    save_file(make_arrays(), tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"a.safetensors cannot be read: .* Write it again, as tensors"):
        read(tmp_path)

    (tmp_path / "a.safetensors").unlink()
    trap = tmp_path / "ran"
    numpy.savez(tmp_path / "b.npz", tokens=numpy.array([Trap(str(trap))], dtype=object), latents=numpy.zeros((1, 3)))
    with pytest.raises(UsageError, match=r"b.npz cannot be read: Object arrays cannot be loaded"):
        read(tmp_path)
    assert not trap.exists()


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self._path),)


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(str(tmp_path / "ran"))))

    assert (tmp_path / "ran").exists()


def test_a_dimension_that_never_changes_is_not_divided_by_zero(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["latents"][..., 1] = 3.0
    save_file(arrays, tmp_path / "a.safetensors")

    found = measure_rows(read(tmp_path).train)

    assert found["latent_std"][1] == 1.0
    assert found["latent_mean"][1] == 3.0
    assert all(value.isfinite().all() for value in found.values())


def test_the_made_up_corpus_can_be_written_and_read_again(tmp_path: Path) -> None:
    made = make_corpus(32)
    write_rows(tmp_path / "train" / "rows.safetensors", made.train)
    write_rows(tmp_path / "val" / "rows.safetensors", made.val)
    (tmp_path / "vocab.json").write_text(json.dumps(VOCAB))

    corpus = read(tmp_path)

    assert corpus.shapes == made.shapes
    assert torch.equal(corpus.train.latents, made.train.latents)
    assert torch.equal(corpus.val.tokens, made.val.tokens)


def test_the_made_up_corpus_depends_on_its_seed_only() -> None:
    torch.rand(3)
    assert torch.equal(make_corpus(16).train.latents, make_corpus(16).train.latents)
    assert not torch.equal(make_corpus(16, seed=1).train.tokens, make_corpus(16).train.tokens)
