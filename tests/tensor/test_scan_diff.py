"""Diff: the changes between two checkpoints, with the numbers of a plain float64 comparison."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint_files import FORMATS, INF, NAN, make_weights
from safetensors.torch import save_file

from steadygrad.scan.diff import diff_checkpoints
from steadygrad.scan.readers.chunks import CHUNK_BYTES


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_the_same_weights_in_any_two_formats_are_equal(first: str, second: str, tmp_path: Path) -> None:
    paths = []
    for name, folder in ((first, "a"), (second, "b")):
        (tmp_path / folder).mkdir()
        paths.append(FORMATS[name](tmp_path / folder, make_weights()))
    diff = diff_checkpoints(*paths)
    assert diff.is_empty
    assert diff.num_equal == 3


def test_every_kind_of_change_is_reported(tmp_path: Path) -> None:
    old = {"same": torch.randn(9), "gone": torch.ones(2), "moved": torch.randn(50, 60), "reshaped": torch.ones(4)}
    new = {
        "same": old["same"].clone(),
        "new": torch.ones(3),
        "moved": old["moved"].clone(),
        "reshaped": torch.ones(2, 2),
    }
    new["moved"][3, 5] += 0.5
    new["moved"][7, 7] = NAN
    save_file(old, tmp_path / "a.safetensors")
    save_file(new, tmp_path / "b.safetensors")

    diff = diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")

    assert (diff.removed, diff.added, diff.num_equal) == (("gone",), ("new",), 1)
    moved, reshaped = sorted(diff.changed, key=lambda one: one.name)
    assert (moved.num_changed, moved.num_new_nonfinite) == (2, 1)
    assert moved.max_change == pytest.approx(0.5, rel=1e-6)  # one rounding of float32
    assert moved.relative_change == pytest.approx(0.5 / float(old["moved"].double().norm()), rel=1e-6)
    assert reshaped.num_changed is None
    assert reshaped.shapes == ((4,), (2, 2))


def test_a_nan_in_both_files_is_not_a_change(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([NAN, INF, 1.0])}, tmp_path / "a.pt")
    torch.save({"x": torch.tensor([NAN, INF, 2.0])}, tmp_path / "b.pt")
    (one,) = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt").changed
    assert (one.num_changed, one.num_new_nonfinite, one.max_change, one.relative_change) == (1, 0, 1.0, 1.0)


def test_another_dtype_is_a_change_with_its_rounding(tmp_path: Path) -> None:
    tensor = torch.randn(100)
    torch.save({"x": tensor}, tmp_path / "a.pt")
    torch.save({"x": tensor.bfloat16()}, tmp_path / "b.pt")
    (one,) = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt").changed
    assert one.dtypes == ("float32", "bfloat16")
    assert 0 < one.relative_change < 2**-8  # bfloat16 has 8 bits


def test_another_layout_is_not_a_change(tmp_path: Path) -> None:
    tensor = torch.randn(700, 900)
    torch.save({"x": tensor}, tmp_path / "a.pt")
    torch.save({"x": tensor.t().contiguous().t()}, tmp_path / "b.pt")
    assert diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt").is_empty


def test_the_relative_change_from_zero_is_unbounded(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(3)}, tmp_path / "a.pt")
    torch.save({"x": torch.ones(3)}, tmp_path / "b.pt")
    (one,) = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt").changed
    assert one.relative_change == math.inf


def test_a_change_after_the_first_chunk_is_found(tmp_path: Path) -> None:
    tensor = torch.zeros(CHUNK_BYTES)
    torch.save({"x": tensor}, tmp_path / "a.pt")
    tensor[-1] = 1.0
    torch.save({"x": tensor}, tmp_path / "b.pt")
    (one,) = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt").changed
    assert one.num_changed == 1


def test_folders_of_several_files_are_compared_file_by_file(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(3)}, tmp_path / name / "model.safetensors")
        torch.save({"w": torch.tensor([value])}, tmp_path / name / "optimizer.pt")
    diff = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert [one.name for one in diff.changed] == ["optimizer.pt:w"]
    assert diff.num_equal == 1
