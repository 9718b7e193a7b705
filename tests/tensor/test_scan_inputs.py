"""scan_inputs compared with plain torch, for every nesting and content of the batch."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import DEVICES

from steadygrad.facts import InputStats
from steadygrad.measure.inputs import MAX_TENSORS, scan_inputs

every_device = pytest.mark.parametrize("device", DEVICES)
Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Batch:
    image: Tensor
    label: Tensor


def look(*args: Any, **kwargs: Any) -> dict[str, InputStats]:
    return dict(scan_inputs(args, kwargs).read(7).tensors)


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_counts_of_a_floating_tensor_equal_plain_torch(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5, 7).to(device, dtype)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    x[1, 1] = 0.0
    finite = x[x.isfinite()].double()

    stats = look(x)["0"]

    assert stats == InputStats(numel=35, num_nonfinite=3, max_abs=finite.abs().max().item(), num_zeros=1)


@every_device
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_integer_labels_report_ignored_values(dtype: torch.dtype, device: str) -> None:
    labels = torch.tensor([[-100, 3, 0], [-100, 1, 0]], dtype=dtype, device=device)

    stats = look({"labels": labels})["labels"]

    assert stats == InputStats(numel=6, max_abs=100.0, num_zeros=2, num_ignored=2, is_floating=False)


@every_device
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_a_mask_is_binary(dtype: torch.dtype, device: str) -> None:
    mask = torch.tensor([1, 0, 1]).to(device, dtype)

    assert look(mask)["0"].is_binary
    assert look(mask)["0"].num_zeros == 1
    assert not look(torch.tensor([2, 0, 1]).to(device))["0"].is_binary


def test_the_smallest_integer_has_a_magnitude() -> None:
    assert look(torch.tensor([-(2**63)]))["0"].max_abs == 2.0**63


@pytest.mark.parametrize(
    ("args", "kwargs", "paths"),
    [
        ((torch.ones(1),), {}, ["0"]),
        (((torch.ones(1), torch.ones(1)),), {}, ["0", "1"]),
        ((torch.ones(1), torch.ones(1)), {}, ["0", "1"]),
        (({"x": [torch.ones(1), torch.ones(1)], "labels": torch.ones(1)},), {}, ["x.0", "x.1", "labels"]),
        ((nn.Linear(2, 2), {"x": torch.ones(1)}), {}, ["1.x"]),
        ((torch.ones(1),), {"labels": torch.ones(1)}, ["0", "labels"]),
        ((Batch(torch.ones(1), torch.ones(1)),), {}, ["image", "label"]),
        ((Point(torch.ones(1), 3.0),), {}, ["x"]),
        ((collections.UserDict(input_ids=torch.ones(1)),), {}, ["input_ids"]),
        (("text", 3, None), {}, []),
        ((), {}, []),
    ],
)
def test_paths_point_into_the_batch(args: Any, kwargs: Any, paths: list[str]) -> None:
    assert list(look(*args, **kwargs)) == paths


def test_the_number_of_scanned_tensors_is_limited() -> None:
    assert len(look([torch.ones(1)] * 100)) == MAX_TENSORS


def test_a_self_containing_batch_is_scanned() -> None:
    batch: list[Any] = [torch.ones(1)]
    batch.append(batch)

    assert "0" in look(batch)


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.empty(0), torch.ones(2, dtype=torch.cfloat)],
)
def test_unusual_tensors_do_no_harm(tensor: Tensor) -> None:
    assert look([tensor, torch.ones(3)])["1"].numel == 3


def test_a_failing_batch_gives_an_empty_scan() -> None:
    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no items today")

    assert look(Broken(x=torch.ones(1))) == {}


def test_partial_scans_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000).round()
    whole = look(x)

    monkeypatch.setattr("steadygrad.measure.rows.PIECE", 64)

    assert look(x) == whole


@every_device
def test_scanning_changes_neither_batch_nor_random_numbers(device: str) -> None:
    x = torch.randn(4, 4, device=device, requires_grad=True)
    before, state = x.detach().clone(), torch.get_rng_state()

    look(x)

    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad_fn is None
