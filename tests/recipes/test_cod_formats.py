"""cod with other layouts of data, one's own network, timm's backbones, and the field's measures."""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steadygrad.cli import main
from steadygrad.errors import ConfigError, UsageError
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.cod.data import LateFaults, PairDataset, denormalise, read_mask, read_picture
from steadygrad_recipes.cod.folder import find_split
from steadygrad_recipes.cod.metrics import find_nearest, measure_alignment, measure_weighted_f
from steadygrad_recipes.cod.model import CamouflageNet, build_network, take_outputs

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
"""


def write_pair(images: Path, masks: Path, name: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for folder in (images, masks):
        folder.mkdir(parents=True, exist_ok=True)
    pillow.new("RGB", (70, 66), (9, 90, 9)).save(images / f"{name}.jpg")
    mask = pillow.new("L", (70, 66), 0)
    mask.paste(255, (10, 10, 40, 40))
    mask.save(masks / f"{name}.png")


def test_camos_layout_has_one_folder_of_masks_for_both_splits(tmp_path: Path) -> None:
    for split, names in (("Train", "abc"), ("Test", "de")):
        for name in names:
            write_pair(tmp_path / "Images" / split, tmp_path / "GT", name)

    train, test = (find_split(tmp_path, name) for name in ("train", "test"))

    assert [len(train.pairs), len(test.pairs)] == [3, 2]
    assert train.bad == test.bad == ()


def test_a_folder_without_splits_gives_every_tenth_image_to_the_test(tmp_path: Path) -> None:
    for number in range(20):
        write_pair(tmp_path / "Imgs", tmp_path / "GT", f"{number:02d}")

    train, test = (find_split(tmp_path, name) for name in ("train", "test"))

    assert [pair.image.stem for pair in test.pairs] == ["00", "10"]
    assert len(train.pairs) == 18
    assert train.bad == test.bad == ()


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("images/train", "masks/train"), ("images/test", "masks/test")),
        (("train/images", "train/masks"), ("val/images", "val/masks")),
        (("TrainDataset/Imgs", "TrainDataset/GT"), ("TestDataset/CAMO/Imgs", "TestDataset/CAMO/GT")),
        (("TrainDataset/Imgs", "TrainDataset/GT"), ("TestDataset/COD10K/Imgs", "TestDataset/COD10K/GT")),
    ],
)
def test_layouts_of_other_sets_are_found_and_named(
    tmp_path: Path, train: tuple[str, str], test: tuple[str, str]
) -> None:
    for (images, masks), names in ((train, "abc"), (test, "de")):
        for name in names:
            write_pair(tmp_path / images, tmp_path / masks, name)

    found = [find_split(tmp_path, name) for name in ("train", "test")]

    assert [[pair.image.stem for pair in split.pairs] for split in found] == [list("abc"), list("de")]
    assert [split.images for split in found] == [tmp_path / train[0], tmp_path / test[0]]
    assert not any(split.bad for split in found)


def test_a_picture_damaged_in_the_middle_or_too_large_is_named_before_training(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for number in range(20):
        write_pair(tmp_path / "Imgs", tmp_path / "GT", f"{number:02d}")
    noise = pillow.effect_noise((70, 66), 90.0)
    noise.save(tmp_path / "GT" / "03.png")
    content = (tmp_path / "GT" / "03.png").read_bytes()
    middle = len(content) // 2
    (tmp_path / "GT" / "03.png").write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    pillow.new("1", (20_000, 10_000)).save(tmp_path / "GT" / "05.png")

    bad = find_split(tmp_path, "train").bad

    assert [line.partition(" (")[0] for line in bad] == [
        "03.jpg: its mask is not a readable picture",
        "05.jpg: its mask is not a readable picture",
    ]
    assert "exceeds limit" in bad[1]


def test_what_is_transparent_in_a_mask_is_ground(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    mask = pillow.new("RGBA", (8, 8), (255, 255, 255, 0))
    mask.paste((255, 255, 255, 255), (0, 0, 4, 8))
    mask.save(tmp_path / "mask.png")

    assert torch.equal(read_mask(tmp_path / "mask.png", 8).mean((0, 1)), torch.tensor([1.0] * 4 + [0.0] * 4))


def write_turned(path: Path, orientation: int) -> None:
    """Write a picture 60 wide and 40 high that is bright at the top and left, stored as EXIF's orientation says."""
    pillow = pytest.importorskip("PIL.Image")
    shown = pillow.new("L", (60, 40), 0)
    shown.paste(255, (0, 0, 60, 20))
    shown.paste(128, (0, 20, 30, 40))
    back = {3: "ROTATE_180", 6: "ROTATE_90", 8: "ROTATE_270"}[orientation]
    exif = pillow.Exif()
    exif[0x0112] = orientation
    shown.transpose(pillow.Transpose[back]).save(path, quality=100, exif=exif)


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_picture_is_read_as_viewers_show_it(tmp_path: Path, orientation: int) -> None:
    write_turned(tmp_path / "a.jpg", orientation)

    corners = denormalise(read_picture(tmp_path / "a.jpg", 8))[0][1::5, 1::5]

    torch.testing.assert_close(corners, torch.tensor([[1.0, 1.0], [0.5, 0.0]]), atol=0.02, rtol=0)  # of JPEG


