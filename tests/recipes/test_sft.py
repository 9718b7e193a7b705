"""The recipe `sft`, trained: it learns, it tells, it survives what its seed tells of, and it goes on after a kill."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_trainings import (
    Lines,
    assert_same_weights,
    is_finite,
    make_config,
    make_overflowing_folder,
    make_rows_with_long_prompts,
    make_rows_with_rare_sign,
    write_rows,
)

from forks import run_forked
from steadygrad.checkpoint.signals import EXIT_CODE
from steadygrad.cli import main
from steadygrad.cli.recipe_folder import remember_settings
from steadygrad.config.plain import to_plain
from steadygrad.errors import ConfigError, UsageError
from steadygrad_recipes.sft import predict
from steadygrad_recipes.sft.config import SftConfig
from steadygrad_recipes.sft.data import Example, make_examples

pytest.importorskip("transformers")
pytest.importorskip("peft")
from steadygrad.adapters.transformers import GradientMonitoringCallback, SafeLoss, safe_compute_loss
from steadygrad_recipes.sft.console import NormKeeper, describe_step, find_warnings, spell_logs
from steadygrad_recipes.sft.fine_tune import EpochEvents, Trained, make_arguments, train_model
from steadygrad_recipes.sft.model import TINY_TARGETS

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::steadygrad")]

FLAGS = {
    "num-synthetic": 700,
    "largest-amount": 99,
    "epochs": 5,
    "warmup-steps": 20,
    "max-length": 40,
    "max-new-tokens": 16,
    "num-answers": 70,
    "use-cpu": "true",
}


def fine_tune(run_dir: Path, **changes: Any) -> tuple[Trained, Lines]:
    lines = Lines()
    resume = changes.pop("resume", None)
    return train_model(make_config(**changes), run_dir=run_dir, console=lines, resume=resume), lines


# --- a healthy training, by the command line ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run directory of a training that went well, and what it printed."""
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    printed = io.StringIO()
    flags = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(printed):
        assert main(["train", "sft", "--run-dir", str(run_dir), *flags]) == 0
    return run_dir, printed.getvalue()


def test_it_learns_far_more_than_the_commonest_answer(learned: tuple[Path, str]) -> None:
    run_dir, _ = learned
    scores = json.loads((run_dir / "scores.json").read_text())
    assert scores["commonest_answer"]["accuracy"] < 0.1
    assert scores["scores"]["accuracy"] > 0.6
    assert scores["scores"]["answer_rate"] > 0.9
    assert scores["scores"]["num_prompts"] == 70


def test_every_line_of_the_log_has_a_positive_loss_and_a_finite_norm(learned: tuple[Path, str]) -> None:
    numbers = ", ".join(rf"'{name}': (\S+)" for name in ("loss", "grad_norm", "learning_rate", "epoch"))
    line = re.compile(rf"^\{{{numbers}, 'seconds_left': \d+\}}$", re.MULTILINE)
    found = [tuple(map(float, match)) for match in line.findall(learned[1])]
    assert len(found) == 20
    assert all(loss > 0 and math.isfinite(norm) for loss, norm, _, _ in found)
    assert found[-1][0] < 0.2 * found[0][0]
    assert "WARNING" not in learned[1]


def test_each_epoch_ends_with_its_norms_and_the_run_with_its_scores(learned: tuple[Path, str]) -> None:
    run_dir, printed = learned
    for epoch in range(1, 6):
        assert re.search(rf"^epoch {epoch}: gradient norm \S+ on average, \S+ at most$", printed, re.MULTILINE)
    assert len(re.findall(r"^\{'eval_loss': ", printed, re.MULTILINE)) == 5
    assert re.search(r"^accuracy=\S+, answer_rate=\S+ on 70 held-out prompts\.$", printed, re.MULTILINE)
    assert "incidents  none" in printed
    assert f"The report is in {run_dir / 'report.html'}" in printed


