"""safe_compute_loss and stable_training_arguments, in real trainings of transformers."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from trainer_trainings import (
    NUM_STEPS,
    InOrder,
    Regression,
    is_finite,
    make_arguments,
    make_language_model,
    make_rows,
    make_texts,
    steps_of,
    train,
)

from steadygrad.adapters.transformers import (
    GuardCallback,
    SafeLoss,
    safe_compute_loss,
    stable_training_arguments,
)


class Scripted(Regression):
    """Returns a given loss at its third forward."""

    def __init__(self, third: Any) -> None:
        super().__init__()
        self.third, self.num_calls = third, 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        self.num_calls += 1
        result = super().forward(x, labels)
        return {**result, "loss": self.third(result["loss"])} if self.num_calls == 3 else result


LOSSES = {
    "the loss is None": lambda loss: None,
    "the loss is not finite": lambda loss: loss * math.inf,
    "the loss is 0": lambda loss: loss * 0.0,
}


@pytest.mark.parametrize("reason", LOSSES)
def test_an_unusable_loss_is_replaced_counted_and_reported(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    safe: list[SafeLoss] = []
    with caplog.at_level(logging.WARNING, logger="steadygrad"):
        trainer = train(
            Scripted(LOSSES[reason]), make_rows(), tmp_path, prepare=lambda t: safe.append(safe_compute_loss(t))
        )

    assert is_finite(trainer.model)
    assert safe[0].counts == {reason: 1}
    assert steps_of(trainer)[2]["loss"] == pytest.approx(1e-6)
    assert steps_of(trainer)[2]["grad_norm"] == 0.0
    (message,) = [r.getMessage() for r in caplog.records if r.name == "steadygrad"]
    assert message.startswith(f"step 2: {reason}")


def test_without_it_a_loss_of_none_ends_the_training_and_nan_ruins_it(tmp_path: Path) -> None:
    with pytest.raises((TypeError, AttributeError)):
        train(Scripted(LOSSES["the loss is None"]), make_rows(), tmp_path)
    assert not is_finite(train(Scripted(LOSSES["the loss is not finite"]), make_rows(), tmp_path).model)


def test_a_batch_with_only_masked_labels_gets_the_small_loss(tmp_path: Path) -> None:
    safe: list[SafeLoss] = []
    trainer = train(
        make_language_model(),
        make_texts(masked=(4, 5)),
        tmp_path,
        prepare=lambda trainer: safe.append(safe_compute_loss(trainer)),
    )
    assert safe[0].counts == {"every label is masked": 1}
    assert steps_of(trainer)[2]["loss"] == pytest.approx(1e-6)


def test_the_other_microbatches_of_the_step_still_count(tmp_path: Path) -> None:
    trainer = train(
        Scripted(LOSSES["the loss is not finite"]),
        make_rows(),
        tmp_path,
        prepare=safe_compute_loss,
        gradient_accumulation_steps=2,
    )
    assert is_finite(trainer.model)
    assert steps_of(trainer)[1]["grad_norm"] > 0.0


def test_the_callback_records_each_replacement(tmp_path: Path) -> None:
    callback = GuardCallback(run_dir=tmp_path / "run")
    train(Scripted(LOSSES["the loss is not finite"]), make_rows(), tmp_path, callback, prepare=safe_compute_loss)

    (finding,) = [f for f in callback.guard.findings if f.kind == "replaced_loss"]
    assert finding.step == 2
    assert "the loss is not finite" in (tmp_path / "run" / "incidents.jsonl").read_text()
    assert callback.guard.stats()["num_skipped"] == 0


def test_an_exception_passes_through_and_is_reported_once(tmp_path: Path) -> None:
    class Broken(InOrder):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("mine")

    callback, safe = GuardCallback(), []
    with pytest.raises(KeyError, match="mine"):
        train(
            Regression(),
            make_rows(),
            tmp_path,
            callback,
            kind=Broken,
            prepare=lambda trainer: safe.append(safe_compute_loss(trainer)),
        )
    assert safe[0].num_errors == 1
    assert [f.kind for f in callback.guard.findings] == ["exception"]


class Failing(InOrder):
    """Raises in some calls of `compute_loss`."""

    at: tuple[int, ...] = ()
    num_calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls in self.at:
            raise IndexError("a bad sample")
        return super().compute_loss(*args, **kwargs)


def test_an_exception_of_one_batch_becomes_a_finding_and_training_continues(tmp_path: Path) -> None:
    callback = GuardCallback()
    safe: list[SafeLoss] = []

    def prepare(trainer: Any) -> None:
        trainer.at = (3, 4, 6)
        safe.append(safe_compute_loss(trainer))

    trainer = train(Regression(), make_rows(), tmp_path, callback, kind=Failing, prepare=prepare)

    assert trainer.state.global_step == NUM_STEPS
    assert is_finite(trainer.model)
    assert safe[0].num_errors == 3
    assert [(f.kind, f.step) for f in callback.guard.findings if f.kind == "exception"] == [
        ("exception", 2),
        ("exception", 3),
        ("exception", 5),
    ]


def test_a_repeated_exception_passes_through(tmp_path: Path) -> None:
    def prepare(trainer: Any) -> None:
        trainer.at = (3, 4, 5)
        safe_compute_loss(trainer)

    callback = GuardCallback()
    with pytest.raises(IndexError, match="a bad sample"):
        train(Regression(), make_rows(), tmp_path, callback, kind=Failing, prepare=prepare)
    assert [f.kind for f in callback.guard.findings].count("exception") == 3


def test_a_healthy_run_is_bit_identical_and_evaluation_is_unchanged(tmp_path: Path) -> None:
    plain = train(Regression(), make_rows(), tmp_path)
    safe: list[SafeLoss] = []
    guarded = train(Regression(), make_rows(), tmp_path, prepare=lambda t: safe.append(safe_compute_loss(t)))

    assert all(map(torch.equal, plain.model.state_dict().values(), guarded.model.state_dict().values()))
    assert not safe[0].counts
    guarded.model.eval()
    rows = make_rows(2)
    bad = {"x": torch.stack([row["x"] for row in rows]) * math.nan, "labels": torch.zeros(2)}
    assert math.isnan(float(guarded.compute_loss(guarded.model, bad)))


def test_calling_it_twice_or_assigning_its_result_changes_nothing(tmp_path: Path) -> None:
    trainer = InOrder(model=Regression(), args=make_arguments(tmp_path), train_dataset=make_rows())
    first = safe_compute_loss(trainer)
    assert safe_compute_loss(trainer) is first
    trainer.compute_loss = safe_compute_loss(trainer)
    assert trainer.compute_loss is first
    trainer.train()
    assert trainer.state.global_step == NUM_STEPS


def test_a_nan_parameter_does_not_affect_the_small_loss(tmp_path: Path) -> None:
    model = Scripted(LOSSES["the loss is not finite"])
    trainer = InOrder(model=model, args=make_arguments(tmp_path), train_dataset=make_rows())
    safe = safe_compute_loss(trainer)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = math.nan
    rows = make_rows(2)
    batch = {"x": torch.stack([r["x"] for r in rows]), "labels": torch.stack([r["labels"] for r in rows])}
    loss = safe(model, batch)
    assert float(loss.detach()) == pytest.approx(1e-6)


# --- arguments ------------------------------------------------------------------------------------------------------


def test_stable_arguments_clip_warm_up_and_name_the_labels(tmp_path: Path) -> None:
    args = stable_training_arguments(output_dir=str(tmp_path))
    assert isinstance(args, transformers.TrainingArguments)
    assert args.max_grad_norm == 1.0
    assert args.get_warmup_steps(1000) == 50
    assert args.label_names == ["labels"]
    assert args.logging_nan_inf_filter, "if disabled, one NaN stays in the running sum forever"
    has_gpu = torch.cuda.is_available()
    assert (args.bf16 or args.fp16) == has_gpu


def test_overrides_win(tmp_path: Path) -> None:
    args = stable_training_arguments(
        output_dir=str(tmp_path), max_grad_norm=0.3, warmup_steps=7, bf16=True, use_cpu=True
    )
    assert (args.max_grad_norm, args.warmup_steps, args.bf16, args.fp16) == (0.3, 7, True, False)
    args = stable_training_arguments(output_dir=str(tmp_path), bf16=False, fp16=False, label_names=["y"])
    assert (args.bf16, args.fp16, args.label_names) == (False, False, ["y"])
