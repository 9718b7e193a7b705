"""The training learns, survives the explosion that ended the original in stage 2, and goes on exactly after kill -9."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steadygrad.checkpoint import CheckpointStore
from steadygrad.cli import main
from steadygrad.errors import UsageError
from steadygrad.testing import poison_batches, poison_gradient
from steadygrad_recipes.cod import QUICK, CodConfig, predict, train
from steadygrad_recipes.cod.data import LateFaults, MadeDataset, PairDataset, open_datasets, open_loaders
from steadygrad_recipes.cod.folder import Pair
from steadygrad_recipes.cod.metrics import MaskScores
from steadygrad_recipes.cod.pictures import encode_png
from steadygrad_recipes.cod.recipe import find_best
from steadygrad_recipes.cod.trainer import CodTrainer

TINY: dict[str, Any] = {
    **QUICK,
    "num_made": 24,
    "batch_size": 3,  # eight batches an epoch
    "epochs": 3,
    "stage1_epochs": 1,
    "num_pictures": 2,
    "device": "cpu",
}


class Lines:
    """A console that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str = "", style: str = "") -> None:
        self.lines += text.split("\n")


def train_tiny(trainer: CodTrainer, *, spoil: set[int] | None = None) -> dict[str, Any]:
    train_set, test_set, _ = open_datasets(trainer.cod)
    loader, val_loader = open_loaders(trainer.cod, train_set, test_set)
    batches = list(poison_batches(loader, at=spoil)) if spoil else loader
    return trainer.train(batches, val_loader)


def is_finite(trainer: CodTrainer) -> bool:
    return all(bool(p.isfinite().all()) for p in trainer.model.state_dict().values() if p.is_floating_point())


# --- it learns -------------------------------------------------------------------------------------------------------


def find_best_constant(num: int, size: int, test: MadeDataset, seed: int) -> float:
    """The IoU of the one mask that, shown for every image, does best: where objects mostly lie."""
    mean = MadeDataset(num, size, seed).masks.mean(0, keepdim=True)
    best = 0.0
    for percent in range(0, 100, 5):
        scores = MaskScores()
        scores.add((mean >= percent / 100).float().expand(len(test), -1, -1, -1), test.masks)
        best = max(best, scores.mean()["iou"])
    return best


def test_it_learns_more_than_where_objects_lie() -> None:
    config = CodConfig(**{**QUICK, "num_made": 64, "epochs": 5, "stage1_epochs": 1, "device": "cpu"})
    trainer = CodTrainer(config)
    stats = train_tiny(trainer)
    test = open_datasets(config)[1]
    assert isinstance(test, MadeDataset)
    constant = find_best_constant(config.num_made, config.image_size, test, config.seed)
    assert stats["val_history"][-1]["iou"] > constant + 0.1, constant
    assert stats["val_history"][-1]["s_measure"] > stats["val_history"][0]["s_measure"] + 0.05
    assert [one["stage"] for one in stats["val_history"]] == ["stage 1"] + ["stage 2"] * 4


# --- the explosion of stage 2 ----------------------------------------------------------------------------------------


def make_exploding(tell: Any, **changes: Any) -> CodTrainer:
    """One weight's gradient becomes Inf in batch 5 of the first epoch of stage 2."""
    trainer = CodTrainer(CodConfig(**{**TINY, **changes}), tell=tell)
    batches_before = 8 * trainer.cod.stage1_epochs
    weight = trainer.model.get_parameter("decoder.laterals.0.weight")
    poison_gradient(weight, at={batches_before + 5}, value=math.inf)
    return trainer


EXPLOSION = [
    "❌ NaN/Inf detected in gradients at batch 5!",
    "   Gradient norm: inf",
    "   This indicates gradient explosion.",
]


def test_without_protection_the_explosion_ends_the_training() -> None:
    console = Lines()
    trainer = make_exploding(console.say, protect=False)
    with pytest.raises(ValueError, match=r"^Training stopped due to NaN/Inf gradients\.$"):
        train_tiny(trainer)
    assert console.lines[-3:] == EXPLOSION
    assert len(trainer.train_history) == 1  # it never saw the end of stage 2's first epoch


def test_with_protection_the_same_training_goes_on_to_its_end() -> None:
    console = Lines()
    trainer = make_exploding(console.say)
    stats = train_tiny(trainer)
    at = console.lines.index(EXPLOSION[0])
    assert console.lines[at : at + 4] == [*EXPLOSION, "   The step was skipped, no weight has changed (step 13)."]
    assert stats["num_skipped"] == 1
    assert len(stats["val_history"]) == 3
    assert all(math.isfinite(one["loss"]) for one in (*stats["train_history"], *stats["val_history"]))
    assert is_finite(trainer)
    assert trainer.monitor_training_health()["overall_healthy"]