def test_the_run_directory_has_record_checkpoints_weights_and_report(learned: tuple[Path, str]) -> None:
    run_dir, _ = learned
    assert len((run_dir / "steps.jsonl").read_text().splitlines()) == 200
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["checkpoint-120", "checkpoint-160", "checkpoint-200"]
    assert (run_dir / "model" / "adapter_model.safetensors").is_file()
    assert (run_dir / "report.html").stat().st_size > 1000


def test_the_trained_model_answers_prompts_of_a_file(learned: tuple[Path, str], tmp_path: Path) -> None:
    rows = make_examples(700, 99)[:20]
    asked = write_rows(tmp_path / "asked.jsonl", rows)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", "sft", "--run-dir", str(learned[0]), "--predict", asked]) == 0
    right = [f"{row.prompt} -> {row.completion}" for row in rows]
    assert len(set(right) & set(printed.getvalue().splitlines())) > 12


def test_asking_an_untrained_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no trained model \(model/\). Train first"):
        predict(make_config(), "prompts.txt", run_dir=tmp_path, console=Lines())


# --- the seed, line by line -----------------------------------------------------------------------------------------


def test_the_arguments_are_those_of_the_seed(tmp_path: Path) -> None:
    args = make_arguments(SftConfig(model="some/folder"), tmp_path)
    use_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    use_fp16 = torch.cuda.is_available() and not use_bf16
    assert (args.bf16, args.fp16) == (use_bf16, use_fp16)
    assert (args.max_grad_norm, args.warmup_steps, args.learning_rate) == (1.0, 50, 0.0002)
    assert args.label_names == ["labels"]


def test_the_seeds_names_are_there() -> None:
    assert callable(GradientMonitoringCallback.on_log)
    assert callable(GradientMonitoringCallback.on_step_end)
    assert callable(safe_compute_loss)
    assert list(inspect.signature(train_model).parameters) == ["config", "run_dir", "console", "resume"]


def test_lines_are_spelled_as_in_the_seed() -> None:
    logs = {"loss": 2.27, "grad_norm": 1.55, "learning_rate": 0.0002, "epoch": 0.0, "total_flos": 1.0}
    names = ("loss", "grad_norm", "learning_rate", "num_skipped_steps", "epoch")
    assert spell_logs(logs, names) == "{'loss': 2.27, 'grad_norm': 1.55, 'learning_rate': 0.0002, 'epoch': 0.0}"
    assert describe_step(2.371, 0.42345) == "loss=2.37, grad=0.423"
    assert describe_step(2.371, 0.42345, 2e-4) == "loss=2.37, grad=0.423, lr=0.0002"


def test_a_line_with_numbers_that_cannot_be_brings_warnings() -> None:
    assert find_warnings({"loss": 2.27, "grad_norm": 1.55}) == []
    zero, norm = find_warnings({"loss": 0.0, "grad_norm": math.nan})[::-1]
    assert zero.startswith("WARNING: the loss is 0")
    assert norm == "WARNING: the gradient norm is NaN."
    assert find_warnings({"loss": math.inf, "grad_norm": 1.0}) == ["WARNING: the loss is Inf."]


def test_an_epoch_without_an_applied_step_has_no_norm() -> None:
    norms = NormKeeper()
    norms.add(math.nan, skipped=True)
    assert norms.take() == "no step was applied, 1 skipped"
    norms.add(1.0)
    norms.add(3.0)
    norms.add(math.inf, skipped=True)
    assert norms.take() == "gradient norm 2 on average, 3 at most, 1 skipped"


# --- masked batches -------------------------------------------------------------------------------------------------


def test_prompts_that_fill_everything_teach_nothing_and_with_protection_it_is_learned(tmp_path: Path) -> None:
    rows = make_rows_with_long_prompts(700)
    data = {"data": write_rows(tmp_path / "rows.jsonl", rows)}
    plain, lines = fine_tune(
        tmp_path / "off", **data, protect=False, long_prompts="cut_end", max_steps=30, num_answers=9
    )
    assert {line["loss"] for line in lines.log} == {0.0}, "as the seed's log read"
    assert sum(line.startswith("WARNING: the loss is 0") for line in lines.said) == len(lines.log) == 3
    assert plain.scores.accuracy == 0.0

    with pytest.raises(
        ConfigError, match=r"none of the 630 rows .* max_length=40. Raise it, or use long_prompts=cut_s"
    ):
        fine_tune(tmp_path / "refused", **data, long_prompts="cut_end")

    _, lines = fine_tune(tmp_path / "on", **data, max_steps=80, num_answers=1)
    assert "700 rows longer than max_length=40: cut_start." in lines.said
    assert all(line["loss"] > 0 for line in lines.log)
    assert lines.log[-1]["loss"] < 0.2 * lines.log[0]["loss"]


