"""The recipes on two ranks: one process on the joined batch, one decision, one record, exact resume."""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranked_recipes import train_all_ways, train_recipe
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, get_worker_info

from steadygrad.checkpoint.position import DataPositions
from steadygrad.state.random_state import capture_random
from steadygrad.testing.ranks import run_ranks
from steadygrad.trainer.ranks import SharedOrder, share_loader

NAMES = ["seo", "cod", "mmdit", "clip6d", "sft"]
WAYS = [(name, "ddp") for name in NAMES] + [(name, "fsdp") for name in ("seo", "cod", "mmdit", "clip6d")]
PRELOADED = (
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "transformers.trainer",
    "peft",
    "ranked_recipes",
    "steadygrad_recipes.clip6d.fit",
    "steadygrad_recipes.sft.fine_tune",
)
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


@pytest.fixture(scope="module")
def train_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """One process on the joined batch; once for all strategies."""
    return functools.cache(lambda name: train_recipe(name, joined=2, run_dir=tmp_path_factory.mktemp(name)))


def test_two_ranks_train_like_one_process_on_the_joined_batch(trained: Trained, train_alone: Any) -> None:
    first, second = (rank["whole"] for rank in trained.ranks)
    alone = train_alone(trained.name)

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


# --- random numbers of workers --------------------------------------------------------------------------------------


class Drawing(Dataset[list[float]]):
    """Returns its index, and numbers drawn from the three generators that an augmentation may use."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def check_seed(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    assert info.seed == torch.initial_seed()


def open_pass(positions: DataPositions, *, persistent: bool, own: bool) -> Any:
    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(
        Drawing(),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        persistent_workers=persistent,
        worker_init_fn=check_seed,
        generator=generator,
        collate_fn=list,
    )
    shared = share_loader(loader, seed=3)
    return lambda: positions.iterate(shared)


def draw_two_passes(persistent: bool, own: bool) -> list[list[list[float]]]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    torch.manual_seed(dist.get_rank())
    positions = DataPositions()
    begin = open_pass(positions, persistent=persistent, own=own)
    whole = list(begin())
    positions.end_epoch()
    second = begin()
    whole.append(next(second))
    saved, random_state = positions.state_dict(), capture_random(())
    whole.extend(second)
    resumed = DataPositions()
    resumed.load_state_dict(saved, random_state)
    rest = list(open_pass(resumed, persistent=persistent, own=own)())
    assert len(rest) == 2
    assert rest == whole[-2:]
    return whole


@pytest.mark.parametrize("own", [False, True], ids=["shared generator", "own generator"])
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_workers_of_each_rank_draw_their_own_numbers_over_one_order_and_resume_exactly(
    persistent: bool, own: bool
) -> None:
    ranks = run_ranks(draw_two_passes, 2, persistent, own)
    drawn = [number for batches in ranks for batch in batches for _, *numbers in batch for number in numbers]
    assert len(set(drawn)) == len(drawn) == 2 * 12 * 3
    generator = torch.Generator().manual_seed(3)
    found = [[index for index, *_ in batch] for pair in zip(*ranks) for batch in pair]
    for number in range(2):
        if number == 0 or not persistent:
            torch.empty((), dtype=torch.int64).random_(generator=generator)  # the seed of new workers
        order = list(RandomSampler(range(12), generator=generator)) if own else list(SharedOrder(12, generator))
        assert [index for batch in found[6 * number : 6 * number + 6] for index in batch] == order


# --- another number of ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip6d", "sft"])
@pytest.mark.parametrize("saved", [1, 2], ids=["1 saved", "2 saved"])
def test_a_framework_resumed_by_another_number_of_ranks_says_that_it_is_not_exact(
    name: str, saved: int, tmp_path: Path
) -> None:
    begin, go_on = functools.partial(train_recipe, crash_at=3), functools.partial(train_recipe, resume=True)
    for num, train in ((saved, begin), (3 - saved, go_on)):
        if num == 1:
            train(name, run_dir=tmp_path)
        else:
            run_ranks(functools.partial(train, run_dir=tmp_path), 2, name)

    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    told = [line["finding"]["message"] for line in lines if line["finding"]["kind"] == "resumed"]
    spelled = "2 ranks saved it and 1 resume: " if saved == 2 else "1 rank saved it and 2 resume: "
    assert [spelled in one for one in told] == [True]