def test_an_explosion_inside_an_accumulated_step_costs_that_step_alone() -> None:
    console = Lines()
    trainer = make_exploding(console.say, accumulation_steps=2)
    stats = train_tiny(trainer)
    assert "❌ NaN/Inf detected in gradients at batch 5!" in console.lines  # batches 4 and 5 make the step
    assert (stats["num_skipped"], stats["num_steps"]) == (1, 12)
    assert is_finite(trainer)


def test_the_last_batch_of_a_short_window_is_told_by_its_own_number() -> None:
    console = Lines()
    settings = {**TINY, "epochs": 1, "stage1_epochs": 0, "accumulation_steps": 5}
    trainer = CodTrainer(CodConfig(**settings), tell=console.say)
    train_tiny(trainer, spoil={7})
    assert "❌ NaN/Inf detected in loss at batch 7!" in console.lines  # batches 5, 6 and 7 make the step


def test_a_bad_picture_ends_the_unprotected_training_and_not_the_other() -> None:
    console = Lines()
    bare = CodTrainer(CodConfig(**TINY, protect=False), tell=console.say)
    with pytest.raises(ValueError, match=r"^Training stopped due to NaN/Inf loss\.$"):
        train_tiny(bare, spoil={2})
    assert "❌ NaN/Inf detected in loss at batch 2!" in console.lines
    guarded = CodTrainer(CodConfig(**TINY), tell=console.say)
    assert train_tiny(guarded, spoil={2})["num_skipped"] == 3  # once an epoch
    assert is_finite(guarded)


def test_an_overflow_of_the_loss_scale_ends_the_unprotected_training_and_not_the_other() -> None:
    """No fault is injected: float16 and a scale that is too high, which the original took for an explosion."""
    console = Lines()
    changes = {"precision": "fp16", "stage2_init_scale": 2.0**40, "stage2_backoff_factor": 2.0**-8, "stage1_epochs": 0}
    config = {**TINY, **changes, "epochs": 1}
    with pytest.raises(ValueError, match=r"Training stopped due to NaN/Inf gradients\."):
        train_tiny(CodTrainer(CodConfig(**config, protect=False), tell=console.say))
    trainer = CodTrainer(CodConfig(**config), tell=console.say)
    stats = train_tiny(trainer)
    assert 0 < stats["num_skipped"] < stats["num_steps"] == 8
    assert stats["loss_scale"] < 2.0**40
    assert is_finite(trainer)


def test_switching_off_by_the_environment_is_the_unprotected_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    with pytest.raises(ValueError, match=r"Training stopped due to NaN/Inf gradients\."):
        train_tiny(make_exploding(lambda _: None))


def test_the_recipe_without_protection_says_how_to_recover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadygrad_recipes.cod.recipe.CodTrainer", _ExplodingTrainer)
    console = Lines()
    assert train(CodConfig(**TINY, protect=False), run_dir=tmp_path, resume=None, console=console) == 2
    assert "ValueError: Training stopped due to NaN/Inf gradients." in console.lines
    assert console.lines[-1] == f"To continue from the last checkpoint: steadygrad train cod --resume {tmp_path}"


