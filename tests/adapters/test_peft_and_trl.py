"""GuardCallback with LoRA and with trl's SFTTrainer, on a small random model and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_trainings import (
    NUM_STEPS,
    assert_equal,
    is_finite,
    make_language_model,
    make_texts,
    state_of,
    steps_of,
    train,
)

from steadygrad.adapters.transformers import GuardCallback, safe_compute_loss, stable_training_arguments
from steadygrad.testing import poison_gradient


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_quiet_lora_run_is_bit_identical(checkpointing: bool, tmp_path: Path) -> None:
    options = {"gradient_checkpointing": checkpointing, "gradient_accumulation_steps": 2, "label_names": ["labels"]}
    callback = GuardCallback()
    plain = train(with_lora(make_language_model()), make_texts(), tmp_path, **options)
    guarded = train(with_lora(make_language_model()), make_texts(), tmp_path, callback, **options)

    assert_equal(state_of(guarded), state_of(plain))
    assert not callback.guard.incidents


def test_a_bad_lora_gradient_is_skipped_and_named(tmp_path: Path) -> None:
    def poison(trainer: Any) -> None:
        name, weight = next((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad)
        poisoned.append(name)
        poison_gradient(weight, at={2})

    poisoned: list[str] = []
    plain = train(with_lora(make_language_model()), make_texts(), tmp_path, prepare=poison)
    assert not is_finite(plain.model)

    callback = GuardCallback()
    guarded = train(with_lora(make_language_model()), make_texts(), tmp_path, callback, prepare=poison)

    assert is_finite(guarded.model)
    (finding,) = [incident.finding for incident in callback.guard.incidents]
    assert (finding.kind, finding.step) == ("nonfinite_gradient", 2)
    assert poisoned[0] in finding.message


# --- trl ------------------------------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    """Make a tokenizer of words w0 to w27: nothing is downloaded."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(28)}}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_dialogues() -> Any:
    """Prompts and answers."""
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(NUM_STEPS * 2):
        words = [f"w{int(n)}" for n in torch.randint(28, (8,), generator=generator)]
        rows.append({"prompt": " ".join(words[:4]), "completion": " " + " ".join(words[4:])})
    return datasets.Dataset.from_list(rows)


def fine_tune(folder: Path, rows: Any, *callbacks: Any, prepare: Any = None, peft_config: Any = None) -> Any:
    trl = pytest.importorskip("trl")

    class InOrder(trl.SFTTrainer):
        def _get_train_sampler(self, *_args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args = stable_training_arguments(
        arguments_class=trl.SFTConfig,
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        max_length=16,
        max_grad_norm=1e9,
        warmup_steps=0,
        learning_rate=1e-2,
    )
    trainer = InOrder(
        model=make_language_model(eos_token_id=1, bos_token_id=1),
        args=args,
        train_dataset=rows,
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )
    if prepare is not None:
        prepare(trainer)
    trainer.train()
    return trainer


def test_a_quiet_sft_run_is_bit_identical(tmp_path: Path) -> None:
    callback = GuardCallback()
    plain = fine_tune(tmp_path, make_dialogues())
    guarded = fine_tune(tmp_path, make_dialogues(), callback)

    assert_equal(state_of(guarded), state_of(plain))
    assert not callback.guard.incidents
    assert callback.guard.stats()["num_steps"] == NUM_STEPS
    losses = [line["loss"] for line in steps_of(guarded)]
    assert losses == [line["loss"] for line in steps_of(plain)]


def test_a_bad_gradient_in_sft_with_lora_is_skipped(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def poison(trainer: Any) -> None:
        poison_gradient(next(p for p in trainer.model.parameters() if p.requires_grad), at={2})

    lora = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"]), "prepare": poison}
    assert not is_finite(fine_tune(tmp_path, make_dialogues(), **lora).model)

    callback = GuardCallback()
    trainer = fine_tune(tmp_path, make_dialogues(), callback, **lora)

    assert is_finite(trainer.model)
    assert [(i.finding.kind, i.step) for i in callback.guard.incidents] == [("nonfinite_gradient", 2)]


def mask_a_batch(trainer: Any) -> None:
    """Return a collator that masks every label of the fifth batch: trl itself drops rows without any."""
    collate, numbers = trainer.data_collator, iter(range(1000))

    def masking(rows: Any) -> Any:
        batch = collate(rows)
        if next(numbers) == 4:
            batch["labels"] = torch.full_like(batch["labels"], -100)
        return batch

    trainer.data_collator = masking


def test_a_masked_batch_in_sft_is_a_silent_zero_and_is_reported(tmp_path: Path) -> None:
    rows = make_dialogues()
    assert steps_of(fine_tune(tmp_path, rows, prepare=mask_a_batch))[4]["loss"] == 0.0

    callback = GuardCallback()
    fine_tune(tmp_path, rows, callback, prepare=mask_a_batch)

    assert ("zero_loss", 4) in [(f.kind, i.step) for i in callback.guard.incidents for f in i.findings]


def test_an_sft_run_without_any_label_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def mask_all(trainer: Any) -> None:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: {**(batch := collate(rows)), "labels": batch["labels"] * 0 - 100}

    with caplog.at_level("WARNING", logger="steadygrad"):
        fine_tune(tmp_path, make_dialogues(), GuardCallback(), prepare=mask_all)
    assert sum("loss and gradient are exactly 0" in record.getMessage() for record in caplog.records) == 1


def test_a_masked_batch_in_sft_gets_the_small_loss(tmp_path: Path) -> None:
    def prepare(trainer: Any) -> None:
        mask_a_batch(trainer)
        safe.append(safe_compute_loss(trainer))

    safe: list[Any] = []
    callback = GuardCallback()
    trainer = fine_tune(tmp_path, make_dialogues(), callback, prepare=prepare)

    assert safe[0].counts == {"every label is masked": 1}
    assert [i.step for i in callback.guard.incidents if i.finding.kind == "replaced_loss"] == [4]
    assert steps_of(trainer)[4]["loss"] == pytest.approx(1e-6)


def reinforce(folder: Path, reward: Any, callback: GuardCallback) -> None:
    """Train with trl's GRPO and this reward function."""
    trl = pytest.importorskip("trl")
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "max_steps": 4}
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True}
    trl.GRPOTrainer(
        model=make_language_model(eos_token_id=1, bos_token_id=1),
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(folder), **options, **quiet),
        train_dataset=make_dialogues(),
        processing_class=make_tokenizer(),
        callbacks=[callback],
    ).train()


def test_identical_rewards_log_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="steadygrad"):
        reinforce(tmp_path, lambda completions, **_: [1.0] * len(completions), GuardCallback())
    (message,) = [text for text in caplog.messages if "loss and gradient are exactly 0" in text]
    assert "rewards differ within a group" in message


def test_an_exception_of_the_reward_passes_through_and_is_recorded(tmp_path: Path) -> None:
    def reward(**_: Any) -> list[float]:
        raise ValueError("the judge does not answer")

    callback = GuardCallback()
    with pytest.raises(ValueError, match="the judge does not answer"):
        reinforce(tmp_path, reward, callback)
    (finding,) = callback.guard.findings
    assert (finding.kind, finding.step) == ("exception", 0)
    assert "the judge does not answer" in finding.message
