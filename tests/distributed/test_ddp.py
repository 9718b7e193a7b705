"""Ranks in DistributedDataParallel decide as one: if one rank sees a fault, all skip, clip, slow down and roll back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_trainings import (
    NUM_STEPS,
    Training,
    assert_alike,
    assert_same,
    make_batches,
    make_model,
    mask_labels,
    poison_input,
    state_of,
    train_plainly,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad import Guard, GuardConfig, UsageError
from steadygrad.config import FixedNorm, Policy
from steadygrad.testing import poison_gradient
from steadygrad.testing.ranks import run_ranks


def train_stock(max_norm: float | None) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    for x, y in make_batches():
        nn.functional.cross_entropy(ddp(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return state_of(ddp.module, optimizer)


def train_beside_stock() -> tuple[dict[str, Any], dict[str, Tensor]]:
    training = Training(clip=None)
    training.run(make_batches())
    return training.report(), train_stock(None)


def test_a_quiet_guard_on_two_ranks_gives_the_weights_of_the_unguarded_loop() -> None:
    results = run_ranks(train_beside_stock, 2)
    assert_alike([guarded for guarded, _ in results], "incidents")
    for guarded, stock in results:
        assert_same(guarded["state"], stock)


class Lines(logging.Handler):
    """Collects log lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))


def train_and_listen() -> list[tuple[str, str]]:
    lines, logger = Lines(), logging.getLogger("steadygrad")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    Training(clip=None).run(poison_input(make_batches(), 3))
    return [(level, text) for level, text in lines.seen if "nonfinite" in text or "NaN" in text]


def test_a_common_finding_is_logged_as_a_warning_only_by_the_first_rank() -> None:
    first, second = run_ranks(train_and_listen, 2)
    assert "WARNING" in {level for level, _ in first}
    assert any("rank 1" in text for _, text in first), "wherever it began"
    about_all = [(level, text) for level, text in second if any(text == other for _, other in first)]
    assert about_all
    assert {level for level, _ in about_all} == {"INFO"}


def train_clipped() -> tuple[dict[str, Any], float]:
    training = Training(clip=FixedNorm(max_norm=0.1))
    training.run(make_batches())
    return training.report(), training.guard.stats()["num_clipped"]


def test_all_ranks_clip_the_same_and_like_one_process() -> None:
    results = run_ranks(train_clipped, 2)
    assert_alike([result for result, _ in results])
    assert [num for _, num in results] == [NUM_STEPS, NUM_STEPS]
    plain = train_plainly([make_batches(rank=rank) for rank in range(2)], max_norm=0.1)
    for name, value in plain.items():
        # The mean over two ranks is summed in another order than the mean over one batch.
        torch.testing.assert_close(results[0][0]["state"][name], value, rtol=1e-4, atol=1e-6)


def train_with_masked_labels() -> dict[str, Any]:
    training = Training(norm=True)
    training.run(mask_labels(make_batches(), 3))
    return training.report()


def test_a_loss_that_is_nan_on_one_rank_alone_is_skipped_by_all_and_names_the_rank() -> None:
    results = run_ranks(train_with_masked_labels, 2)
    assert_alike(results)
    for result in results:
        assert result["skipped"] == 1
        reports = [message for step, kind, message in result["incidents"] if kind == "nonfinite_loss" and step == 3]
        assert len(reports) == 1
        assert "it began on rank 1" in reports[0]


def skip_alone() -> dict[str, Tensor]:
    """Skip by the local loss, as usual loops do."""
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    for x, y in mask_labels(make_batches(), 3):
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        optimizer.zero_grad()
    return state_of(ddp.module, optimizer)


def test_without_exchanging_losses_the_ranks_would_diverge() -> None:
    first, second = run_ranks(skip_alone, 2)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def train_with_poisoned_input() -> dict[str, Any]:
    training = Training(norm=True)
    training.run(poison_input(make_batches(), 4, on_rank=2))
    return training.report()


def test_a_bad_batch_on_one_of_four_ranks_is_skipped_by_all_and_its_tensor_is_named_on_all() -> None:
    results = run_ranks(train_with_poisoned_input, 4)
    assert_alike(results)
    for rank, result in enumerate(results):
        assert result["skipped"] == 1
        messages = {kind: message for step, kind, message in result["incidents"] if step == 4}
        assert "it began on rank 2; rank 2: the batch holds NaN or Inf in item 0" in messages["nonfinite_loss"]
        assert ("nonfinite_input" in messages) == (rank == 2), "each rank reports its own data"


def train_with_poisoned_gradient(parameter: int) -> dict[str, Any]:
    def spoil(model: nn.Module) -> None:
        if dist.get_rank() == 1:
            poison_gradient(list(model.parameters())[parameter], at=(2, 5))

    training = Training(spoil=spoil)
    training.run(make_batches())
    return training.report()