@pytest.mark.parametrize(("size", "is_as_stored"), [((60, 40), False), ((40, 60), True)])
def test_a_picture_is_turned_as_its_mask_fits(tmp_path: Path, size: tuple[int, int], is_as_stored: bool) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for split in ("Train", "Test"):
        for folder in ("Image", "GT_Object"):
            (tmp_path / split / folder).mkdir(parents=True)
        write_turned(tmp_path / split / "Image" / "a.jpg", 6)
        pillow.new("L", size, 0).save(tmp_path / split / "GT_Object" / "a.png")

    split_found = find_split(tmp_path, "train")

    assert [pair.is_as_stored for pair in split_found.pairs] == [is_as_stored]
    image = denormalise(PairDataset(split_found.pairs, 8)[0]["image"])
    # The bright half lies above in what is shown, and beside in what is stored
    assert (bool(image[0, 1, 6] > 0.9), bool(image[0, 6, 1] > 0.9)) == (not is_as_stored, is_as_stored)  # fmt: skip


def test_a_mask_of_another_size_than_its_turned_picture_is_named(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for folder in ("Image", "GT_Object"):
        (tmp_path / "Train" / folder).mkdir(parents=True)
    write_turned(tmp_path / "Train" / "Image" / "a.jpg", 6)
    pillow.new("L", (60, 60), 0).save(tmp_path / "Train" / "GT_Object" / "a.png")

    assert find_split(tmp_path, "train").bad == ("a.jpg: image is 60 x 40 and mask 60 x 60",)


def test_a_picture_whose_exif_is_damaged_is_read_as_it_is_stored(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("L", (8, 8), 255).save(tmp_path / "a.webp", exif=b"Exif\0\0MM\0*no tags")

    assert float(denormalise(read_picture(tmp_path / "a.webp", 4)).min()) > 0.98


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_of_grey_keep_their_shades(tmp_path: Path, suffix: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("I;16", (8, 8), 20000).save(tmp_path / f"a.{suffix}")

    found = denormalise(read_picture(tmp_path / f"a.{suffix}", 4))

    torch.testing.assert_close(found, torch.full_like(found, 20000 / 65535), atol=1 / 255, rtol=0)  # of eight bits


def test_pixels_that_are_fractions_are_refused_instead_of_being_black(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("F", (8, 8), 0.5).save(tmp_path / "a.tif")

    with pytest.raises(
        UsageError, match=r"a\.tif cannot be read .*numbers from 0\.5 to 0\.5: save them with 8 or 16 bits"
    ):
        read_picture(tmp_path / "a.tif", 4)


def test_masks_of_a_folder_overwrite_none_and_a_bad_picture_keeps_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, photos = str(tmp_path / "run"), tmp_path / "photos"
    size = ["--quick", "--num-made", "8", "--epochs", "2", "--stage1-epochs", "1", "--device", "cpu"]
    assert main(["train", "cod", *size, "--run-dir", run]) == 0
    write_pair(photos, tmp_path / "masks", "a")
    shutil.copy(photos / "a.jpg", photos / "a.jpeg")
    shutil.copy(photos / "a.jpg", photos / "b.jpg")
    (photos / "broken.jpg").write_bytes(b"x")
    (photos / "loop.png").symlink_to("loop.png")
    capsys.readouterr()

    assert main(["train", "cod", "--predict", str(photos), "--run-dir", run]) == 0

    printed = " ".join(capsys.readouterr().out.split())
    written = sorted(file.name for file in (tmp_path / "run" / "predictions").iterdir())
    assert written == ["a.jpeg.png", "a.jpg.png", "b.png"]
    assert "no mask:" in printed
    assert "broken.jpg cannot be read as a picture (UnidentifiedImageError)." in printed
    assert "loop.png cannot be read as a picture" in printed
    assert main(["train", "cod", "--predict", str(photos / "broken.jpg"), "--run-dir", run]) == 2


def test_a_file_of_ones_own_that_is_no_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(:\n")

    with pytest.raises(ConfigError, match=r"mine\.py:make cannot be loaded \(invalid syntax \(mine\.py, line 1\)\)"):
        build_network(CodConfig(model=f"{tmp_path}/mine.py:make"))


FAULTY = """import torch

def wants(size):
    pass

def fails():
    return torch.nn.Linear(3, 1)(torch.zeros(2, 4))

def leaves():
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wants", r"wants\(\) raised TypeError: wants\(\) missing 1 .*'size' at {file}:3\. It is called without"),
        # Raised inside torch: the line that called it is the user's
        ("fails", r"fails\(\) raised RuntimeError: .* at {file}:7\. "),
        ("leaves", r"leaves\(\) raised SystemExit: 3 at {file}:10\. "),
    ],
)
def test_a_function_of_ones_own_that_raises_is_named_with_its_line(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FAULTY)

    with pytest.raises(ConfigError, match=message.format(file=re.escape(str(file)))):
        build_network(CodConfig(model=f"{file}:{name}"))
    assert main(["train", "cod", "--quick", "--model", f"{file}:{name}", "--run-dir", str(tmp_path / "run")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_of_ones_own_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("\nx = {}['weights']\n\ndef make():\n    pass\n")

    with pytest.raises(ConfigError, match=r"mine\.py:make cannot be loaded \(KeyError: 'weights'\) at .*mine\.py:2\. "):
        build_network(CodConfig(model=f"{tmp_path}/mine.py:make"))


def test_a_picture_whose_name_is_not_utf_8_is_trained_on_and_reported(tmp_path: Path) -> None:
    for number in range(20):
        write_pair(tmp_path / "data" / "Imgs", tmp_path / "data" / "GT", f"{number:02d}")
    try:
        write_pair(tmp_path / "data" / "Imgs", tmp_path / "data" / "GT", os.fsdecode(b"\xe9"))
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    size = ["--quick", "--epochs", "2", "--stage1-epochs", "1", "--device", "cpu", "--num-pictures", "9"]
    flags = ["--dataset-path", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]

    assert main(["train", "cod", *size, *flags]) == 0

    assert "\\udce9.jpg" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_damaged_picture_whose_name_is_not_utf_8_is_listed(tmp_path: Path) -> None:
    faults = LateFaults(tmp_path / "left_out.txt")

    for _ in range(2):
        faults.add("caf\udce9.jpg: broken")

    assert (tmp_path / "left_out.txt").read_text() == "caf\\udce9.jpg: broken\n"


def test_a_network_of_ones_own_is_trained_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(NETWORK)
    for number in range(20):
        write_pair(tmp_path / "data" / "Imgs", tmp_path / "data" / "GT", f"{number:02d}")
    run = str(tmp_path / "run")
    flags = ["--model", f"{tmp_path / 'mine.py'}:make", "--dataset-path", str(tmp_path / "data"), "--image-size", "64"]
    flags += ["--epochs", "2", "--stage1-epochs", "1", "--device", "cpu", "--batch-size", "6", "--run-dir", run]

    assert main(["train", "cod", *flags]) == 0
    assert "weighted F" in capsys.readouterr().out
    picture = str(tmp_path / "data" / "Imgs" / "00.jpg")
    assert main(["train", "cod", "--predict", picture, "--run-dir", run]) == 0
    with pytest.raises(ConfigError, match=r"CodConfig\.model: .*nothing cannot be loaded"):
        build_network(CodConfig(model=f"{tmp_path / 'mine.py'}:nothing"))


def test_a_backbone_of_timm() -> None:
    pytest.importorskip("torchvision", exc_type=ImportError)  # which timm needs
    pytest.importorskip("timm")
    network = CamouflageNet("timm:resnet10t").eval()

    assert network(torch.zeros(1, 3, 64, 64)).shape == (1, 1, 64, 64)
    with pytest.raises(ConfigError, match="timm:no_such_net cannot be built"):
        CamouflageNet("timm:no_such_net")


# --- measures ---------------------------------------------------------------------------------------------------------


def make_masks(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.zeros(11, 13, dtype=torch.bool)
    y[2:7, 3 : 6 + seed] = True
    return torch.rand(11, 13, generator=generator).double(), y


@pytest.mark.parametrize("seed", range(3))
def test_distances_are_those_of_a_search_over_all_pixels(seed: int) -> None:
    _, y = make_masks(seed)
    points = y.nonzero().double()
    distance, nearest = find_nearest(y)

    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            all_of_them = (points - torch.tensor([i, j])).square().sum(1).sqrt()
            assert float(distance[i, j]) == pytest.approx(float(all_of_them.min()))
            at = int(nearest[i, j])
            assert bool(y[at // 13, at % 13])


def test_distances_in_large_images_do_not_overflow() -> None:
    y = torch.zeros(40, 1500, dtype=torch.bool)
    y[39, 0] = True

    distance, nearest = find_nearest(y)

    assert float(distance[0, 1499]) == pytest.approx(math.hypot(39, 1499))
    assert int(nearest[0, 1499]) == 39 * 1500


@pytest.mark.parametrize("seed", range(3))
def test_the_weighted_f_is_that_of_its_paper(seed: int) -> None:
    p, y = make_masks(seed)
    errors = (p - y.double()).abs()
    points = [(int(i), int(j)) for i, j in y.nonzero()]
    spread, distance = errors.clone(), torch.zeros_like(p)
    ties = 0.0
    for i in range(11):
        for j in range(13):
            if not y[i, j]:
                gaps = [math.dist((i, j), point) for point in points]
                distance[i, j] = min(gaps)
                near = [errors[points[k]] for k, gap in enumerate(gaps) if gap == min(gaps)]
                spread[i, j] = near[0]
                ties = max(ties, float(max(near) - min(near)))
    kernel = torch.tensor([[math.exp(-(a * a + b * b) / 50) for a in range(-3, 4)] for b in range(-3, 4)]).double()
    kernel /= kernel.sum()
    padded = torch.nn.functional.pad(spread, (3, 3, 3, 3))
    smooth = torch.tensor([[(padded[i : i + 7, j : j + 7] * kernel).sum() for j in range(13)] for i in range(11)])
    lower = torch.where(y & (smooth < errors), smooth, errors)
    weighted = lower * torch.where(y, 1.0, 2 - torch.exp(math.log(0.5) / 5 * distance))
    hits = y.sum() - weighted[y].sum()
    recall, precision = 1 - weighted[y].mean(), hits / (hits + weighted[~y].sum())
    wanted = float(2 * recall * precision / (recall + precision))

    # Of several nearest pixels either may be taken: their errors are blurred over 49.
    assert measure_weighted_f(p, y) == pytest.approx(wanted, abs=0.02 * ties + 1e-9)


def test_a_perfect_mask_scores_one_and_its_opposite_next_to_nothing() -> None:
    _, y = make_masks(1)

    assert measure_weighted_f(y.double(), y) == pytest.approx(1.0)
    assert measure_alignment(y.double(), y) == pytest.approx(1.0, abs=0.01)
    assert measure_weighted_f((~y).double(), y) < 0.1
    assert measure_alignment((~y).double(), y) < 0.1
    empty = torch.zeros_like(y)
    assert measure_alignment(empty.double(), empty) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    "found", [torch.zeros(2, 2, 8, 8), torch.zeros(2, 8, 8), [torch.zeros(2, 3, 8, 8)], {"a": 1}, []]
)
def test_a_network_with_other_outputs_is_told_what_is_needed(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"the network gives .*, not logits \[N, 1, H, W\]"):
        take_outputs(found, (8, 8))
