"""clip6d's data: COCO-style files in several languages, rows that are wrong, loaders that go on where they stood."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from clip6d_trainings import TINY, Console, make_config, open_shapes, shapes_folder, train
from PIL import Image

from steadygrad.errors import ConfigError, UsageError
from steadygrad_recipes.clip6d.config import Clip6dConfig, ModelConfig
from steadygrad_recipes.clip6d.data import CaptionDataset, CaptionLoader, read_corpus, read_image
from steadygrad_recipes.clip6d.evaluate import without_trace
from steadygrad_recipes.clip6d.fit import open_corpus
from steadygrad_recipes.clip6d.neighbours import find_captions
from steadygrad_recipes.clip6d.retrieval import list_pairs, measure_recall, rank_matches
from steadygrad_recipes.clip6d.tokens import FILL, encode, encode_batch

TEXT = ("image", "en", "de")


def write_set(folder: Path, num: int = 12) -> dict[str, dict[str, Any]]:
    """A small set as a person has it: JPEG files, captions in two languages."""
    (folder / "images").mkdir(parents=True)
    for n in range(num):
        Image.new("RGB", (40 + n, 30), (20 * n, 100, 255 - 20 * n)).save(folder / "images" / f"{n}.jpg")
    files = {}
    for language, word in (("en", "picture"), ("de", "Bild")):
        files[language] = {
            "images": [{"id": n, "file_name": f"{n}.jpg"} for n in range(num)],
            "annotations": [
                {"id": 2 * n + i, "image_id": n, "caption": f"{word} {n} {i}"} for n in range(num) for i in range(2)
            ],
        }
    return files


def save(folder: Path, files: dict[str, Any]) -> None:
    for language, content in files.items():
        (folder / f"captions_{language}.json").write_text(json.dumps(content), encoding="utf-8")


def small(**changes: Any) -> Clip6dConfig:
    return make_config(**({"modalities": TEXT, "batch_size": 4, "val_share": 0.2} | changes))


# --- a folder of images and captions --------------------------------------------------------------------------------


def test_a_folder_of_images_and_captions_in_two_languages_is_read_and_trained(tmp_path: Path) -> None:
    files = write_set(tmp_path / "data")
    save(tmp_path / "data", files)
    config = small(data=str(tmp_path / "data"))
    corpus = read_corpus(config, tmp_path / "data")
    assert (len(corpus.train), len(corpus.val), corpus.left_out) == (10, 2, [])
    assert not {s.id for s in corpus.train} & {s.id for s in corpus.val}

    batch = next(iter(CaptionLoader(corpus, config)))
    assert batch["image"].shape == (4, 3, TINY.image_size, TINY.image_size)
    assert batch["present"].all()
    assert batch["en"].shape[0] == 4

    train(config, tmp_path / "run", corpus=corpus)
    assert (tmp_path / "run" / "steps.jsonl").is_file()


def test_rows_that_are_wrong_are_told_one_by_one_and_the_rest_is_used(tmp_path: Path) -> None:
    files = write_set(tmp_path)
    en = files["en"]
    en["annotations"] += [
        {"id": 90, "image_id": 77, "caption": "of nothing"},
        {"id": 91, "image_id": 1, "caption": "   "},
        {"id": 92, "image_id": 1, "caption": 5},
        {"id": 93, "caption": "no image"},
    ]
    en["images"] += [{"id": 3, "file_name": "3.jpg"}, {"file_name": "x.jpg"}, {"id": 50, "file_name": "../secret.jpg"}]
    (tmp_path / "secret.jpg").write_bytes(b"")
    save(tmp_path, files)
    console = Console()

    corpus = open_corpus(small(data=str(tmp_path)), tmp_path / "run", console)

    reasons = [row.reason for row in corpus.left_out]
    assert reasons == [
        "the id 3 is there twice",
        "an image needs a whole number as its id",
        f"the image is not in {tmp_path / 'images'}",
        "no image has the id 77",
        "the caption is empty",
        "the caption is not text",
        "a caption needs a whole number as its image_id",
        "of the modalities it has none, and two are needed",
    ]
    written = [json.loads(line) for line in (tmp_path / "run" / "left_out.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in written] == reasons
    assert console.lines[0].startswith("8 rows were left out, each with its reason in ")
    assert len(corpus.train) + len(corpus.val) == 12


@pytest.mark.parametrize("name", ["a\0.jpg", "loop.jpg", "x" * 300, "\ud83d.jpg"])
def test_an_image_of_any_name_is_listed_and_ends_nothing(tmp_path: Path, name: str) -> None:
    files = write_set(tmp_path / "data")
    (tmp_path / "data" / "images" / "loop.jpg").symlink_to("loop.jpg")
    files["en"]["images"].append({"id": 50, "file_name": name})
    save(tmp_path / "data", files)
    corpus = open_corpus(small(data=str(tmp_path / "data")), tmp_path / "run", Console())

    assert len(corpus.train) + len(corpus.val) == 12
    first = json.loads((tmp_path / "run" / "left_out.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["reason"].startswith("the image is not in ")


def test_a_caption_that_is_no_text_is_listed(tmp_path: Path) -> None:
    files = write_set(tmp_path / "data")
    files["en"]["annotations"] += [{"image_id": 1, "caption": "\ud83d"}, {"image_id": True, "caption": "of no id"}]
    save(tmp_path / "data", files)

    corpus = read_corpus(small(data=str(tmp_path / "data")), tmp_path / "data")

    assert [one.reason for one in corpus.left_out] == [
        r"the caption is not Unicode text: \ud83d is half of a character, and the other half is missing",
        "a caption needs a whole number as its image_id",
    ]


def test_a_picture_is_read_upright_and_sixteen_bits_keep_their_shades(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    picture = Image.new("L", (8, 8), 0)
    picture.paste(255, (0, 0, 8, 4))
    picture.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("I;16", (8, 8), 20000).save(tmp_path / "deep.png")

    turned, deep = (read_image(tmp_path / name, 8) for name in ("turned.jpg", "deep.png"))

    assert turned is not None
    assert deep is not None
    assert [int(turned[0, row, 0]) for row in (0, 7)] == [0, 255]
    assert deep.unique().tolist() == [20000 * 255 // 65535]


def test_a_sample_without_a_caption_in_one_language_is_used_with_what_it_has(tmp_path: Path) -> None:
    files = write_set(tmp_path)
    files["de"]["annotations"] = [row for row in files["de"]["annotations"] if row["image_id"] % 2]
    save(tmp_path, files)
    config = small(data=str(tmp_path))
    corpus = read_corpus(config, tmp_path)
    present = torch.cat([batch["present"] for batch in CaptionLoader(corpus, config)])
    assert present[:, :2].all()
    assert 0 < int(present[:, 2].sum()) < len(present)
    module, _ = train(config, tmp_path / "run", corpus=corpus)
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values())


def test_an_image_that_cannot_be_decoded_is_told_and_its_captions_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_set(tmp_path)
    save(tmp_path, files)
    (tmp_path / "images" / "5.jpg").write_bytes(b"\xff\xd8 not a picture")
    config = small(data=str(tmp_path))
    corpus = read_corpus(config, tmp_path)
    samples = [*corpus.train, *corpus.val]
    with caplog.at_level(logging.WARNING, "steadygrad"):
        items = [CaptionDataset(samples, corpus, config)[0, i] for i in range(len(samples))]
    assert [item["image"] is None for item in items].count(True) == 1
    assert "5.jpg cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, f: None, "there is no folder .* Give a folder that holds captions_<language>.json"),
        (lambda d, f: write_set(d), "lacks captions_en.json, captions_de.json; it has no .tar or"),
        (
            lambda d, f: save(d, {"en": write_set(d)["en"]}),
            "lacks captions_de.json; it has captions in en. Add the file",
        ),
        (lambda d, f: (d.mkdir(), save(d, f)), "no folder of images at .*images .* Give its path"),
        (lambda d, f: (write_set(d), save(d, {**f, "en": []})), "lacks the lists images and annotations; it has list"),
        (lambda d, f: (write_set(d, 3), save(d, f)), "has 2 samples for training, .* Lower batch_size"),
    ],
)
def test_input_that_cannot_be_used_is_told_with_what_to_do(change: Any, message: str, tmp_path: Path) -> None:
    files = write_set(tmp_path / "other", 3)
    change(tmp_path / "data", files)
    with pytest.raises(UsageError, match=message):
        read_corpus(small(), tmp_path / "data")


def test_a_caption_file_that_is_no_json_is_told(tmp_path: Path) -> None:
    save(tmp_path, write_set(tmp_path))
    (tmp_path / "captions_en.json").write_text("{'images': ", encoding="utf-8")
    with pytest.raises(UsageError, match=r"captions_en.json is not JSON .* The format is COCO's"):
        read_corpus(small(), tmp_path)


def test_vectors_come_from_npz_too_and_those_that_are_not_finite_are_told(tmp_path: Path) -> None:
    save(tmp_path, write_set(tmp_path))
    vectors = numpy.ones((12, 5), dtype="float32")
    vectors[4, 2] = numpy.nan
    numpy.savez(tmp_path / "vectors.npz", ids=numpy.arange(12), vectors=vectors)
    corpus = read_corpus(small(modalities=("image", "vector", "en")), tmp_path)
    assert corpus.vector_dim == 5
    assert sorted(corpus.vectors) == [n for n in range(12) if n != 4]
    assert [(row.row, row.reason) for row in corpus.left_out] == [("id 4", "the vector is not finite")]


def test_vectors_that_do_not_fit_their_ids_are_refused(tmp_path: Path) -> None:
    save(tmp_path, write_set(tmp_path))
    numpy.savez(tmp_path / "vectors.npz", ids=numpy.arange(11), vectors=numpy.ones((12, 5)))
    with pytest.raises(UsageError, match=r"ids \[11\] of torch.int64 and vectors \[12, 5\] do not fit"):
        read_corpus(small(modalities=("image", "vector")), tmp_path)
    numpy.savez(tmp_path / "vectors.npz", names=numpy.arange(12), vectors=numpy.ones((12, 5)))
    with pytest.raises(UsageError, match=r"has names, vectors, not ids and vectors"):
        read_corpus(small(modalities=("image", "vector")), tmp_path)
    (tmp_path / "vectors.npz").unlink()
    with pytest.raises(UsageError, match=r"has neither vectors\.safetensors nor vectors\.npz"):
        read_corpus(small(modalities=("image", "vector")), tmp_path)


# --- loaders --------------------------------------------------------------------------------------------------------


def test_a_loader_goes_on_where_it_stood(tmp_path: Path) -> None:
    config = make_config(modalities=("en", "vector"), num_synthetic=60)
    corpus = open_shapes(config, num=60)
    loader = CaptionLoader(corpus, config)
    batches = [batch for _ in range(2) for batch in loader]
    assert len(batches) == 2 * len(loader) == 18

    first = CaptionLoader(corpus, config)
    rest = iter(first)
    for _ in range(5):
        next(rest)
    second = CaptionLoader(corpus, config)
    second.load_state_dict(first.state_dict())
    again = [batch for _ in range(2) for batch in second]
    assert len(again) == 13
    assert all(torch.equal(a[k], b[k]) for a, b in zip(again, batches[5:], strict=True) for k in ("en", "vector"))


def test_worker_processes_give_the_same_batches() -> None:
    batches = []
    for workers in (0, 2):
        config = make_config(modalities=("image", "en"), num_synthetic=60, workers=workers)
        batches.append(list(CaptionLoader(open_shapes(config, num=60), config)))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(*batches, strict=True) for k in ("image", "en", "present"))


def test_another_caption_is_drawn_in_another_epoch_and_a_numbered_one_never_changes() -> None:
    config = make_config(modalities=("en", "en.2"))
    data = CaptionDataset(open_shapes(config).train, open_shapes(config), config)
    drawn = {data[epoch, 0]["en"] for epoch in range(20)}
    assert len(drawn) == 2
    assert {data[epoch, 0]["en.2"] for epoch in range(20)} < drawn
    assert data[-1, 0]["en"] == data.samples[0].captions["en"][0], "validation takes the first"


def test_the_synthetic_set_is_made_of_files_that_anyone_could_have_written() -> None:
    folder = shapes_folder()
    assert len(list((folder / "images").glob("*.png"))) == 432
    content = json.loads((folder / "captions_zh.json").read_text(encoding="utf-8"))
    assert len(content["annotations"]) == 2 * len(content["images"]) == 864
    assert len({row["caption"] for row in content["annotations"]}) == 864, "no two images share a caption"


# --- tokens and retrieval -------------------------------------------------------------------------------------------


def test_captions_become_bytes_and_are_cut_between_characters() -> None:
    assert encode("aé", 16) == [256, 97, 195, 169, 257]
    assert encode("红色", 7) == [256, *"红".encode(), 257], "5 bytes hold one character of 3"
    rows = encode_batch(["abc", ""], 16)
    assert rows.tolist() == [[256, 97, 98, 99, 257], [256, 257, FILL, FILL, FILL]]


def test_recall_counts_ties_and_nan_against_the_query() -> None:
    same = torch.ones(20, 4)
    assert rank_matches(same, same).min() == 19
    bad = torch.full((20, 4), torch.nan)
    assert rank_matches(bad, bad).min() == 20
    eye = torch.eye(20)
    assert rank_matches(eye, eye).max() == 0


def test_recall_of_a_pair_counts_those_that_have_both() -> None:
    eye = torch.eye(20)
    wrong = eye.clone()
    wrong[:4] = eye[[1, 0, 3, 2]]
    present = torch.ones(20, 2, dtype=torch.bool)
    assert measure_recall({"a": eye, "b": wrong}, present)["R@1/a->b"] == pytest.approx(16 / 20)
    present[:4, 1] = False
    found = measure_recall({"a": eye, "b": wrong}, present)
    assert found["R@1"] == found["R@1/b->a"] == 1.0
    assert not [name for name in found if "rest" in name], "of two the rest is the other one"


def test_a_product_finds_from_the_rest_what_no_pair_finds() -> None:
    """Signs of one modality are those of two others multiplied: each two of the three are unrelated."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 50, 256).sign().unbind()
    features, present = {"a": a, "b": b, "c": a * b}, torch.ones(50, 3, dtype=torch.bool)

    multiplied, added = (measure_recall(features, present, multiplies=multiplies) for multiplies in (True, False))

    assert multiplied["R@1"] == added["R@1"] < 0.1
    assert multiplied["(rest) R@1"] == 1.0
    assert added["(rest) R@1"] < 0.1
    rows = list_pairs(multiplied, ("a", "b", "c"))
    assert [row[0] for row in rows] == ["a - b", "a - c", "b - c", "(rest) - a", "(rest) - b", "(rest) - c"]
    assert rows[-1] == ("(rest) - c", "100.0", "100.0", "100.0", "", "", "")


