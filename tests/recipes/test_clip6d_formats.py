"""clip6d on webdataset's and parquet shards, written by the libraries that write them; zero-shot accuracy."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadygrad.cli import main
from steadygrad.errors import UsageError
from steadygrad_recipes.clip6d.config import Clip6dConfig
from steadygrad_recipes.clip6d.data import CaptionDataset, read_corpus

COLOURS = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}
TINY = ["--quick", "--modalities", "image,en", "--batch-size", "4", "--epochs", "1", "--model.image-size", "16"]


def draw(colour: str, format: str = "PNG") -> bytes:
    pillow = pytest.importorskip("PIL.Image")
    content = io.BytesIO()
    pillow.new("RGB", (20, 18), COLOURS[colour]).save(content, format)
    return content.getvalue()


def write_tar(path: Path, num: int = 24) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(path)) as sink:
        for number in range(num):
            colour = list(COLOURS)[number % 3]
            row: dict[str, Any] = {"__key__": f"{number:04d}", "png": draw(colour), "txt": f"a {colour} card"}
            row["npy"] = np.full(5, number, dtype=np.float32)
            row["json"] = {"de": [f"eine Karte, {colour}"], "width": 20}
            sink.write(row)


def test_a_tar_of_webdataset_gives_images_captions_and_vectors(tmp_path: Path) -> None:
    write_tar(tmp_path / "000.tar")
    config = Clip6dConfig(data=str(tmp_path), modalities=("image", "en", "de", "vector"), batch_size=4)

    corpus = read_corpus(config, tmp_path)

    assert (len(corpus.train), len(corpus.val), corpus.left_out, corpus.vector_dim) == (22, 2, [], 5)
    item = CaptionDataset(corpus.train, corpus, config)[0, 0]
    assert item["en"].startswith("a ")
    assert item["de"].startswith("eine Karte")
    red, green, blue = (int(v) for v in item["image"].float().mean((1, 2)))
    wanted = COLOURS[item["en"].split()[1]]
    assert all(abs(a - b) < 12 for a, b in zip((red, green, blue), wanted))


def test_training_on_a_tar_and_zero_shot_accuracy_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "000.tar")
    run = ["--run-dir", str(tmp_path / "run")]
    assert main(["train", "clip6d", *TINY, "--data", str(tmp_path / "data"), *run]) == 0
    for colour in COLOURS:
        (tmp_path / "classes" / colour).mkdir(parents=True)
        (tmp_path / "classes" / colour / "a.png").write_bytes(draw(colour))
    capsys.readouterr()

    assert main(["train", "clip6d", "--predict", str(tmp_path / "classes"), *run]) == 0
    assert "Zero-shot accuracy" in capsys.readouterr().out

    unreadable = tmp_path / "classes" / next(iter(COLOURS))
    (unreadable / "a.png").write_bytes(b"no picture")
    assert main(["train", "clip6d", "--predict", str(tmp_path / "classes"), *run]) == 2
    assert f"{unreadable} has no picture that can be read" in capsys.readouterr().err


def test_parquet_as_datasets_writes_pictures(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pillow = pytest.importorskip("PIL.Image")
    rows = {
        "image": [pillow.open(io.BytesIO(draw(list(COLOURS)[i % 3]))) for i in range(24)],
        "caption": [f"card {i}" for i in range(24)],
    }
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(tmp_path / "a.parquet")
    config = Clip6dConfig(data=str(tmp_path), modalities=("image", "en"), batch_size=4)

    corpus = read_corpus(config, tmp_path)

    assert len(corpus.train) + len(corpus.val) == 24
    item = CaptionDataset(corpus.train, corpus, config)[0, 0]
    assert item["image"].shape == (3, 64, 64)
    assert item["en"].startswith("card ")


def test_what_cannot_be_used_is_named_with_file_and_row(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    write_tar(tmp_path / "000.tar")
    with webdataset.TarWriter(str(tmp_path / "001.tar")) as sink:
        sink.write({"__key__": "x", "txt": "without a picture"})
        sink.write({"__key__": "y", "png": draw("red"), "json": b"{"})
    config = Clip6dConfig(data=str(tmp_path), modalities=("image", "en"), batch_size=4)

    left_out = read_corpus(config, tmp_path).left_out

    assert ("001.tar", "x", "it has no image") in [(one.file, one.row, one.reason) for one in left_out]
    assert any(one.row == "y" and "its .json cannot be read" in one.reason for one in left_out)
    (tmp_path / "002.tar").write_text(json.dumps({"no": "tar"}))
    with pytest.raises(UsageError, match=r"002\.tar is not a \.tar file"):
        read_corpus(config, tmp_path)


def write_clip(folder: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["<end>", "<unk>", "a", "red", "green", "blue", "card"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<end>", model_max_length=8
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(words), "max_position_embeddings": 8, "eos_token_id": 0, "bos_token_id": 0}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)  # one for both halves
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_trained_clip_and_its_tokenizer_come_from_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_clip(tmp_path / "clip")
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "000.tar")
    flags = ["--data", str(tmp_path / "data"), "--model.pretrained", str(tmp_path / "clip"), "--model.image-size", "16"]
    run = ["--run-dir", str(tmp_path / "run")]

    assert main(["train", "clip6d", *TINY, *flags, "--model.embed-dim", "64", *run]) == 2
    assert "has other sizes than the settings. Give --model.embed-dim 12" in capsys.readouterr().err
    assert main(["train", "clip6d", *TINY, *flags, "--model.embed-dim", "12", *run]) == 0
    assert main(["train", "clip6d", "--predict", "a red card", *run]) == 0
    assert "Nearest to the text a red card" in capsys.readouterr().out


def test_each_fault_of_a_shard_is_listed_with_its_file_and_row(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "000.tar")) as sink:
        for number in range(24):
            row: dict[str, Any] = {"__key__": f"{number:04d}", "png": draw("red"), "txt": "a card"}
            row |= {"npy": np.full(5, 1.0, dtype=np.float32), "json": {"de": "Karte"}}
            sink.write(
                row | {3: {"txt": " "}, 5: {"npy": np.full(4, 1.0)}, 7: {"npy": np.full(5, np.inf)}}.get(number, {})
            )
    config = Clip6dConfig(data=str(tmp_path), modalities=("image", "en", "de", "vector"), batch_size=4)

    left_out = [(one.file, one.row, one.reason) for one in read_corpus(config, tmp_path).left_out]

    assert left_out == [
        ("000.tar", "0003", "its caption in en is empty or not text"),
        ("000.tar", "0005", "its vector has 4 numbers, those before it 5"),
        ("000.tar", "0007", "its vector is not finite"),
    ]


def test_rows_and_images_of_parquet_that_cannot_be_used_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = [{"image": draw("red"), "caption": "a card"} for _ in range(24)]
    rows[3]["caption"] = None
    rows[5]["image"] = b"no picture"
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = Clip6dConfig(data=str(tmp_path), modalities=("image", "en"), batch_size=4)

    corpus = read_corpus(config, tmp_path)

    [one] = corpus.left_out
    assert (one.file, one.row) == ("a.parquet", "row 4")
    samples = [*corpus.train, *corpus.val]
    data = CaptionDataset(samples, corpus, config)
    assert sum(data[0, i]["image"] is None for i in range(len(samples))) == 1
    assert "a.parquet, row 6 cannot be read (Pillow knows no such format)" in caplog.text
