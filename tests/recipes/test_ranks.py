"""The recipes on two ranks: one process on the joined batch, one decision, one record, exact resume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_recipes import train_all_ways, train_recipe
from torch import Tensor

from steadygrad.testing.ranks import run_ranks

NAMES = ["seo", "cod", "mmdit", "clip6d", "sft"]
WAYS = [(name, "ddp") for name in NAMES] + [(name, "fsdp") for name in ("seo", "cod", "mmdit")]
NEAR = {"rtol": 2e-3, "atol": 2e-5}
"""Sums in another order: AdamW divides by the root of a square, which makes small gradients' last digits visible."""


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **NEAR, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert one.keys() == other.keys()
    assert not different


@dataclass(frozen=True)
class Trained:
    """What both ranks made of a recipe."""

    name: str
    run_dir: Path
    ranks: list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    name, strategy = request.param
    run_dir = tmp_path_factory.mktemp(name)
    return Trained(name, run_dir, run_ranks(train_all_ways, 2, name, strategy, run_dir))


def test_two_ranks_train_like_one_process_on_the_joined_batch(trained: Trained, tmp_path: Path) -> None:
    first, second = (rank["whole"] for rank in trained.ranks)
    alone = train_recipe(trained.name, joined=2, run_dir=tmp_path)

    assert_equal(first["weights"], second["weights"])
    assert_close(first["weights"], alone["weights"])
    assert_close(first["averaged"], alone["averaged"])
    assert first["num_steps"] == alone["num_steps"] > 3
    if trained.name != "clip6d":  # whose validation loss is that of batches of this size
        for got, wanted in zip(first["val"], alone["val"], strict=True):
            assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
    assert [entry["loss"] for entry in first["train"]] == pytest.approx([e["loss"] for e in alone["train"]], rel=1e-3)


def test_a_fault_on_rank_1_is_skipped_by_both_and_recorded_once(trained: Trained) -> None:
    first, second = (rank["spoiled"] for rank in trained.ranks)
    folder = trained.run_dir / "spoiled"

    assert first["num_skipped"] == second["num_skipped"] == 1
    assert_equal(first["weights"], second["weights"])
    assert len((folder / "steps.jsonl").read_text().splitlines()) == first["num_steps"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(first["val"])


def test_a_training_of_two_ranks_that_was_cut_goes_on_bit_for_bit(trained: Trained) -> None:
    for rank in trained.ranks:
        assert_equal(rank["whole"]["weights"], rank["resumed"]["weights"])
        assert_equal(rank["whole"]["averaged"], rank["resumed"]["averaged"])
        assert rank["whole"]["val"] == rank["resumed"]["val"]