class _ExplodingTrainer(CodTrainer):
    """A CodTrainer whose gradients are Inf in the second backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        poison_gradient(self.model.get_parameter("decoder.laterals.0.weight"), at={1}, value=math.inf)


# --- kill -9 ---------------------------------------------------------------------------------------------------------

RESUMED = {**TINY, "save_every": 3, "accumulation_steps": 2, "epochs": 4, "stage1_epochs": 2}


def spell_flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    assert train(CodConfig(**RESUMED), run_dir=folder, resume=None, console=Lines()) == 0
    return read_state(folder)


def read_state(run_dir: Path) -> dict[str, Tensor]:
    """Weights, buffers and averaged weights of the last checkpoint."""
    store = CheckpointStore(run_dir / "checkpoints")
    found = store.load()
    store.close()
    assert found is not None
    ema = {f"ema.{name}": value for name, value in found.state["extras"]["ema"].items()}
    return {"step": torch.tensor(found.step), **found.state["model"], **ema}


@pytest.mark.parametrize("num_steps", [pytest.param(7, id="stage 1"), pytest.param(13, id="stage 2")])
def test_resume_after_kill_9_ends_as_if_nothing_had_happened(
    tmp_path: Path,
    uninterrupted: dict[str, Tensor],
    kill_at: Callable[[Sequence[str], int], None],
    capsys: pytest.CaptureFixture[str],
    num_steps: int,
) -> None:
    kill_at(["train", "cod", *spell_flags(RESUMED), "--run-dir", str(tmp_path)], num_steps)
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert max(steps, default=0) < num_steps < 16
    assert main(["train", "cod", "--resume", "latest", "--run-dir", str(tmp_path)]) == 0
    resumed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Resuming before step "))
    assert 0 < int(resumed.split()[-1].rstrip(".")) <= num_steps
    state = read_state(tmp_path)
    assert state.keys() == uninterrupted.keys()
    different = [name for name, value in uninterrupted.items() if not torch.equal(value, state[name])]
    assert not different


def test_a_resume_brings_back_optimizer_scheduler_scaler_and_average(tmp_path: Path) -> None:
    """With a loss scale that an overflow has lowered, so that a new scaler would show."""
    scaler = {"precision": "fp16", "stage2_init_scale": 2.0**40, "stage2_backoff_factor": 2.0**-8}
    config = CodConfig(**{**TINY, **scaler, "stage1_epochs": 0, "epochs": 2, "num_made": 12})
    whole = CodTrainer(config, run_dir=tmp_path / "whole")
    scale = train_tiny(whole)["loss_scale"]
    again = CodTrainer(config, run_dir=tmp_path / "again")

    assert again.resume(tmp_path / "whole" / "checkpoints" / "step_00000004") == 4
    assert train_tiny(again)["loss_scale"] == scale < 2.0**40

    one, other = (list_leaves(tmp_path / name) for name in ("whole", "again"))
    assert one.keys() == other.keys()
    assert {name.split("/")[0] for name in one} >= {"model", "optimizers", "scheduler", "scaler", "ema", "trainer"}
    assert not [name for name, value in one.items() if not is_same(value, other[name])]


def list_leaves(run_dir: Path) -> dict[str, Any]:
    """What must be the same in the last checkpoint of two runs, by its path."""
    store = CheckpointStore(run_dir / "checkpoints")
    found = store.load()
    store.close()
    assert found is not None
    kept = {name: found.state[name] for name in ("model", "optimizers")} | found.state["extras"]
    leaves: dict[str, Any] = {}
    left: list[tuple[str, Any]] = list(kept.items())
    while left:
        path, value = left.pop()
        if isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            left += [(f"{path}/{key}", inner) for key, inner in pairs]
        else:
            leaves[path] = value
    return leaves


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


# --- the run directory -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder, console = tmp_path_factory.mktemp("finished"), Lines()
    settings = {**TINY, "epochs": 5, "num_made": 12}
    assert train(CodConfig(**settings), run_dir=folder, resume=None, console=console) == 0
    return folder, console.lines


def test_each_epoch_tells_bar_metrics_and_norms(finished: tuple[Path, list[str]]) -> None:
    _, lines = finished
    for epoch in range(1, 6):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"Epoch {epoch}/5: 100%|████████| 4/4 ["))
        assert ", loss=" in lines[at]
        assert ", grad=" in lines[at]
        assert lines[at + 1].startswith("Loss: ")
        assert all(f"| {name}: " in lines[at + 1] for name in ("IoU", "Dice", "MAE", "S-measure"))
        assert lines[at + 2].startswith("   Gradient norm - Avg: ")


def test_the_last_three_epochs_and_the_best_one_stay(finished: tuple[Path, list[str]]) -> None:
    folder, _ = finished
    kept = sorted(int(one.name.split("_")[1]) for one in (folder / "checkpoints").iterdir() if one.is_dir())
    best = CheckpointStore(folder / "checkpoints").best
    assert best is not None
    assert set(kept) == {12, 16, 20, best.step}


def test_resuming_from_the_best_model_finds_the_best_checkpoint(finished: tuple[Path, list[str]]) -> None:
    folder, _ = finished
    best = CheckpointStore(folder / "checkpoints").best
    assert best is not None
    assert find_best(str(folder / "checkpoints" / "best_model.pth"), Path("elsewhere")) == str(best.path)
    assert find_best("best", folder) == str(best.path)
    assert find_best("latest", folder) == "latest"


def test_a_resume_takes_a_lower_rate_and_a_lower_clip(tmp_path: Path) -> None:
    first = {**TINY, "epochs": 4, "stage1_epochs": 1}
    trainer = CodTrainer(CodConfig(**first), run_dir=tmp_path)
    trainer.config = trainer.config.__class__(**{**vars(trainer.config), "max_steps": 16})
    train_tiny(trainer)
    again = CodTrainer(CodConfig(**{**first, "lr": first["lr"] / 2, "grad_clip": 0.3}), run_dir=tmp_path)
    assert again.resume("latest") == 16
    train_tiny(again)
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    rates = {row["step"]: max(row["learning_rates"]) for row in rows}
    assert again.guard is not None
    assert again.guard.config.clip.max_norm == 0.3  # type: ignore[union-attr]
    assert all(rates[step] <= 0.5 * first["lr"] * first.get("stage2_lr_factor", 0.5) + 1e-12 for step in range(17, 32))
    assert rates[31] < rates[17]


def test_the_record_has_the_terms_of_the_loss(finished: tuple[Path, list[str]]) -> None:
    folder, _ = finished
    assert '"side"' in (folder / "steps.jsonl").read_text()


def test_predictions_are_pictures_in_the_run_and_in_its_report(finished: tuple[Path, list[str]]) -> None:
    pillow = pytest.importorskip("PIL.Image")
    from steadygrad.view.render.report import write_report

    folder, _ = finished
    files = sorted((folder / "pictures").glob("*.png"))
    assert [file.name for file in files] == ["prediction-00.png", "prediction-01.png"]
    with pillow.open(files[0]) as picture:
        picture.load()
        assert picture.size == (3 * 64 + 2 * 4, 64)
    write_report([folder], folder / "report.html")
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count('<img src="data:image/png;base64,') == 2
    assert "made picture 0, epoch 5: image, true mask, prediction. IoU " in text


def test_a_png_holds_the_pixels_that_were_given(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    image = torch.randint(0, 256, (3, 5, 7)).float() / 255
    (tmp_path / "a.png").write_bytes(encode_png(image))
    with pillow.open(tmp_path / "a.png") as picture:
        pixels = torch.tensor(list(picture.convert("RGB").tobytes())).view(5, 7, 3).permute(2, 0, 1)
    assert torch.equal(pixels, (image * 255).round().long())


def test_a_picture_of_ones_own_gets_its_mask(finished: tuple[Path, list[str]], tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    folder, _ = finished
    pillow.new("RGB", (50, 40), (90, 120, 60)).save(tmp_path / "leaf.jpg")
    console = Lines()
    assert predict(CodConfig(**TINY), tmp_path / "leaf.jpg", run_dir=folder, console=console) == 0
    with pillow.open(folder / "predictions" / "leaf.png") as mask:
        assert mask.size == (50, 40)
    assert console.lines[0].startswith("leaf.jpg: ")


def test_a_picture_that_only_decoding_shows_to_be_damaged_is_replaced_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for split in ("Train", "Test"):
        for folder, mode in (("Image", "RGB"), ("GT_Object", "L")):
            (tmp_path / "data" / split / folder).mkdir(parents=True)
            for name in ("a", "b", "c"):
                kind = "jpg" if folder == "Image" else "png"
                pillow.effect_noise((96, 96), 90).convert(mode).save(
                    tmp_path / "data" / split / folder / f"{name}.{kind}"
                )
    damaged = tmp_path / "data" / "Train" / "Image" / "b.jpg"
    content = damaged.read_bytes()
    middle = len(content) // 2
    damaged.write_bytes(content[:middle] + b"\xff\xd8" + content[middle:])  # header and end are whole
    config = {**TINY, "dataset_path": str(tmp_path / "data"), "epochs": 3, "stage1_epochs": 1}
    with pytest.raises(UsageError, match=r"b\.jpg cannot be read as a picture .*--skip-bad-data true"):
        train(CodConfig(**config), run_dir=tmp_path / "strict", resume=None, console=Lines())

    run_dir = tmp_path / "run"
    skipping = CodConfig(**config, skip_bad_data=True)
    assert train(skipping, run_dir=run_dir, resume=None, console=Lines()) == 0

    (line,) = (run_dir / "left_out.txt").read_text().splitlines()
    assert line.startswith(f"{damaged} cannot be read as a picture (")
    assert [line in message for message in caplog.messages if "cannot be read" in message] == [True]


def test_a_folder_whose_pictures_are_all_damaged_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    data = PairDataset([Pair(tmp_path / "a.jpg", None)] * 2, 32, LateFaults(tmp_path / "left_out.txt"))

    with pytest.raises(UsageError, match=r"a\.jpg cannot be read as a picture"):
        data[0]


def test_bad_rows_that_are_left_out_are_listed_in_the_run(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for split in ("Train", "Test"):
        for folder, mode in (("Image", "RGB"), ("GT_Object", "L")):
            (tmp_path / "data" / split / folder).mkdir(parents=True)
            for name in ("a", "b"):
                pillow.new(mode, (16, 16), 255).save(tmp_path / "data" / split / folder / f"{name}.png")
    (tmp_path / "data" / "Train" / "GT_Object" / "b.png").unlink()
    console, run_dir = Lines(), tmp_path / "run"
    config = {**TINY, "dataset_path": str(tmp_path / "data"), "skip_bad_data": True, "epochs": 1, "stage1_epochs": 0}
    assert train(CodConfig(**config), run_dir=run_dir, resume=None, console=console) == 0
    assert (run_dir / "left_out.txt").read_text() == "train: b.png: no mask b.png in GT_Object\n"
    assert f"1 files are left out; each is named in {run_dir / 'left_out.txt'}." in console.lines
    assert "1 images to train on, 2 to evaluate on." in console.lines