def test_a_gradient_that_is_nan_on_one_rank_is_skipped_by_all_and_names_the_rank() -> None:
    results = run_ranks(train_with_poisoned_gradient, 2, 0)
    assert_alike(results, "incidents")
    assert results[0]["skipped"] == 2
    assert all("it began on rank 1" in message for _, _, message in results[0]["incidents"])


def test_a_gradient_from_an_unknown_rank_is_traced_the_next_time() -> None:
    results = run_ranks(train_with_poisoned_gradient, 2, 3)
    assert_alike(results, "incidents")
    first, second = (message for _, _, message in results[0]["incidents"])
    assert "began" not in first
    assert "it began on rank 1" in second


def train_until_rolled_back() -> dict[str, Any]:
    policy = Policy(nonfinite_steps_to_scale_lr=2, nonfinite_steps_to_rollback=3)
    training = Training(norm=True, policy=policy)
    batches = make_batches(20)
    for step in (9, 10, 11):
        batches = mask_labels(batches, step, on_rank=step % 2)
    training.run(batches)
    return training.report()


def test_all_ranks_lower_the_rate_and_roll_back_together() -> None:
    results = run_ranks(train_until_rolled_back, 2)
    assert_alike(results)
    assert results[0]["rollbacks"] == 1
    assert results[0]["skipped"] >= 3


def accumulate(*, sync_all: bool) -> dict[str, Any]:
    training = Training()
    batches = mask_labels(make_batches(12), 4)
    for first in range(0, 12, 3):
        for batch in batches[first : first + 2]:
            with training.ddp.no_sync() if not sync_all else torch.enable_grad():
                training.guard.backward(lambda b: training.loss(b) / 3, batch)
        training.guard.backward(lambda b: training.loss(b) / 3, batches[first + 2])
        training.guard.step()
    return training.report()


def test_accumulation_with_no_sync_skips_on_all_ranks_if_one_microbatch_is_bad() -> None:
    results = run_ranks(accumulate, 2, sync_all=False)
    assert_alike(results)
    assert results[0]["skipped"] == 1
    assert "it began on rank 1" in results[0]["incidents"][0][2]


def test_accumulation_that_synchronises_every_microbatch_behaves_the_same() -> None:
    results = run_ranks(accumulate, 2, sync_all=True)
    assert_alike(results)
    assert results[0]["skipped"] == 1


def drop_microbatches() -> dict[str, Any]:
    training = Training(drop_bad_microbatches=True)
    batches = mask_labels(make_batches(8), 2)
    for first in range(0, 8, 2):
        for batch in batches[first : first + 2]:
            training.guard.backward(lambda b: training.loss(b) / 2, batch)
        training.guard.step()
    return {**training.report(), "dropped": training.guard.stats()["num_dropped_microbatches"]}


def test_a_microbatch_that_is_bad_on_one_rank_is_dropped_on_all() -> None:
    results = run_ranks(drop_microbatches, 2)
    assert_alike(results, "dropped")
    assert results[0]["dropped"] == 1
    assert results[0]["skipped"] == 0


def drop_under_no_sync() -> str:
    training = Training(drop_bad_microbatches=True)
    try:
        with training.ddp.no_sync():
            training.guard.backward(training.loss, make_batches(1)[0])
    except UsageError as error:
        return str(error)
    return "accepted"


def test_dropping_microbatches_under_no_sync_is_refused_because_ranks_would_diverge() -> None:
    for result in run_ranks(drop_under_no_sync, 2):
        assert "drop_bad_microbatches" in result
        assert "no_sync" in result


