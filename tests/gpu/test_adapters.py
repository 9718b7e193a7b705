"""The adapters on CUDA: fused optimizers, where the host learns of a skip one step late, and real fp16."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded here

import pytest
import torch
from torch import nn

from steadygrad import Guard, GuardConfig, Severity
from steadygrad.testing import poison_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))  # the small trainings of the CPU tests

GPU = {"accelerator": "gpu", "devices": 1}


# --- Lightning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_batch_leaves_no_trace_in_lightning(fused: bool) -> None:
    pytest.importorskip("lightning")
    import lightning_trainings as trainings

    from steadygrad.adapters.lightning import GuardCallback

    batches = trainings.make_batches(20)
    spoiled = [trainings.spoil(b, "nan") if i in (3, 4, 9, 19) else b for i, b in enumerate(batches)]
    kept = [b for i, b in enumerate(batches) if i not in (3, 4, 9, 19)]
    guarded, without, callback = trainings.Classifier(fused=fused), trainings.Classifier(fused=fused), GuardCallback()

    found = trainings.state_of(guarded, trainings.fit(guarded, spoiled, callback, log_every_n_steps=7, **GPU))
    expected = trainings.state_of(without, trainings.fit(without, kept, log_every_n_steps=7, **GPU))

    trainings.assert_equal(found, expected)  # including the learning rate, step by step
    assert sorted({i.step for i in callback.guard.incidents}) == [3, 4, 9, 19]


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_in_lightning_is_bit_identical_during_the_loss_scale_search(fused: bool) -> None:
    pytest.importorskip("lightning")
    import lightning_trainings as trainings
    from lightning.pytorch.plugins.precision import MixedPrecision

    from steadygrad.adapters.lightning import GuardCallback

    states, scales = [], []
    callback = GuardCallback()
    for callbacks in ([], [callback]):
        module = trainings.Classifier(fused=fused, interval="epoch", norm=False)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30, growth_interval=5)
        plugin = MixedPrecision("16-mixed", "cuda", scaler=scaler)
        trainer = trainings.fit(module, trainings.make_batches(32), *callbacks, plugins=[plugin], **GPU)
        states.append(trainings.state_of(module, trainer))
        scales.append(scaler.get_scale())

    assert scales[0] == scales[1]
    trainings.assert_equal(states[1], states[0])
    assert callback.guard.stats()["num_skipped"] > 0
    assert all(f.severity is Severity.INFO for f in callback.guard.findings)


def test_fused_clipping_under_fp16_works_in_lightning() -> None:
    pytest.importorskip("lightning")
    import lightning_trainings as trainings

    from steadygrad.adapters.lightning import GuardCallback

    module, callback = trainings.Classifier(fused=True), GuardCallback()
    trainings.fit(module, trainings.make_batches(32), callback, precision="16-mixed", gradient_clip_val=0.3, **GPU)
    assert trainings.is_finite(module)
    assert callback.guard.stats()["num_clipped"] > 16


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_quiet_training_of_transformers_is_bit_identical(optim: str, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import trainer_trainings as trainings

    from steadygrad.adapters.transformers import GuardCallback

    options = {"use_cpu": False, "optim": optim, "bf16": precision == "bf16"}
    callback = GuardCallback()
    plain = trainings.train(trainings.make_language_model(), trainings.make_texts(), tmp_path, **options)
    guarded = trainings.train(trainings.make_language_model(), trainings.make_texts(), tmp_path, callback, **options)

    trainings.assert_equal(trainings.state_of(guarded), trainings.state_of(plain))
    assert not callback.guard.incidents


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_bad_batch_leaves_no_trace_in_transformers_and_the_rate_does_not_advance(optim: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import trainer_trainings as trainings

    from steadygrad.adapters.transformers import GuardCallback

    options = {"use_cpu": False, "optim": optim}
    rows = trainings.spoil(trainings.make_rows(), 3, "nan")
    callback = GuardCallback()
    guarded = trainings.train(trainings.Regression(), rows, tmp_path, callback, **options)

    assert trainings.is_finite(guarded.model)
    rates = [line["learning_rate"] for line in trainings.steps_of(guarded)]
    assert rates[3] == rates[4]
    assert len(set(rates)) == trainings.NUM_STEPS - 1
    assert math.isnan(trainings.steps_of(guarded)[3]["loss"])
    assert sorted({i.step for i in callback.guard.incidents}) == [3]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_fp16_in_transformers_survives_overflow_and_the_rate_does_not_advance(optim: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import trainer_trainings as trainings

    from steadygrad.adapters.transformers import GuardCallback

    def poison(trainer: Any) -> None:
        poison_gradient(next(trainer.model.parameters()), at={4}, value=math.inf)

    callback = GuardCallback()
    texts = trainings.make_texts(32)
    trainer = trainings.train(
        trainings.make_language_model(),
        texts,
        tmp_path,
        callback,
        prepare=poison,
        use_cpu=False,
        fp16=True,
        optim=optim,
    )
    stats = callback.guard.stats()
    assert trainings.is_finite(trainer.model)
    assert stats["num_skipped"] >= 1
    rates = [line["learning_rate"] for line in trainings.steps_of(trainer)]
    assert len(set(rates)) == 16 - stats["num_skipped"]


def test_lora_on_cuda_skips_a_bad_gradient(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    import trainer_trainings as trainings

    from steadygrad.adapters.transformers import GuardCallback

    def poison(trainer: Any) -> None:
        poison_gradient(next(p for p in trainer.model.parameters() if p.requires_grad), at={2})

    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(trainings.make_language_model(), lora)
    callback = GuardCallback()
    trainer = trainings.train(model, trainings.make_texts(), tmp_path, callback, prepare=poison, use_cpu=False)

    assert trainings.is_finite(trainer.model)
    assert [(i.finding.kind, i.step) for i in callback.guard.incidents] == [("nonfinite_gradient", 2)]


def test_stable_arguments_choose_bf16_here(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from steadygrad.adapters.transformers import stable_training_arguments

    args = stable_training_arguments(output_dir=str(tmp_path))
    assert args.bf16 == (torch.cuda.get_device_capability() >= (8, 0))
    assert args.fp16 != args.bf16
    assert stable_training_arguments(output_dir=str(tmp_path), fp16=True).bf16 is False


# --- accelerate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hand_over", [False, True])
def test_fp16_in_accelerate_stays_finite_and_the_rate_advances_only_at_applied_steps(
    fused: bool, hand_over: bool
) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # another test may have selected the CPU
    kwargs = accelerate.utils.GradScalerKwargs(init_scale=2.0**30, growth_interval=5)
    accelerator = accelerate.Accelerator(mixed_precision="fp16", kwargs_handlers=[kwargs])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    handed = {"scheduler": scheduler} if hand_over else {}
    guard = Guard.from_accelerator(accelerator, model, optimizer, config=GuardConfig(clip=None), **handed)
    for _ in range(30):
        accelerator.backward(model(torch.randn(8, 6, device="cuda")).square().mean())
        optimizer.step()
        if not hand_over:
            scheduler.step()
        optimizer.zero_grad()
    stats = guard.stats()
    assert 0 < stats["num_skipped"] < 30
    assert stats["num_steps"] == 30
    assert stats["current_learning_rate"] == pytest.approx(0.01 * 0.9 ** (30 - stats["num_skipped"]))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