def test_masked_batches_among_others_are_hidden_by_the_plain_trainer_and_told_with_protection(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", make_rows_with_long_prompts(60))
    options = {"data": data, "long_prompts": "cut_end", "log_every": 1, "max_steps": 40, "num_answers": 1}
    _, lines = fine_tune(tmp_path / "off", **options, protect=False)
    zero = [number for number, line in enumerate(lines.log) if line["loss"] == 0.0]
    assert zero, "rows of one length share a batch, and these have no label"
    assert {lines.log[number]["grad_norm"] for number in zero} == {0.0}, "not NaN, as the seed has it"

    guarded, lines = fine_tune(tmp_path / "on", **options)
    assert isinstance(guarded.safe_loss, SafeLoss)
    assert guarded.safe_loss.counts == {"every label is masked": len(zero)}
    assert guarded.callback is not None
    told = [i.step for i in guarded.callback.guard.incidents if i.finding.kind == "replaced_loss"]
    assert told == zero
    assert all(line["loss"] > 0 and math.isfinite(line["grad_norm"]) for line in lines.log)
    assert any("57 rows to train on without a label left" in line for line in lines.said)

    skipped, _ = fine_tune(tmp_path / "skip", **options, safe_loss=False)
    assert skipped.callback is not None
    assert skipped.callback.guard.stats()["num_skipped"] == len(zero)


# --- fp16 overflow --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model and rows of which six do not fit into fp16; none of those to validate on."""
    folder = tmp_path_factory.mktemp("overflow")
    rows = make_rows_with_rare_sign(6)
    return {
        "model": make_overflowing_folder(folder / "model", rows),
        "data": write_rows(folder / "rows.jsonl", rows[:630]),
        "validation": write_rows(folder / "validation.jsonl", rows[630:]),
        "lora_targets": TINY_TARGETS,
    }


def test_an_fp16_overflow_ends_the_plain_training_as_the_seed_says(overflowing: dict[str, Any], tmp_path: Path) -> None:
    plain, lines = fine_tune(tmp_path, **overflowing, base_precision="fp16", protect=False, max_steps=60, num_answers=9)
    last = [(line["loss"], math.isnan(line["grad_norm"])) for line in lines.log[-2:]]
    assert last == [(0.0, True)] * 2, "an epoch has 40 steps: all that comes after it"
    assert not is_finite(tmp_path)
    assert (plain.scores.accuracy, plain.scores.answer_rate) == (0.0, 0.0)


def test_with_protection_the_training_with_fp16_overflows_learns(overflowing: dict[str, Any], tmp_path: Path) -> None:
    guarded, lines = fine_tune(tmp_path, **overflowing, base_precision="fp16")
    assert is_finite(tmp_path)
    assert guarded.safe_loss is not None
    assert guarded.safe_loss.counts["the loss is not finite"] > 5
    assert all(line["loss"] > 0 and math.isfinite(line["grad_norm"]) for line in lines.log)
    assert guarded.scores.accuracy > 0.3 > 5 * guarded.baseline.accuracy
    assert guarded.scores.answer_rate > 0.9


def test_without_the_safe_loss_the_guard_skips_and_names_the_line(overflowing: dict[str, Any], tmp_path: Path) -> None:
    guarded, _ = fine_tune(tmp_path, **overflowing, base_precision="fp16", safe_loss=False, max_steps=40, num_answers=1)
    assert guarded.callback is not None
    guard = guarded.callback.guard
    assert guard.stats()["num_skipped"] > 0
    cause = next(incident.cause for incident in guard.incidents if incident.cause is not None)
    assert cause.module is not None
    assert cause.module.endswith("layers.0.mlp")
    assert "65504" in cause.explanation


@pytest.mark.parametrize("better", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_in_a_format_with_the_range_nothing_overflows(
    better: dict[str, str], overflowing: dict[str, Any], tmp_path: Path
) -> None:
    guarded, _ = fine_tune(tmp_path, **overflowing, **better, max_steps=40, num_answers=1)
    assert guarded.callback is not None
    kinds = {incident.finding.kind for incident in guarded.callback.guard.incidents}
    assert not kinds - {"no_better_than_guessing"}, "40 steps teach it little"
    assert guarded.callback.guard.stats()["num_skipped"] == 0


def test_fp16_on_a_cpu_is_refused_with_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precision is fp16, and this training runs on the CPU.* Use bf16"):
        make_arguments(make_config(precision="fp16"), tmp_path)


# --- on and off -----------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {"num_synthetic": 200, "epochs": 2, "num_answers": 4, "lora_dropout": 0.1, "save_every": 4}
"""24 steps in two epochs."""


def test_a_quiet_guard_changes_no_bit_and_steadygrad_off_is_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SHORT | {"max_grad_norm": 1e9}
    fine_tune(tmp_path / "on", **options)
    fine_tune(tmp_path / "off", **options, protect=False)
    monkeypatch.setenv("STEADYGRAD", "off")
    switched, _ = fine_tune(tmp_path / "switched", **options)
    assert (switched.callback, switched.safe_loss) == (None, None)
    assert_same_weights(tmp_path / "on", tmp_path / "off")
    assert_same_weights(tmp_path / "switched", tmp_path / "off")


def test_every_weight_can_be_trained_and_the_result_is_a_model_folder_to_go_on_from(tmp_path: Path) -> None:
    first, _ = fine_tune(tmp_path / "first", **SHORT | {"lora_rank": 0})
    assert all(p.requires_grad for p in first.trainer.model.parameters())
    second, lines = fine_tune(tmp_path / "second", **SHORT | {"model": str(tmp_path / "first" / "model")})
    assert not (tmp_path / "second" / "base").exists()
    assert lines.log[0]["loss"] < 0.5 * math.log(384), "it starts from what was learned"
    assert {
        name for name, p in second.trainer.model.named_parameters() if p.requires_grad and "lora" not in name
    } == set()


def test_patience_ends_the_training_when_validation_does_not_improve(tmp_path: Path) -> None:
    stopped, _ = fine_tune(tmp_path, **SHORT | {"patience": 1, "eval_every": 1, "learning_rate": 1e-12, "epochs": 9})
    assert stopped.trainer.state.global_step < 30


# --- going on after a kill ------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from steadygrad.cli import main
from steadygrad_recipes.sft import checkpoints, fine_tune

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def on_step_end(self, args, state, control, **kwargs):
    if state.global_step == {at_step}:
        die()

def on_save(self, args, state, control, **kwargs):
    if state.global_step == {at_save}:  # files are there, their seal is not
        die()
    seal(self, args, state, control, **kwargs)

seal = checkpoints.SealCheckpoints.on_save
checkpoints.SealCheckpoints.on_save = on_save
fine_tune.EpochEvents.on_step_end = on_step_end
sys.exit(main({arguments!r}))
"""


STOPPED = """
import os, signal, sys
from steadygrad.cli import main
from steadygrad_recipes.sft import fine_tune

def on_step_end(self, args, state, control, **kwargs):
    if state.global_step == {at_step}:
        os.kill(os.getpid(), signal.SIGTERM)

fine_tune.EpochEvents.on_step_end = on_step_end
sys.exit(main({arguments!r}))
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    fine_tune(run_dir, **SHORT)
    return run_dir


@pytest.mark.parametrize(
    ("at_step", "at_save", "told"),
    [(18, -1, "checkpoint-16"), (-1, 12, "checkpoint-8")],
    ids=["in the second epoch", "while saving at the end of the first"],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    at_step: int, at_save: int, told: str, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", "sft", "--run-dir", str(run_dir), "--config", write_config(tmp_path)]
    code = KILLED.format(at_step=at_step, at_save=at_save, arguments=arguments)
    killed = run_forked(code)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (run_dir / "model").exists()

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", "sft", "--run-dir", str(run_dir), "--resume", "latest"]) == 0

    assert f"Resuming from {run_dir / 'checkpoints' / told}." in printed.getvalue()
    assert ("is passed over: it was never finished." in printed.getvalue()) == (at_save > 0)
    assert_same_weights(run_dir, uninterrupted)


def write_config(folder: Path) -> str:
    """SHORT as a file of settings."""
    values = {
        name: value for name, value in vars(make_config(**SHORT)).items() if isinstance(value, bool | int | float)
    }
    (folder / "config.yaml").write_text(json.dumps({**values, "tiny": {"width": 32}}))  # JSON is YAML
    return str(folder / "config.yaml")


def test_a_signal_is_answered_by_a_checkpoint_after_the_step_and_the_run_goes_on_to_the_same_bits(
    uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", "sft", "--run-dir", str(run_dir), "--config", write_config(tmp_path), "--save-every", "1000"]
    stopped = run_forked(STOPPED.format(at_step=18, arguments=arguments))
    assert stopped.returncode == EXIT_CODE, stopped.stderr[-3000:]
    assert (run_dir / "checkpoints" / "checkpoint-18").is_dir()
    assert json.loads((run_dir / "run.json").read_text())["ended"]["how"] == "stopped"

    assert main(["train", "sft", "--run-dir", str(run_dir), "--resume", "latest"]) == 0

    assert_same_weights(run_dir, uninterrupted)


def test_an_interrupted_run_is_not_recorded_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(EpochEvents, "on_step_end", interrupt, raising=False)

    with pytest.raises(KeyboardInterrupt):
        fine_tune(tmp_path, **SHORT)

    assert json.loads((tmp_path / "run.json").read_text())["ended"]["how"] == "stopped"


# --- wrong input, by the command line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "gone.jsonl"], "gone.jsonl does not exist. Give a file (.jsonl"),
        (["--model", "gone"], "gone is not a folder. Give the folder of a model"),
        (["--learning-rat", "1"], "learning-rate"),
        (["--resume", "latest"], "no whole checkpoint in"),
    ],
)
def test_wrong_input_ends_with_code_2_and_says_what_to_do(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "sft", "--run-dir", str(tmp_path / "run"), *flags]) == 2
    captured = capsys.readouterr()
    assert words in captured.out + captured.err


@pytest.mark.parametrize(
    ("words", "flag", "before"),
    [
        (["--lora-rank", "4"], "--lora-rank", "16"),
        (["--lora-rank", "0"], "--lora-rank", "16"),
        (["--lora-alpha", "8"], "--lora-alpha", "32.0"),
        (["--lora-targets", "q_proj"], "--lora-targets", "all-linear"),
        (["--tiny.width", "64"], "--tiny.width", "32"),
        (["--model", "elsewhere"], "--model", "none"),
        (["--seed", "5"], "--seed", "0"),
    ],
)
def test_a_resume_with_another_model_or_split_is_refused_before_anything_is_loaded(
    words: list[str], flag: str, before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with remember_settings(run, "sft", to_plain(make_config(**SHORT))):
        (run / "checkpoints" / "checkpoint-8").mkdir(parents=True)  # empty: loading it would be another error
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    assert main(["train", "sft", "--resume", str(run), *words]) == 2

    told = capsys.readouterr().err
    assert f"{flag} is {words[1]}" in told
    assert f"and {run} was trained with {before}. " in told
    assert f"Leave out {flag}, or start a new run." in told
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_bad_rows_are_told_before_anything_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Example("a", "b")] * 20)
    with path.open("a") as file:
        file.write('{"prompt": "a"}\n')
    assert main(["train", "sft", "--run-dir", str(tmp_path / "run"), "--data", str(path)]) == 2
    captured = capsys.readouterr()
    assert "1 of 21 rows cannot be used" in captured.out + captured.err
    assert not (tmp_path / "run" / "steps.jsonl").exists()
