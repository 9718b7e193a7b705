"""The recipes on two ranks: one process on the joined batch, one decision, one record, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_recipes import train_and_go_on, train_recipe
from torch import Tensor

from steadygrad.testing.ranks import run_ranks

NAMES = ["seo", "cod", "mmdit"]
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_like_one_process_on_the_joined_batch(name: str, strategy: str) -> None:
    first, second = run_ranks(train_recipe, 2, name, strategy=strategy)
    alone = train_recipe(name, joined=2)

    assert_equal(first["weights"], second["weights"])
    assert_close(first["weights"], alone["weights"])
    assert_close(first["averaged"], alone["averaged"])
    assert first["num_steps"] == alone["num_steps"] > 2
    for got, wanted in zip(first["val"], alone["val"], strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
    assert [entry["loss"] for entry in first["train"]] == pytest.approx([e["loss"] for e in alone["train"]], rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_on_rank_1_is_skipped_by_both_and_recorded_once(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(train_recipe, 2, name, run_dir=tmp_path, bad_step=1)

    assert first["num_skipped"] == second["num_skipped"] == 1
    assert_equal(first["weights"], second["weights"])
    steps = [line for line in (tmp_path / "steps.jsonl").read_text().splitlines() if line]
    assert len(steps) == first["num_steps"]
    metrics = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == len(first["val"])


@pytest.mark.parametrize("name", NAMES)
def test_a_training_of_two_ranks_that_was_cut_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    results: Any = run_ranks(train_and_go_on, 2, name, tmp_path, 3)

    for whole, resumed in results:
        assert_equal(whole["weights"], resumed["weights"])
        assert_equal(whole["averaged"], resumed["averaged"])
        assert whole["val"] == resumed["val"]
