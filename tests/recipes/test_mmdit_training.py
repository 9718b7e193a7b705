"""The mmdit recipe learns, breaks as the document says without protection, and ends well with it; exactly resumed."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forks import run_forked
from steadygrad import GuardConfig, SnapshotConfig
from steadygrad.cli import main
from steadygrad.diagnose import is_replaying
from steadygrad.errors import TrainingHalted
from steadygrad.testing import corrupt_weight, poison_gradient
from steadygrad_recipes.mmdit import program
from steadygrad_recipes.mmdit.config import (
    DataConfig,
    LossConfig,
    MMDiTConfig,
    ModelConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainingConfig,
)
from steadygrad_recipes.mmdit.data import read_corpus
from steadygrad_recipes.mmdit.metrics import evaluate, measure_baseline
from steadygrad_recipes.mmdit.model import MMDiT
from steadygrad_recipes.mmdit.program import Description
from steadygrad_recipes.mmdit.sampling import draw_samples
from steadygrad_recipes.mmdit.synthetic import VOCAB, make_corpus
from steadygrad_recipes.mmdit.trainer import MMDiTTrainer


class Lines:
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def say(self, text: str = "", style: str = "") -> None:
        self.told.append(text)


def configure(*, protect: bool = True, **training: Any) -> MMDiTConfig:
    usual = {
        "dtype": "fp32",
        "warmup_steps": 5,
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "epochs": 100,
        "max_steps": 40,
        "eval_every": 20,
        "save_every": 10,
        "device": "cpu",
    }
    return MMDiTConfig(
        protect=protect,
        data=DataConfig(num_synthetic=256),
        model=ModelConfig(hidden_size=16, num_layers=1, num_heads=2),
        optimizer=OptimizerConfig(lr=3e-3),
        training=TrainingConfig(**{**usual, **training}),
        sampling=SamplingConfig(num_samples=3, num_steps=4),
    )


def make_training(config: MMDiTConfig, run_dir: Path | None = None) -> tuple[MMDiTTrainer, Any, Lines]:
    console, corpus = Lines(), program.load_corpus(config)
    return program.make_trainer(config, corpus, run_dir, console), program.make_loaders(config, corpus), console


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]


def read_last_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = max((run_dir / "checkpoints").glob("step_*"))
    return load_file(newest / "model.safetensors")


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# --- it learns ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[MMDiTTrainer, MMDiTConfig]:
    """A model that has seen the made-up corpus four times."""
    config = dataclasses.replace(
        configure(train_batch_size=32, gradient_accumulation_steps=1, max_steps=250, warmup_steps=20, eval_every=1000),
        data=DataConfig(num_synthetic=2048),
        model=ModelConfig(hidden_size=48, num_layers=1, num_heads=4),
        optimizer=OptimizerConfig(lr=6e-3),
        loss=LossConfig(latent_loss_weight=20.0),
    )
    trainer, loaders, _ = make_training(config)
    trainer.train(*loaders)
    return trainer, config


def test_it_learns_more_than_counting_words_and_looking_at_noise_gives(
    trained: tuple[MMDiTTrainer, MMDiTConfig],
) -> None:
    trainer, config = trained
    corpus = program.load_corpus(config)
    loader = program.make_loaders(config, corpus)[1]

    reached = trainer.evaluate(loader)
    baseline = measure_baseline(trainer.model, corpus.train, loader, config)

    assert reached["text_loss"] < 0.65 * baseline["text_loss"]
    assert reached["latent_loss"] < 0.65 * baseline["latent_loss"]


def test_a_healthy_training_has_no_incident(trained: tuple[MMDiTTrainer, MMDiTConfig]) -> None:
    assert trained[0].incidents == []


def test_latents_sampled_for_texts_show_what_the_texts_say(trained: tuple[MMDiTTrainer, MMDiTConfig]) -> None:
    trainer, config = trained
    texts = make_corpus(512, seed=0).val  # the codes are those of the seed; these rows were not trained on
    found = draw_samples(trainer.model, config.sampling, config.diffusion, texts=texts)

    nearest = torch.cdist(found.latents[:, 1], texts.latents[:, 1]).argmin(1)  # the second latent is the first shape
    is_right = texts.tokens[nearest, 3] == texts.tokens[:, 3]

    assert is_right.float().mean() > 0.8  # six shapes: chance is a sixth


def test_texts_sampled_for_latents_say_what_they_show(trained: tuple[MMDiTTrainer, MMDiTConfig]) -> None:
    trainer, config = trained
    rows = make_corpus(512, seed=0).val
    found = draw_samples(trainer.model, config.sampling, config.diffusion, latents=rows.latents)

    assert (found.tokens[:, 3] == rows.tokens[:, 3]).float().mean() > 0.8


def test_sampled_sentences_are_of_the_grammar(trained: tuple[MMDiTTrainer, MMDiTConfig]) -> None:
    trainer, config = trained
    sampling = dataclasses.replace(config.sampling, num_samples=64, num_steps=16)
    rows = draw_samples(trainer.model, sampling, config.diffusion)

    first = [[VOCAB[i] for i in row] for row in rows.tokens[:, :4].tolist()]
    sizes, colours, shapes = VOCAB[5:9], VOCAB[9:17], VOCAB[17:]
    right = [w[0] == "a" and w[1] in sizes and w[2] in colours and w[3] in shapes for w in first]
    assert sum(right) / len(right) > 0.8


def test_validation_hides_the_same_each_time_and_leaves_the_generators_alone() -> None:
    config = configure()
    trainer, loaders, _ = make_training(config)
    batches = list(loaders[1])  # a loader draws a seed for its workers
    before = torch.get_rng_state()

    one = evaluate(trainer.model, batches, config)
    two = evaluate(trainer.model, batches, config)

    assert one == two
    assert torch.equal(before, torch.get_rng_state())
    assert set(one) == {"loss", "text_loss", "latent_loss", "text_accuracy", "latent_cosine"}


def test_it_trains_in_bf16() -> None:
    trainer, loaders, _ = make_training(configure(dtype="bf16"))
    first = trainer.evaluate(loaders[1])

    trainer.train(*loaders)

    assert trainer.val_history[-1]["loss"] < 0.8 * first["loss"]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_cpu_that_faults_on_bf16_gets_fp32_and_a_word_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "half_matmul_works", lambda dtype: False)
    console = Lines()

    config = program.check_precision(configure(dtype="bf16"), console)

    assert config.training.dtype.value == "fp32"
    assert console.told == ["bf16 does not work on this CPU: training in fp32"]


# --- the record -----------------------------------------------------------------------------------------------------


def test_both_losses_of_each_step_are_in_the_record(tmp_path: Path) -> None:
    trainer, loaders, _ = make_training(configure(max_steps=4), tmp_path)

    trainer.train(*loaders)

    for step in read_steps(tmp_path):
        terms = step["extra"]
        assert step["loss"] == pytest.approx(terms["text_loss"] + 0.1 * terms["latent_loss"], rel=1e-5)  # fp32 sums
    assert len(read_steps(tmp_path)) == 4


def test_the_documents_ways_to_look_at_a_run_work_on_this_one(tmp_path: Path) -> None:
    trainer, loaders, _ = make_training(configure(max_steps=12), tmp_path)
    poison_gradient(trainer.model.words.weight, at={9}, value=math.inf)
    trainer.train(*loaders)

    found = subprocess.run(
        ["grep", "-E", "loss|NaN|ERROR", str(tmp_path / "train.log")], capture_output=True, text=True, check=True
    )
    with (tmp_path / "steps.jsonl").open() as file:
        losses = [json.loads(line)["loss"] for line in file]
    weights = read_last_weights(tmp_path)

    assert "ERROR step=4 nonfinite_gradient" in found.stdout
    assert len(losses) == 12
    assert not any(torch.isnan(p).any() for p in weights.values())


# --- the failure ----------------------------------------------------------------------------------------------------


def test_without_protection_one_inf_makes_every_later_step_nan() -> None:
    trainer, loaders, console = make_training(configure(protect=False))
    poison_gradient(trainer.model.words.weight, at={20}, value=math.inf)  # a microbatch of step 10

    trainer.train(*loaders)

    warned = [int(found[1]) for line in console.told if (found := re.fullmatch(WARNING, line))]
    assert warned == list(range(11, 40))  # the step of the Inf itself passes the check: its norm is Inf, not NaN
    assert math.isnan(trainer.val_history[-1]["loss"])
    assert not trainer.monitor_training_health()["parameters_healthy"]


WARNING = r"Warning: NaN gradient detected at step (\d+)"


def test_with_protection_that_step_is_skipped_and_the_training_ends_well() -> None:
    trainer, loaders, console = make_training(configure())
    first = trainer.evaluate(loaders[1])
    poison_gradient(trainer.model.words.weight, at={20}, value=math.inf)

    stats = trainer.train(*loaders)

    assert stats["num_skipped"] == 1
    place = console.told.index("ERROR: NaN/Inf gradient norm at step 10")
    assert console.told[place + 1] == "  Skipping batch and resetting gradients"
    assert trainer.val_history[-1]["loss"] < 0.8 * first["loss"]
    assert trainer.monitor_training_health()["overall_healthy"]


def test_a_skipped_step_leaves_no_trace() -> None:
    trainers = [make_training(configure(max_steps=3, gradient_accumulation_steps=1)) for _ in range(2)]
    poison_gradient(trainers[1][0].model.words.weight, at={2}, value=math.nan)
    at_two = {}

    def keep(record: Any) -> None:
        if record.step == 1:
            at_two.update({n: p.clone() for n, p in trainers[0][0].model.state_dict().items()})

    trainers[0][0].end_step = keep  # type: ignore[method-assign]
    for trainer, loaders, _ in trainers:
        trainer.train(*loaders)

    assert_equal_weights(trainers[1][0].model.state_dict(), at_two)


def spoil_weight(trainer: MMDiTTrainer, *, at: int) -> None:
    """A weight becomes NaN before the microbatch numbered `at`, once: a bad memory cell."""
    compute, weight = trainer.compute_loss, trainer.model.blocks[0].text.up.weight  # type: ignore[union-attr]
    calls = iter(range(10**6))

    def compute_loss(batch: Any) -> Any:
        if not is_replaying() and next(calls) == at:
            corrupt_weight(weight)  # type: ignore[arg-type]
        return compute(batch)

    trainer.compute_loss = compute_loss  # type: ignore[method-assign]


def test_without_protection_a_bad_weight_is_never_healed() -> None:
    trainer, loaders, console = make_training(configure(protect=False))
    spoil_weight(trainer, at=30)

    trainer.train(*loaders)

    warned = [line for line in console.told if line.startswith("Warning")]
    assert warned == [f"Warning: NaN gradient detected at step {step}" for step in range(15, 40)]
    assert math.isnan(trainer.val_history[-1]["loss"])


def test_with_protection_a_bad_weight_is_rolled_back_and_the_loss_that_saw_it_is_told() -> None:
    trainer, loaders, console = make_training(configure())
    first = trainer.evaluate(loaders[1])
    spoil_weight(trainer, at=30)

    stats = trainer.train(*loaders)

    assert stats["num_rollbacks"] == 1
    place = console.told.index("ERROR: Invalid loss at step 15: nan")
    assert console.told[place + 1] == "  text_loss: nan"
    latent = re.fullmatch(r"  latent_loss: (0\.\d+)", console.told[place + 2])
    assert latent is not None  # the weight is one of the text's stream, in the only block: latents did not see it
    assert trainer.val_history[-1]["loss"] < 0.8 * first["loss"]


def test_a_halted_training_goes_on_from_its_last_good_checkpoint_with_a_lower_rate(tmp_path: Path) -> None:
    """A model too large to be copied into host memory has nothing to roll back to: its checkpoints are what is left."""
    config = configure(save_every=5)
    console, corpus = Lines(), program.load_corpus(config)
    Description.of(config, corpus).write(tmp_path)
    no_copies = GuardConfig(snapshots=SnapshotConfig(enabled=False))
    model = program.make_trainer(config, corpus, None, console).model
    trainer = MMDiTTrainer(model, config, run_dir=tmp_path, guard_config=no_copies, tell=console.say)
    spoil_weight(trainer, at=60)

    trainer = program.train_with_recovery(trainer, corpus, program.make_loaders(config, corpus), console)

    recovered = [line for line in console.told if line.startswith("Recovering from the last good checkpoint")]
    assert len(recovered) == 1
    assert recovered[0].endswith("with lr 0.0018")
    assert Description.read(tmp_path).lr == pytest.approx(1.8e-3)
    assert trainer.guard is not None
    assert trainer.guard.num_steps == 40
    assert trainer.monitor_training_health()["overall_healthy"]


def test_a_training_that_may_not_recover_stays_halted(tmp_path: Path) -> None:
    config = configure(save_every=5, max_recoveries=0)
    console, corpus = Lines(), program.load_corpus(config)
    no_copies = GuardConfig(snapshots=SnapshotConfig(enabled=False))
    model = program.make_trainer(config, corpus, None, console).model
    trainer = MMDiTTrainer(model, config, run_dir=tmp_path, guard_config=no_copies, tell=console.say)
    spoil_weight(trainer, at=60)

    with pytest.raises(TrainingHalted, match="step 30"):
        program.train_with_recovery(trainer, corpus, program.make_loaders(config, corpus), console)


# --- going on -------------------------------------------------------------------------------------------------------

ARGUMENTS = [
    "--quick",
    "--data.num-synthetic=256",
    "--model.hidden-size=16",
    "--model.num-layers=1",
    "--model.num-heads=2",
    "--training.train-batch-size=8",
    "--training.max-steps=24",
    "--training.eval-every=8",
    "--training.save-every=4",
    "--training.ema-decay=0.9",
    "--training.device=cpu",
    "--sampling.num-steps=4",
]
KILLED = """
import os, signal, sys, torch
torch.set_num_threads(1)
from steadygrad.cli import main
from steadygrad_recipes.mmdit.trainer import MMDiTTrainer

