"""clip6d on webdataset's and parquet shards, written by the libraries that write them; zero-shot accuracy."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadygrad.cli import main
from steadygrad.errors import ConfigError, UsageError
from steadygrad_recipes.clip6d.config import Clip6dConfig, ModelConfig
from steadygrad_recipes.clip6d.data import CaptionDataset, read_corpus
from steadygrad_recipes.clip6d.module import EnhancedLightningCLIPModule
from steadygrad_recipes.clip6d.pretrained import open_encoders

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

    (tmp_path / "classes" / "yellow").mkdir()
    assert main(["train", "clip6d", "--predict", str(tmp_path / "classes"), *run]) == 2
    assert f"{tmp_path / 'classes' / 'yellow'} has no picture (" in capsys.readouterr().err
    (tmp_path / "classes" / "yellow").rmdir()
    (tmp_path / "classes" / ".cache").mkdir()

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


def write_clip(folder: Path, **change: int) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["<end>", "<unk>", "a", "red", "green", "blue", "card"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<end>", model_max_length=8
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        **sizes,
        "vocab_size": len(words),
        "max_position_embeddings": 8,
        "eos_token_id": 0,
        "bos_token_id": 0,
    } | change
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
    printed = capsys.readouterr().out
    assert "Nearest to the text a red card" in printed
    assert "000.tar, 00" in printed


def test_damaged_weights_of_a_trained_clip_are_named(tmp_path: Path) -> None:
    write_clip(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(ConfigError, match=r"cannot be read as a CLIP model: .*not fully covered\.$"):
        open_encoders(ModelConfig(pretrained=str(tmp_path), image_size=16, embed_dim=16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 5}, r"the tokenizer in .*clip has 7 tokens, and its text model 5"),
        ({"eos_token_id": 6}, r"the tokenizer in .*clip ends texts with 0, and its text model with 6"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    write_clip(tmp_path / "clip", **change)

    with pytest.raises(ConfigError, match=message):
        EnhancedLightningCLIPModule(
            modalities=("image", "en"),
            model=ModelConfig(pretrained=str(tmp_path / "clip"), image_size=16, embed_dim=12),
        )


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


def write_plain_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))


def list_members(num: int = 24) -> list[tuple[str, bytes]]:
    return [part for i in range(num) for part in ((f"{i:04d}.png", draw("red")), (f"{i:04d}.txt", b"a card"))]


IMAGES = Clip6dConfig(modalities=("image", "en"), batch_size=4)
WITH_VECTORS = Clip6dConfig(modalities=("image", "en", "vector"), batch_size=4)


def to_npy(value: Any, **flags: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, value, **flags)
    return content.getvalue()


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (("0003.en.txt", b"\xfcber"), "its caption in en is not UTF-8 text"),
        (("0003.jpg", b"second"), "it has a second image, which is not used"),
        (("0003.json", b'{"en": ["a card", "", 5]}'), "2 of its 3 captions in en are empty or not text"),
        (("0003.json", rb'{"en": "\ud83d"}'), "its caption in en is empty or not text"),
        (("0003.json", b"[" * 100_000), "its .json cannot be read: not JSON that can be read: it is nested too deeply"),
        (("0003.npy", to_npy(np.array(["a"]))), "its vector is not a list of numbers"),
        (("0003.npy", to_npy(np.zeros(3, np.complex64))), "its vector has complex numbers"),
        (("0003.npy", to_npy(np.zeros(0))), "its vector has no numbers"),
        (("0003.npy", b"\x93NUMPY\x01\x00junk"), "its .npy cannot be read: "),
        (("0003.npy", to_npy([{}], allow_pickle=True)), "its .npy cannot be read: Object arrays cannot be loaded"),
    ],
)
def test_a_member_that_cannot_be_used_is_named_and_the_sample_keeps_the_rest(
    tmp_path: Path, member: tuple[str, bytes], reason: str
) -> None:
    write_plain_tar(tmp_path / "a.tar", [*list_members(), member])

    corpus = read_corpus(WITH_VECTORS, tmp_path)

    (left_out,) = corpus.left_out
    assert (left_out.file, left_out.row) == ("a.tar", "0003")
    assert left_out.reason.startswith(reason)
    assert len(corpus.train) + len(corpus.val) == 24


def test_two_samples_of_one_name_keep_their_own_captions(tmp_path: Path) -> None:
    again = [("0003.png", draw("blue")), ("0003.txt", b"another card"), ("._0003.png", b"of macOS")]
    write_plain_tar(tmp_path / "a.tar", [*list_members(), *again])

    corpus = read_corpus(IMAGES, tmp_path)

    found = [sample.captions["en"] for sample in [*corpus.train, *corpus.val] if sample.row == "0003"]
    assert sorted(found) == [["a card"], ["another card"]]
    assert corpus.left_out == []


def test_copies_of_a_sample_in_another_shard_are_reported_and_kept_on_one_side(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        write_plain_tar(tmp_path / f"{name}.tar", list_members())

    corpus = read_corpus(dataclasses.replace(IMAGES, val_share=0.3), tmp_path)

    assert (len(corpus.train) + len(corpus.val), corpus.left_out) == (48, [])
    sides = [{sample.row for sample in side} for side in (corpus.train, corpus.val)]
    assert not sides[0] & sides[1]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "24 samples have the name and the picture of an earlier sample, such as 0000 in a.tar and in b.tar." in line


def test_shards_that_count_from_0_each_are_no_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_plain_tar(tmp_path / "a.tar", list_members())
    moved = [(name, b"GIF" + content if "png" in name else content) for name, content in list_members()]
    write_plain_tar(tmp_path / "b.tar", moved)
    # Of one size, and other pixels
    swapped = [(name, content[::-1] if "png" in name else content) for name, content in list_members()]
    write_plain_tar(tmp_path / "c.tar", swapped)

    corpus = read_corpus(IMAGES, tmp_path)

    assert len(corpus.train) + len(corpus.val) == 72
    assert caplog.records == []


def test_the_columns_of_a_row_that_lacks_a_modality_are_named(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    parquet.write_table(table({"image": [draw("red")] * 9, "english": ["a card"] * 9}), tmp_path / "a.parquet")

    with pytest.raises(
        UsageError, match="row 1: of the modalities it has image, and two are needed; it holds image, english"
    ):
        read_corpus(IMAGES, tmp_path)


def test_members_of_a_sample_need_not_lie_beside_each_other(tmp_path: Path) -> None:
    write_plain_tar(tmp_path / "a.tar", sorted(list_members(), key=lambda member: member[0][-3:]))

    corpus = read_corpus(IMAGES, tmp_path)

    assert (len(corpus.train) + len(corpus.val), corpus.left_out) == (24, [])


def damage_header(content: bytes) -> bytes:
    return content[:5120] + b"\xff" * 512 + content[5632:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_header, r"b\.tar cannot be read behind 0002\.png: it is damaged"),
        (lambda content: content * 2, r"b\.tar cannot be read behind 0023\.txt: .* several archives were joined"),
        (lambda content: content[: 1024 * 48], r"b\.tar has no end mark behind 0023\.txt: it is truncated"),
        (lambda content: content[:5000], r"b\.tar is not a \.tar file: unexpected end of data"),
        (lambda _: b"", r"b\.tar is not a \.tar file: empty file"),
    ],
)
def test_samples_behind_a_damaged_place_of_a_tar_are_not_lost_without_a_word(
    tmp_path: Path, damage: Any, message: str
) -> None:
    write_plain_tar(tmp_path / "a.tar", list_members())
    (tmp_path / "b.tar").write_bytes(damage((tmp_path / "a.tar").read_bytes()))

    with pytest.raises(UsageError, match=message):
        read_corpus(IMAGES, tmp_path)


def test_compressed_shards_are_refused_beside_others_too(tmp_path: Path) -> None:
    write_plain_tar(tmp_path / "a.tar", list_members())
    (tmp_path / "b.tar.gz").write_bytes(b"\x1f\x8b")

    with pytest.raises(UsageError, match=r"b\.tar\.gz is compressed, .* Unpack it to \.tar"):
        read_corpus(IMAGES, tmp_path)


def test_a_folder_of_img2dataset_has_each_sample_once(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    repeats = [(f"{i:04d}.json", b'{"caption": "a card", "status": "success"}') for i in range(24)]
    write_plain_tar(tmp_path / "00000.TAR", [*list_members(), *repeats])
    parquet.write_table(pyarrow.Table.from_pylist([{"url": "x", "caption": "a card"}]), tmp_path / "00000.parquet")
    (tmp_path / "00000_stats.json").write_text("{}")

    corpus = read_corpus(IMAGES, tmp_path)

    assert len(corpus.train) + len(corpus.val) == 24
    assert corpus.left_out == []
    assert {tuple(sample.captions["en"]) for sample in corpus.train} == {("a card",)}


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("../outside.png", "the image ../outside.png is not in "),
        ("a\0.png", "the image a\0.png is not in "),
        ("loop.png", "the image loop.png is not in "),
        ("long" * 99, "the image long"),
        ({"bytes": None, "path": "gone.png"}, "the image gone.png is not in "),
        (7, "its image is int, not the bytes or the name of a picture"),
    ],
)
def test_pictures_of_a_table_are_bytes_or_files_inside_its_folder(tmp_path: Path, cell: Any, reason: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "loop.png").symlink_to("loop.png")
    for place in (tmp_path / "outside.png", tmp_path / "data" / "inside.png"):
        place.write_bytes(draw("red"))
    good = [{"image": {"bytes": None, "path": "inside.png"}, "en": "a card"}] * 24
    parquet.write_table(pyarrow.Table.from_pylist(good), tmp_path / "data" / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"image": cell, "en": "a card"}]), tmp_path / "data" / "b.parquet")

    corpus = read_corpus(IMAGES, tmp_path / "data")

    assert len(corpus.train) + len(corpus.val) == 24
    assert (corpus.left_out[0].file, corpus.left_out[0].row) == ("b.parquet", "row 1")
    assert corpus.left_out[0].reason.startswith(reason)


def test_a_table_damaged_in_the_middle_is_named_with_its_row(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pyarrow.Table.from_pylist([{"image": draw("red"), "en": "a card"}] * 24), tmp_path / "a.parquet"
    )
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:20] + b"\xff" * 60 + content[80:])

    with pytest.raises(UsageError, match=r"a\.parquet cannot be read as parquet, behind row 0: "):
        read_corpus(IMAGES, tmp_path)


def test_too_few_samples_are_reported_with_the_first_that_were_left_out(tmp_path: Path) -> None:
    write_plain_tar(tmp_path / "a.tar", [(name, content) for name, content in list_members() if "png" in name])

    with pytest.raises(
        UsageError, match=r"0 samples .* 24 rows left out, such as a\.tar, 0000: of the modalities it has im"
    ):
        read_corpus(IMAGES, tmp_path)


def test_vectors_of_no_image_and_second_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for i in range(12):
        (tmp_path / "images" / f"{i}.png").write_bytes(draw("red"))
    rows = {"images": [{"id": i, "file_name": f"{i}.png"} for i in range(12)], "annotations": []}
    (tmp_path / "captions_en.json").write_text(json.dumps(rows))
    ids = [*range(12), 3, 99]
    np.savez(tmp_path / "vectors.npz", ids=np.array(ids), vectors=np.arange(14.0)[:, None])
    config = Clip6dConfig(modalities=("image", "vector"), batch_size=4)

    corpus = read_corpus(config, tmp_path)

    assert [(one.row, one.reason) for one in corpus.left_out] == [
        ("id 3", "the id is there twice"),
        ("id 99", "no image has this id"),
    ]
    assert corpus.vectors[3].tolist() == [3.0]
    np.savez(tmp_path / "vectors.npz", ids=np.array(ids) + 0.5, vectors=np.arange(14.0)[:, None])
    with pytest.raises(UsageError, match=r"ids \[14\] of torch\.float64 .* whole numbers"):
        read_corpus(config, tmp_path)


@pytest.mark.parametrize("cell", [{"de": "eine Karte"}, '{"de": "eine Karte"}', b'{"de": "eine Karte"}'])
def test_the_json_of_a_table_may_be_text_or_fields(tmp_path: Path, cell: Any) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"image": draw("red"), "json": cell, "en": "a card"}] * 24 + [
        {"image": draw("red"), "json": None, "en": "x"}
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")

    corpus = read_corpus(Clip6dConfig(modalities=("image", "en", "de"), batch_size=4), tmp_path)

    assert corpus.left_out == []
    assert sum(sample.captions.get("de") == ["eine Karte"] for sample in [*corpus.train, *corpus.val]) == 24
