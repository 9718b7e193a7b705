"""COD10K's folder is read, what is wrong in it is named, and made pictures hide their object."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steadygrad.errors import UsageError
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.cod.data import make_pictures, open_datasets, open_loaders, read_mask
from steadygrad_recipes.cod.folder import find_split

Image = pytest.importorskip("PIL.Image", reason="no pillow: pip install 'steadygrad[recipes]'")

NAMES = ("COD10K-CAM-1-Aquatic-1-BatFish-1", "COD10K-CAM-3-Flying-53-Bird-7")


def write_pair(split: Path, name: str, *, size: tuple[int, int] = (40, 24), images: str = "Image") -> None:
    for folder, suffix, mode in ((images, "jpg", "RGB"), ("GT_Object" if images == "Image" else "GT", "png", "L")):
        (split / folder).mkdir(parents=True, exist_ok=True)
        picture = Image.new(mode, size, 0)
        picture.paste((200, 90, 30) if mode == "RGB" else 255, (8, 6, 20, 12))
        picture.save(split / folder / f"{name}.{suffix}")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two pairs to train on and one to test on."""
    root = tmp_path / "COD10K"
    for name in NAMES:
        write_pair(root / "Train", name)
    write_pair(root / "Test", "COD10K-CAM-2-Terrestrial-23-Cat-9")
    return root


def settings(root: Path, **changes: object) -> CodConfig:
    return CodConfig(dataset_path=str(root), image_size=64, batch_size=2, **changes)  # type: ignore[arg-type]


def test_cod10k_is_read_into_images_and_masks(dataset: Path) -> None:
    train, test, splits = open_datasets(settings(dataset))
    sample = train[0]
    assert (len(train), len(test)) == (2, 1)  # type: ignore[arg-type]
    assert sample["image"].shape == (3, 64, 64)
    assert sample["mask"].shape == (1, 64, 64)
    assert set(sample["mask"].unique().tolist()) == {0.0, 1.0}
    # The pasted box covers 12 x 6 of 40 x 24 pixels: after scaling it must still be where it was.
    assert sample["mask"].mean().item() == pytest.approx(12 * 6 / (40 * 24), abs=0.02)
    assert sample["mask"][0, 22, 22] == 1.0
    assert splits["train"].bad == ()


def test_the_layout_of_the_evaluation_sets_is_read_too(tmp_path: Path) -> None:
    write_pair(tmp_path / "TrainDataset", "a", images="Imgs")
    write_pair(tmp_path / "TestDataset" / "COD10K", "b", images="Imgs")
    train, test, _ = open_datasets(settings(tmp_path))
    assert (len(train), len(test)) == (1, 1)  # type: ignore[arg-type]


def test_a_batch_keeps_images_and_masks_together(dataset: Path) -> None:
    config = settings(dataset)
    train, test, _ = open_datasets(config)
    batch = next(iter(open_loaders(config, train, test)[0]))
    assert batch["image"].shape == (2, 3, 64, 64)
    inside = batch["image"][:, 0][batch["mask"][:, 0] > 0]
    outside = batch["image"][:, 0][batch["mask"][:, 0] == 0]
    assert inside.mean() > outside.mean() + 1  # the box is bright, the rest is black


def test_a_missing_folder_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere.*Give the folder that holds Train and Test"):
        open_datasets(settings(tmp_path / "nowhere"))


def test_another_layout_is_told_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    with pytest.raises(UsageError, match=r"has no Train/Image with a Train/GT_Object .* it holds pictures\. Arrange"):
        open_datasets(settings(tmp_path))


def spoil(dataset: Path) -> None:
    """Five kinds of bad rows."""
    train = dataset / "Train"
    write_pair(train, "lonely-image")
    (train / "GT_Object" / "lonely-image.png").unlink()
    write_pair(train, "lonely-mask")
    (train / "Image" / "lonely-mask.jpg").unlink()
    write_pair(train, "two-sizes")
    Image.new("L", (10, 10)).save(train / "GT_Object" / "two-sizes.png")
    write_pair(train, "no-picture")
    (train / "Image" / "no-picture.jpg").write_bytes(b"not a picture")
    (train / "Image" / "readme.txt").write_text("hello")


