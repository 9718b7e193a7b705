"""DeepSpeed's ZeRO, guarded: a quiet guard changes no bit, and one rank's bad batch is skipped by all of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_trainings import (
    BAD_STEP,
    DEEPSPEED,
    make_engine,
    make_model,
    mask_labels,
    poison_gradient,
    poison_input,
    report,
    run,
    state_of,
)
from ranked_trainings import assert_same
from torch import Tensor, nn

from steadygrad import ConfigError, FixedNorm, Guard, GuardConfig, UsageError, ZClip
from steadygrad.facts import Action
from steadygrad.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (pip install deepspeed)"
)

PRELOADED = DEEPSPEED
STAGES = [(1, "fp32", False), (2, "fp32", False), (3, "fp32", False), (2, "bf16", True), (3, "bf16", True)]
"""Stage, precision, and whether the optimizer is offloaded to the host."""


# --- law 1: a quiet guard is invisible, and a skipped batch leaves no trace -------------------------------------------


def train_beside_plain(stage: int, dtype: str, offload: bool) -> dict[str, Any]:
    settings = {"offload": offload, "share": 2, "gradient_clipping": 0.5}
    plain = make_engine(stage, dtype, **settings)
    run(plain, share=2)
    shorter = make_engine(stage, dtype, **settings)
    run(shorter, share=2, without=BAD_STEP)
    guarded = make_engine(stage, dtype, **settings)
    guard = Guard.from_deepspeed(guarded)
    run(guarded, share=2)
    quiet = report(guard, guarded)
    faulty = make_engine(stage, dtype, **settings)
    guard = Guard.from_deepspeed(faulty)
    run(faulty, share=2, spoil=poison_input)
    return {
        "plain": state_of(plain),
        "shorter": state_of(shorter),
        "quiet": quiet,
        "faulty": report(guard, faulty),
    }


@pytest.mark.parametrize(("stage", "dtype", "offload"), STAGES)
def test_a_quiet_guard_changes_no_bit_and_a_bad_batch_of_one_rank_leaves_none(
    stage: int, dtype: str, offload: bool
) -> None:
    for result in run_ranks(train_beside_plain, 2, stage, dtype, offload):
        assert not torch.allclose(make_model(half=dtype != "fp32")[0].weight, result["plain"]["0.weight"], atol=0.01)
        assert_same(result["quiet"]["state"], result["plain"])
        assert (result["quiet"]["skipped"], result["quiet"]["incidents"]) == (0, [])
        assert_same(result["faulty"]["state"], result["shorter"])
        assert result["faulty"]["skipped"] == result["faulty"]["engine_skipped"] == 1
        step, kind, message = result["faulty"]["incidents"][-1]
        assert (step, kind) == (BAD_STEP, "nonfinite_loss")
        assert "it began on rank 1" in message


def train_with_loss_alone_bad(stage: int) -> dict[str, Any]:
    shorter, faulty, other = make_engine(stage), make_engine(stage), make_engine(stage)
    run(shorter, without=BAD_STEP)
    guard = Guard.from_deepspeed(faulty)
    run(faulty, spoil=mask_labels)
    second = Guard.from_deepspeed(other)
    run(other, spoil=poison_gradient)
    return {"shorter": state_of(shorter), "loss": report(guard, faulty), "gradient": report(second, other)}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_only_the_loss_or_only_the_gradient_is_bad_and_the_step_is_skipped(stage: int) -> None:
    for result in run_ranks(train_with_loss_alone_bad, 2, stage):
        for name, kind in (("loss", "nonfinite_loss"), ("gradient", "nonfinite_gradient")):
            assert_same(result[name]["state"], result["shorter"])
            step, found, message = result[name]["incidents"][-1]
            assert (step, found) == (BAD_STEP, kind)
            assert "it began on rank 1" in message


# --- numbers ----------------------------------------------------------------------------------------------------------


def measure(stage: int, dtype: str) -> tuple[dict[str, Any], dict[str, float], dict[str, Tensor]]:
    from deepspeed.utils import safe_get_full_grad

    engine = make_engine(stage, dtype)
    guard = Guard.from_deepspeed(engine)
    run(engine, steps=2)
    grads: dict[str, Tensor] = {}
    step = engine.optimizer.step

    def look() -> None:
        grads.update({n: safe_get_full_grad(p).double() for n, p in engine.module.named_parameters()})
        step()

    engine.optimizer.step = look
    run(engine, steps=1)
    table = guard._judgement.last_reading.gradients
    norms = {name: table.row(i).norm for i, name in enumerate(table.names)}
    return report(guard, engine), norms, grads


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_norms_over_partitions_equal_those_of_whole_gradients(stage: int, dtype: str) -> None:
    for result, norms, grads in run_ranks(measure, 2, stage, dtype):
        assert norms.keys() == grads.keys()
        for name, gradient in grads.items():
            assert norms[name] == pytest.approx(float(gradient.norm()), rel=1e-5)  # float32 sums of the engine
        assert result["norm"] == pytest.approx(float(result["engine_norm"]), rel=1e-5)


def train_in_fp16() -> dict[str, Any]:
    scale = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}}
    plain, guarded, faulty = (make_engine(2, "fp16", **scale) for _ in range(3))
    run(plain)
    guard = Guard.from_deepspeed(guarded)
    run(guarded)
    quiet = report(guard, guarded)
    guard = Guard.from_deepspeed(faulty)
    before = faulty.optimizer.loss_scale
    batches = [(torch.full((8, 6), torch.nan, dtype=torch.float16), torch.zeros(8, dtype=torch.long))]
    for x, y in batches:
        faulty.backward(nn.functional.cross_entropy(faulty(x).float(), y))
        faulty.step()
    return {
        "plain": state_of(plain),
        "quiet": quiet,
        "plain_skipped": plain.skipped_steps,
        "scales": (plain.optimizer.loss_scale, guarded.optimizer.loss_scale),
        "after_nan": (before, faulty.optimizer.loss_scale, faulty.skipped_steps),
    }


def test_the_engines_loss_scale_search_is_unchanged_and_a_bad_loss_does_not_lower_it() -> None:
    for result in run_ranks(train_in_fp16, 2):
        assert result["plain_skipped"] > 0  # the scale starts too high by default
        assert_same(result["quiet"]["state"], result["plain"])
        assert result["quiet"]["skipped"] == result["plain_skipped"]
        assert {severity for _, severity in result["quiet"]["findings"]} <= {"info"}
        assert result["scales"][0] == result["scales"][1]
        before, after, skipped = result["after_nan"]
        assert (before, skipped) == (after, 1)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_load(stage: int, folder: str) -> dict[str, Any]:
    engine = make_engine(stage)
    guard = Guard.from_deepspeed(engine)
    run(engine, spoil=poison_input)
    is_saved = engine.save_checkpoint(folder, "good", {"mine": 1})
    part = next(iter(guard._stages.drive.optimizer.list_state()))[1]  # type: ignore[union-attr]
    if part.numel():
        part.view(-1)[0] = torch.inf
    refused = engine.save_checkpoint(folder, "bad")
    resumed = make_engine(stage)
    second = Guard.from_deepspeed(resumed)
    _, mine = resumed.load_checkpoint(folder)
    return {
        "saved": (is_saved, refused),
        "failed": [f.message for f in guard.findings if f.kind == "checkpoint_failed"],
        "mine": (mine["mine"], "steadygrad" in mine),
        "steps": (guard.num_steps, second.num_steps),
        "tally": (second.stats()["num_steps"], second.stats()["num_skipped"]),
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engines_checkpoints_include_the_guard_and_nonfinite_ones_are_refused(stage: int, tmp_path: Path) -> None:
    for result in run_ranks(save_and_load, 2, stage, str(tmp_path)):
        assert result["saved"] == (True, False)
        assert len(result["failed"]) == 1
        assert "0.weight on rank 0" in result["failed"][0]
        assert result["mine"] == (1, False)
        assert result["steps"] == (6, 6)
        assert result["tally"] == (6, 1)
    assert (tmp_path / "latest").read_text() == "good"
    assert not (tmp_path / "bad").exists()


# --- what is refused --------------------------------------------------------------------------------------------------


def ask_for_too_much(folder: str) -> list[str]:
    engine = make_engine(2, gradient_clipping=1.0)
    errors = []
    for config in (
        GuardConfig(clip=ZClip()),
        GuardConfig(on_nonfinite=Action.SANITIZE),
        GuardConfig(drop_bad_microbatches=True),
    ):
        with pytest.raises(ConfigError) as caught:
            Guard.from_deepspeed(engine, config=config)
        errors.append(str(caught.value))
    guard = Guard.from_deepspeed(engine, config=GuardConfig(clip=FixedNorm(max_norm=1.0)), run_dir=folder)
    for call in (guard.save, guard.resume, lambda: guard.step(engine(torch.ones(8, 6)).sum())):
        with pytest.raises(UsageError) as misused:
            call()
        errors.append(str(misused.value))
    with pytest.raises(UsageError) as given:
        Guard.from_deepspeed(engine.module)
    errors.append(str(given.value))
    guard.close()
    return errors


def test_unsupported_settings_of_an_engine_are_refused_with_advice(tmp_path: Path) -> None:
    first, second = run_ranks(ask_for_too_much, 2, str(tmp_path))
    assert first == second
    result = iter(first)
    assert "gradient_clipping=1" in next(result)
    assert "on_nonfinite" in next(result)
    assert "drop_bad_microbatches" in next(result)
    assert "engine.save_checkpoint" in next(result)
    assert "engine.load_checkpoint" in next(result)
    assert "engine.backward(loss)" in next(result)
    assert "deepspeed.initialize" in next(result)