def test_recall_from_the_rest_counts_those_that_have_everything() -> None:
    eye, present = torch.eye(20), torch.ones(20, 3, dtype=torch.bool)
    wrong = eye.clone()
    wrong[:4] = eye[[1, 0, 3, 2]]
    present[:4, 0] = False
    found = measure_recall({"a": eye, "b": eye, "c": wrong}, present)
    assert found["R@1/(rest)->c"] == 1.0
    assert found["R@1/b->c"] == pytest.approx(16 / 20)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modalities": ("image",)}, "must be two to 6, got 1: image. Write"),
        ({"modalities": ("image", "en", "en")}, "en is there twice"),
        ({"modalities": ("image", "e n")}, "'e n' is not a modality"),
        ({"stable_loss_version": 4}, "Clip6dConfig.stable_loss_version must be 0, 1, 2 or 3, got 4. The default is 1."),
        ({"batch_size": 1}, "Clip6dConfig.batch_size must be a whole number, at least 2"),
        ({"precision": "fp8"}, "Clip6dConfig.precision must be one of fp32, bf16, fp16, got 'fp8'"),
    ],
)
def test_a_wrong_setting_is_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Clip6dConfig(**settings)


def test_sizes_that_do_not_fit_are_told() -> None:
    with pytest.raises(ConfigError, match=r"ModelConfig.patch_size must divide image_size \(64\), got 7"):
        ModelConfig(patch_size=7)
    with pytest.raises(ConfigError, match=r"ModelConfig.heads must divide image_width \(128\), got 3"):
        ModelConfig(heads=3)
    assert Clip6dConfig(modalities="image, en,vector").modalities == ("image", "en", "vector")  # type: ignore[arg-type]