class Branches(nn.Module):
    """Each rank uses one of two branches; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[dist.get_rank() % 2](x)


def train_branches() -> dict[str, Any]:
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    guard = Guard(ddp, optimizer)
    for x, y in mask_labels(make_batches(5), 2):
        guard.step(lambda x, y: nn.functional.cross_entropy(ddp(x), y), x, y)
    last = guard.last
    assert last is not None
    return {
        "state": state_of(ddp.module, optimizer),
        "rates": 0,
        "skipped": guard.stats()["num_skipped"],
        "rollbacks": 0,
        "last": (last.loss, last.grad_norm),
    }


def test_parameters_used_by_one_rank_or_none_keep_the_ranks_equal() -> None:
    results = run_ranks(train_branches, 2)
    assert_alike(results)
    assert results[0]["skipped"] == 1


def train_static() -> dict[str, Any]:
    training = Training(ddp={"static_graph": True, "gradient_as_bucket_view": True})
    training.run(mask_labels(make_batches(), 3))
    return training.report()


def test_a_static_graph_with_gradients_as_bucket_views_is_guarded_too() -> None:
    results = run_ranks(train_static, 2)
    assert_alike(results)
    assert results[0]["skipped"] == 1


def train_unevenly() -> dict[str, Any]:
    training = Training()
    batches = mask_labels(make_batches(), 2)[: NUM_STEPS - 2 * dist.get_rank()]
    with training.guard.join():
        training.run(batches)
    result = training.report()
    return {**result, "state": state_of(training.ddp.module), "num_steps": training.guard.stats()["num_steps"]}


def test_ranks_that_run_out_of_data_keep_participating_and_end_with_the_same_weights() -> None:
    first, second = run_ranks(train_unevenly, 2)
    assert_same(first["state"], second["state"])
    assert (first["num_steps"], second["num_steps"]) == (NUM_STEPS, NUM_STEPS - 2)
    assert first["skipped"] == second["skipped"] == 1


def make_guards_that_differ(kind: str) -> str:
    rank = dist.get_rank()
    model: nn.Module = nn.Linear(3, 2, bias=kind != "model" or rank == 0)
    if kind == "order":  # the same names on both
        model = nn.Module()
        for name in ("first", "second") if rank == 0 else ("second", "first"):
            model.register_parameter(name, nn.Parameter(torch.zeros(3)))
    config = GuardConfig(clip=FixedNorm(max_norm=1.0 + rank)) if kind == "config" else GuardConfig()
    try:
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    except UsageError as error:
        return str(error)
    return "accepted"


def test_different_ranks_get_an_error_on_every_rank_before_the_first_step() -> None:
    for result in run_ranks(make_guards_that_differ, 2, "model"):
        assert result.startswith("2 ranks train together, and the number of parameters of rank 1 differ")
    for result in run_ranks(make_guards_that_differ, 2, "order"):
        assert "the names or order of parameters of rank 1 differ" in result
    for result in run_ranks(make_guards_that_differ, 2, "config"):
        assert "the settings of rank 1 differ" in result


def make_guards_of_which_some_have_a_run_dir(run_dir: Path, with_one: int) -> str:
    model = nn.Linear(3, 2)
    own = run_dir if dist.get_rank() == with_one else None
    try:
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=own)
    except UsageError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("with_one", [0, 1])
def test_a_run_dir_on_only_one_rank_is_an_error_on_all(with_one: int, tmp_path: Path) -> None:
    for result in run_ranks(make_guards_of_which_some_have_a_run_dir, 2, tmp_path / "run", with_one):
        assert result.startswith(f"rank {with_one} has a run_dir and rank {1 - with_one} has none")


def validate_differently() -> tuple[Any, dict[str, Any]]:
    training = Training()
    training.run(make_batches(2))
    training.guard.validate(float(dist.get_rank()))
    return training.guard.best, training.report()


def test_the_validation_loss_is_the_mean_over_the_ranks() -> None:
    results = run_ranks(validate_differently, 2)
    assert [best for best, _ in results] == [(1, 0.5), (1, 0.5)]


def train_in_groups() -> dict[str, Any]:
    """Four ranks, two trainings: a NaN of one does not concern the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    training = Training(ddp={"process_group": groups[dist.get_rank() // 2]})
    training.run(mask_labels(make_batches(), 3, on_rank=3))
    return training.report()


def test_two_trainings_in_one_job_decide_independently() -> None:
    results = run_ranks(train_in_groups, 4)
    assert_alike(results[:2])
    assert_alike(results[2:])
    assert [result["skipped"] for result in results] == [0, 0, 1, 1]


def write_a_run(folder: Path) -> list[str]:
    training = Training(run_dir=folder)
    training.run(poison_input(make_batches(), 3))
    training.guard.close()
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_one_rank_writes_the_run_and_each_rank_its_own_facts(tmp_path: Path) -> None:
    names, _ = run_ranks(write_a_run, 2, tmp_path / "run")
    assert names == [
        "batches", "incidents.jsonl", "layers.jsonl", "rank_0.jsonl", "rank_1.jsonl", "run.json", "steps.jsonl",
        "train.log",
    ]  # fmt: skip
    folder = tmp_path / "run"
    assert len((folder / "steps.jsonl").read_text().splitlines()) == NUM_STEPS
    own = [(folder / f"rank_{rank}.jsonl").read_text() for rank in range(2)]
    assert [text.count('"loss"') >= NUM_STEPS for text in own] == [True, True]
    assert "nonfinite_input" not in own[0]
    assert "nonfinite_input" in own[1]
    assert "it began on rank 1" in (folder / "incidents.jsonl").read_text()