def test_every_bad_row_is_named_before_training(dataset: Path) -> None:
    spoil(dataset)
    split = find_split(dataset, "train")
    assert [pair.image.stem for pair in split.pairs] == list(NAMES)
    assert sorted(split.bad) == [
        "lonely-image.jpg: no mask lonely-image.png in GT_Object",
        "lonely-mask.png: no image of this name",
        "no-picture.jpg: its image is not a readable picture (UnidentifiedImageError)",
        "readme.txt: not a picture by its name",
        "two-sizes.jpg: image is 40 x 24 and mask 10 x 10",
    ]
    with pytest.raises(UsageError, match=r"5 of the train files of .* cannot be used: .*--skip-bad-data true"):
        open_datasets(settings(dataset))


def test_bad_rows_are_left_out_when_that_is_asked_for(dataset: Path) -> None:
    spoil(dataset)
    train, _, splits = open_datasets(settings(dataset, skip_bad_data=True))
    assert len(train) == 2  # type: ignore[arg-type]
    assert len(splits["train"].bad) == 5


def test_a_split_without_a_pair_is_refused(dataset: Path) -> None:
    for file in (dataset / "Test").rglob("*.*"):
        file.unlink()
    with pytest.raises(UsageError, match=r"the test split of .* holds no pair"):
        open_datasets(settings(dataset))


@pytest.mark.parametrize(("folder", "suffix", "what"), [("Image", "jpg", "image"), ("GT_Object", "png", "mask")])
def test_a_file_that_breaks_off_is_named_before_training(dataset: Path, folder: str, suffix: str, what: str) -> None:
    file = dataset / "Train" / folder / f"{NAMES[0]}.{suffix}"
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])

    split = find_split(dataset, "train")

    assert [pair.image.stem for pair in split.pairs] == [NAMES[1]]
    assert split.bad[0].startswith(f"{NAMES[0]}.jpg: its {what} is not a readable picture (")


def test_a_picture_with_something_appended_is_whole(dataset: Path) -> None:
    file = dataset / "Train" / "Image" / f"{NAMES[0]}.jpg"
    file.write_bytes(file.read_bytes() + b"x" * 500)

    assert not find_split(dataset, "train").bad


def test_a_file_that_has_broken_off_since_is_named_when_it_is_read(dataset: Path) -> None:
    file = dataset / "Train" / "Image" / f"{NAMES[0]}.jpg"
    train, _, _ = open_datasets(settings(dataset))
    file.write_bytes(file.read_bytes()[:-40])

    with pytest.raises(UsageError, match=f"{NAMES[0]}.jpg cannot be read as a picture"):
        train[0]


def test_noncam_images_are_used_when_asked_for_and_have_no_object(dataset: Path) -> None:
    Image.new("RGB", (40, 24)).save(dataset / "Train" / "Image" / "COD10K-NonCAM-1-Aquatic-1-Cat-1.jpg")
    without, _, splits = open_datasets(settings(dataset))
    with_them, _, _ = open_datasets(settings(dataset, include_noncam=True))
    assert (len(without), splits["train"].num_noncam) == (2, 1)  # type: ignore[arg-type]
    assert len(with_them) == 3  # type: ignore[arg-type]
    assert with_them[2]["mask"].sum() == 0


@pytest.mark.parametrize("top", [1, 255])
def test_masks_of_zero_and_one_are_read_like_those_of_zero_and_255(tmp_path: Path, top: int) -> None:
    picture = Image.new("L", (8, 8), 0)
    picture.paste(top, (0, 0, 4, 8))
    picture.save(tmp_path / "mask.png")
    assert torch.equal(read_mask(tmp_path / "mask.png", 8).mean((0, 1)), torch.tensor([1.0] * 4 + [0.0] * 4))


def test_made_pictures_depend_on_the_seed_alone() -> None:
    first, second, other = make_pictures(3, 32, 5), make_pictures(3, 32, 5), make_pictures(3, 32, 6)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], other[0])


def test_made_objects_have_the_colour_and_contrast_of_their_ground() -> None:
    images, masks = make_pictures(32, 64, 0)
    inside, outside = images[:, 0][masks[:, 0] > 0], images[:, 0][masks[:, 0] == 0]
    # Colours differ from picture to picture by about 0.5; over 32 of them an object must not stand out by a tenth.
    assert abs(inside.mean() - outside.mean()) < 0.1
    assert abs(inside.std() - outside.std()) < 0.15
    assert 0.03 < masks.mean() < 0.3