# --- neighbours -----------------------------------------------------------------------------------------------------


def test_neighbours_are_told_once_each_and_a_picture_that_is_not_there_is_no_text(tmp_path: Path) -> None:
    files = write_set(tmp_path / "data")
    for language, content in files.items():
        for row in content["annotations"]:
            row["caption"] = f"{language} {row['image_id'] % 2}"  # two sentences for twelve images
    save(tmp_path / "data", files)
    config = small(data=str(tmp_path / "data"), max_steps=2)
    train(config, tmp_path / "run", corpus=read_corpus(config, tmp_path / "data"))
    console = Console()

    assert find_captions(config, str(tmp_path / "data/images/3.jpg"), run_dir=tmp_path / "run", console=console) == 0

    told = [line.split(maxsplit=2) for line in console.lines[1:]]
    assert sorted((name, text) for name, _, text in told) == [(n, f"{n} {i}") for n in ("de", "en") for i in (0, 1)]
    with pytest.raises(UsageError, match=r"there is no picture 30\.jpg\. Give the path of an image, or a text\."):
        find_captions(config, "30.jpg", run_dir=tmp_path / "run", console=console)


def test_an_evaluation_leaves_every_part_in_its_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Dropout()))
    module[1].eval()
    before = [part.training for part in module.modules()]
    with without_trace(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == before