def end_step(self, record):
    if record.step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

MMDiTTrainer.end_step = end_step
main(sys.argv[2:])
"""


def run_command(*arguments: str) -> int:
    return main(["train", "mmdit", *arguments])


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_command(*ARGUMENTS, "--run-dir", str(folder)) == 0
    return folder


@pytest.mark.parametrize("step", [9, 19])  # in the first epoch, of 14 steps, and in the second
def test_a_run_killed_by_the_system_goes_on_exactly(step: int, whole_run: Path, tmp_path: Path) -> None:
    killed = run_forked(KILLED, str(step), "train", "mmdit", *ARGUMENTS, "--run-dir", str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    assert run_command("--resume", "latest", "--run-dir", str(tmp_path)) == 0

    assert_equal_weights(read_last_weights(tmp_path), read_last_weights(whole_run))
    losses = [{step["step"]: step["loss"] for step in read_steps(folder)} for folder in (tmp_path, whole_run)]
    assert losses[0] == losses[1]
    samples = [load_file(folder / "samples" / "samples.safetensors") for folder in (tmp_path, whole_run)]
    assert_equal_weights(samples[0], samples[1])  # drawn from the average of the weights


def test_the_command_leaves_record_report_and_samples(whole_run: Path) -> None:
    assert (whole_run / "report.html").stat().st_size > 10_000
    texts = (whole_run / "samples" / "samples.txt").read_text().splitlines()
    samples = load_file(whole_run / "samples" / "samples.safetensors")
    assert len(texts) == len(samples["tokens"]) == 8
    assert set(" ".join(texts).split()) <= set(VOCAB)
    assert samples["latents"].isfinite().all()


def test_samples_are_drawn_again_without_the_data(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole_run / "samples" / "samples.txt").unlink()

    assert run_command("--sample", "--run-dir", str(whole_run), "--sampling.num-samples", "5") == 0

    assert "Sampling from the checkpoint of step " in capsys.readouterr().out
    assert len((whole_run / "samples" / "samples.txt").read_text().splitlines()) == 5


def test_samples_can_be_trained_on(whole_run: Path) -> None:
    corpus = read_corpus(DataConfig(path=str(whole_run / "samples"), val_fraction=0.5))

    assert corpus.shapes.latent_dim == 16


def test_a_folder_of_ones_own_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_corpus(64)
    program.write_rows(tmp_path / "data" / "a.safetensors", made.train)
    where = ("--run-dir", str(tmp_path / "run"), "--data.path", str(tmp_path / "data"))

    assert run_command(*ARGUMENTS, "--training.max-steps=3", *where) == 0

    assert "52 rows to train on, 6 to validate on" in capsys.readouterr().out


def test_rows_that_are_left_out_are_all_listed_in_the_run(tmp_path: Path) -> None:
    rows = make_corpus(64).train
    rows.latents[10:20, 0, 3] = math.nan
    program.write_rows(tmp_path / "data" / "a.safetensors", rows)
    where = ("--run-dir", str(tmp_path / "run"), "--data.path", str(tmp_path / "data"), "--data.skip-bad-rows")

    assert run_command(*ARGUMENTS, "--training.max-steps=1", *where) == 0

    listed = (tmp_path / "run" / "left_out.txt").read_text().splitlines()
    assert listed == [f"a.safetensors row {i}: a latent that is NaN or Inf" for i in range(10, 20)]


def test_the_documents_yaml_is_what_is_trained_with(tmp_path: Path) -> None:
    (tmp_path / "seed.yaml").write_text(
        "optimizer:\n  lr: 5e-5\n  grad_clip_norm: 0.5\n"
        "training:\n  warmup_steps: 2000\n  dtype: bf16\n  gradient_accumulation_steps: 2\n  train_batch_size: 4\n"
        "loss:\n  loss_scale: 1.0\n  text_loss_weight: 1.0\n  latent_loss_weight: 0.1\n"
    )
    where = ("--config", str(tmp_path / "seed.yaml"), "--run-dir", str(tmp_path / "run"))

    assert run_command(*ARGUMENTS[:5], "--training.max-steps=2", "--training.device=cpu", *where) == 0

    step = read_steps(tmp_path / "run")[0]
    assert step["num_microbatches"] == 2
    assert step["learning_rates"][0] == pytest.approx(5e-5 / 2001)
    assert step["clip_coefficient"] * step["grad_norm"] == pytest.approx(0.5, rel=1e-3)  # clip divides by norm + 1e-6


def test_a_warm_up_that_is_longer_than_the_training_is_told() -> None:
    console = Lines()

    program.warn_of_warmup(configure(warmup_steps=40), 1000, console)
    program.warn_of_warmup(configure(warmup_steps=39), 1000, console)

    assert console.told == [
        "The warm-up takes 40 steps and the training has 40: lr never gets to 0.003. Lower --training.warmup-steps, "
        "or train for longer."
    ]


def test_a_folder_that_is_not_there_is_told_with_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--run-dir", str(tmp_path / "run"), "--data.path", str(tmp_path / "nowhere"))

    assert run_command(*where) == 2

    assert (
        f"data.path is not a folder: {tmp_path / 'nowhere'}. Give a folder of .safetensors" in capsys.readouterr().err
    )


def test_a_run_directory_of_something_else_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--sample", "--run-dir", str(tmp_path)) == 2

    assert "is not a run of mmdit: mmdit.json cannot be used" in " ".join(capsys.readouterr())


def test_a_rate_lowered_by_a_recovery_stays_after_a_resume_unless_another_is_asked_for(tmp_path: Path) -> None:
    config, console = configure(max_steps=4, save_every=2), Lines()
    program.train(config, run_dir=tmp_path, resume=None, console=console)
    dataclasses.replace(Description.read(tmp_path), lr=1e-3).write(tmp_path)
    corpus = program.load_corpus(config)

    kept = program._start(config, corpus, tmp_path, "latest", console)
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=2e-3))
    asked = program._start(other, corpus, tmp_path, "latest", console)

    assert kept.recipe.optimizer.lr == 1e-3
    assert asked.recipe.optimizer.lr == 2e-3


def test_a_resume_that_does_not_fit_leaves_the_run_as_it_was(
    whole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("--resume", str(whole_run), "--model.hidden-size", "32") == 2
    assert "does not fit this training" in capsys.readouterr().err

    assert run_command("--sample", "--run-dir", str(whole_run)) == 0


def test_a_resume_with_another_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = make_corpus(64)
    program.write_rows(tmp_path / "data" / "a.safetensors", corpus.train)
    vocab = tmp_path / "data" / "vocab.json"
    vocab.write_text(json.dumps(VOCAB))
    where = ("--run-dir", str(tmp_path / "run"), "--data.path", str(tmp_path / "data"))
    assert run_command(*ARGUMENTS, "--training.max-steps=4", *where) == 0
    vocab.write_text(json.dumps(VOCAB[::-1]))

    assert run_command("--resume", "latest", *where, "--training.max-steps=8") == 2

    assert "was trained with another vocabulary" in capsys.readouterr().err
    assert Description.read(tmp_path / "run").vocab == list(VOCAB)


def test_an_average_of_the_weights_is_what_is_sampled() -> None:
    trainer, loaders, _ = make_training(configure(max_steps=4, ema_decay=0.5))

    trainer.train(*loaders)

    assert isinstance(trainer.trained, MMDiT)
    assert trainer.trained is not trainer.model
    assert torch.equal(trainer.trained.latent_mean, trainer.model.latent_mean)
