"""steadygrad tune: what it chooses, that nothing is left changed, resuming, several workers, and wrong input."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steadygrad import FixedNorm, GuardConfig, OutlierClip
from steadygrad.cli import main
from steadygrad.cli.recipes import find_recipe
from steadygrad.config.plain import build
from steadygrad.tune import Tunable
from steadygrad.tune.choose import choose
from steadygrad.tune.ledger import Ledger
from steadygrad.tune.plan import Plan, make_plan
from steadygrad.tune.search import Search
from steadygrad.tune.settings import Settings
from steadygrad.tune.space import Space
from steadygrad.tune.storage import open_study
from steadygrad.tune.target import Target, open_script
from steadygrad.tune.trial import Report, TrialResult, set_optimizers
from steadygrad.tune.tuning import Tuned, Tuning

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make(rate=1e-2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=rate), nn.functional.mse_loss, loader

def make_far_too_high():
    return make(10.0)

def make_three():
    return make()[:3]

if __name__ == "__main__":
    raise SystemExit("must not run")
"""
PLAN = Plan(range_steps=30, trial_steps=12, num_trials=0)


def make_tunable(rate: float = 1e-3, **more: Any) -> Tunable:
    """Regression with dropout, BatchNorm and Adam's moments from two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(96, 6)
    for _ in range(2):
        model(x[:8]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = rate
    data = TensorDataset(x, x.sum(1, keepdim=True))
    settings = {"loss_fn": nn.functional.mse_loss, "val_loader": [(x[:32], x[:32].sum(1, keepdim=True))], **more}
    return Tunable(model=model, optimizer=optimizer, loader=DataLoader(data, 8, shuffle=True), **settings)


def tune(tunable: Tunable, folder: Path, search: tuple[str, ...] = (), plan: Plan = PLAN) -> Tuned:
    folder.mkdir(exist_ok=True)
    request = {"search": list(search)}
    ledger = Ledger(folder, request, resume=False)
    shared = Search(open_study(None, folder, request), search) if search else None
    return Tuning(Target(name="test", tunable=tunable), plan, ledger, search=shared).run()


def copy_state(tunable: Tunable) -> dict[str, Any]:
    (optimizer,) = tunable.optimizers
    moments = {
        f"{i}.{key}": value.clone()
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    weights = {name: value.clone() for name, value in tunable.model.state_dict().items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    order = [batch[0] for batch in _peek(tunable.loader)]
    return {**weights, **moments, "groups": groups, "random": torch.get_rng_state(), "order": torch.cat(order)}


def _peek(loader: Any) -> list[Any]:
    state = torch.get_rng_state()
    batches = list(loader)
    torch.set_rng_state(state)
    return batches


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name


# --- what stays -----------------------------------------------------------------------------------------------------


def test_a_tuning_with_a_search_leaves_the_training_bit_for_bit_as_it_was(tmp_path: Path) -> None:
    tunable = make_tunable()
    before = copy_state(tunable)
    names = ("lr", "warmup", "clip", "weight_decay", "betas", "batch", "accumulation")
    tuned = tune(tunable, tmp_path, names, Plan(range_steps=30, trial_steps=12, num_trials=4))
    assert len(tuned.searched) == 4
    assert len({one.settings.clip for one in tuned.searched}) > 1
    assert_unchanged(before, copy_state(tunable))
    assert all(module.training for module in tunable.model.modules())


def test_trials_begin_alike_and_the_same_settings_give_the_same_losses(tmp_path: Path) -> None:
    tunable = make_tunable()
    tuning = Tuning(Target(name="test", tunable=tunable), PLAN, Ledger(tmp_path, {}, resume=False))
    first, other, again = (tuning._try(tunable.given, order) for order in (0, 1, 0))
    assert first.losses == again.losses
    assert first.score == again.score
    assert first.losses != other.losses


def test_a_larger_batch_gets_as_much_data_and_fewer_steps(tmp_path: Path) -> None:
    tunable = make_tunable(evaluate=lambda: 1.0)
    seen: list[int] = []
    loss_fn = tunable.loss_fn
    tunable.loss_fn = lambda batch: (seen.append(len(batch[0])), loss_fn(tunable.model(batch[0]), batch[1]))[1]
    tuning = Tuning(Target(name="test", tunable=tunable), PLAN, Ledger(tmp_path, {}, resume=False))
    result = tuning._try(dataclasses.replace(tunable.given, batch=16), 0)
    assert (result.num_steps, sum(seen)) == (6, 96)
    assert set(seen) == {16}
    seen.clear()
    result = tuning._try(dataclasses.replace(tunable.given, accumulation=2), 0)
    assert (result.num_steps, sum(seen)) == (6, 96)


# --- what it chooses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-5, 1e-4])
def test_a_rate_far_too_low_is_raised(tmp_path: Path, rate: float) -> None:
    tuned = tune(make_tunable(rate), tmp_path)
    assert tuned.choice.changed == ("lr",)
    assert tuned.choice.settings.lr > 5 * rate
    assert "better in both orders" in tuned.choice.reason


def test_a_rate_that_works_is_kept_where_the_range_test_cannot_tell_a_better_one_from_it(tmp_path: Path) -> None:
    tuned = tune(make_tunable(0.05), tmp_path)
    assert tuned.choice.changed == ()
    assert f"the suggested {tuned.curve.suggested:.3g} is within 3 times of it" in tuned.choice.reason
    assert len(tuned.compared) == 2, "no step is spent on a rate that would not be taken"


def test_a_rate_a_hundred_times_too_high_is_repaired_and_its_trial_ends_within_steps(tmp_path: Path) -> None:
    tunable = make_tunable(optimizer_rate := 100.0, guard_config=GuardConfig(clip=None))
    plan = Plan(range_steps=40, trial_steps=60, num_trials=0)
    tuned = tune(tunable, tmp_path, plan=plan)
    broken = tuned.compared[0]
    assert broken.settings.lr == optimizer_rate
    assert broken.why_ended
    assert broken.num_steps < 15, "a diverging trial ends in steps"
    assert tuned.choice.works
    assert tuned.choice.settings.lr < 1.0
    assert tuned.compared[-1].is_good


def test_settings_that_are_not_better_in_both_orders_are_not_taken() -> None:
    def result(score: float, lr: float, order: int) -> TrialResult:
        return TrialResult(settings=Settings(lr=lr), score=score, num_steps=9, num_batches=9, losses=(), order=order)

    given = [result(1.0, 0.1, 0), result(1.1, 0.1, 1)]
    assert choose(given, [result(0.9, 0.2, 0), result(1.0, 0.2, 1)]).settings.lr == 0.2
    assert choose(given, [result(0.9, 0.2, 0), result(1.2, 0.2, 1)]).settings.lr == 0.1


def test_nothing_that_works_is_told_and_not_written_as_a_success(tmp_path: Path) -> None:
    tunable = make_tunable(
        loss_fn=lambda batch: (batch[0].sum() * float("nan")) * next(tunable.model.parameters()).sum()
    )
    tuned = tune(tunable, tmp_path)
    assert not tuned.choice.works
    assert "nothing that was tried works" in tuned.choice.reason


def test_all_of_it_stays_a_tenth_of_the_training() -> None:
    for num_steps in (800, 1300, 3000, 100_000):
        for trials in (0, None) if num_steps > 1260 else (0,):
            assert make_plan(num_steps, trials=trials, steps=None).num_steps <= num_steps / 10
    assert [make_plan(steps, trials=None, steps=None).num_trials for steps in (100, 1400, 100_000)] == [4, 5, 20]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_a_script_is_tuned_and_everything_is_written(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", f"{script}:make_far_too_high", "--run-dir", "out", "--steps", "20"]) == 0
    told = capsys.readouterr().out
    assert "Range test: up to 100 steps" in told
    assert "lr: 10 -> " in told
    values = yaml.safe_load(Path("out/tuned.yaml").read_text())
    assert 0 < values["lr"] < 1.0
    assert GuardConfig.from_dict(values["guard"]).clip == OutlierClip()
    assert Path("out/tune.png").read_bytes().startswith(b"\x89PNG")
    page = Path("out/tune.html").read_text()
    assert "<h2>Evidence</h2>" in page
    assert "range test" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert sorted(path.name for path in Path("out").iterdir()) == ["tune.html", "tune.json", "tune.png", "tuned.yaml"]


SMALL = {
    "seo": {"num_synthetic": 120, "hidden": 16, "text_dim": 8, "max_words": 16, "batch_size": 16},
    "cod": {"num_made": 16, "batch_size": 2, "stage1_epochs": 1, "epochs": 2},
    "mmdit": {"data.num_synthetic": 64, "model.hidden_size": 16, "model.num_layers": 1, "training.train_batch_size": 4},
}


@pytest.mark.parametrize("recipe", list(SMALL))
def test_a_recipe_is_tuned_into_a_config_that_train_takes(tmp_path: Path, recipe: str) -> None:
    fields = [f"--set={name}={value}" for name, value in SMALL[recipe].items()]
    assert main(["tune", recipe, "--quick", "--run-dir", str(tmp_path / "t"), "--steps", "12", *fields]) == 0
    config: Any = build(find_recipe(recipe).load().Config, yaml.safe_load((tmp_path / "t" / "tuned.yaml").read_text()))
    for name, value in SMALL[recipe].items():
        assert operator.attrgetter(name)(config) == value


def test_a_wrong_field_is_told_with_its_file_or_as_it_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text("learning_rat = 1\nepochs = 0\n")

    assert main(["tune", "seo", "--quick", "--config", "own.toml", "--set", "hidden=0"]) == 2

    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "Error: 3 wrong fields:"
    assert any(line.startswith("  own.toml: learning_rat: unknown; did you mean learning_rate? ") for line in lines)
    assert any(line.startswith("  own.toml: epochs must be a whole number, at least 1, got 0.") for line in lines)
    assert any(line.startswith("  --set hidden must be a whole number, at least 1, got 0.") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]


def test_a_tuned_seo_trains(tmp_path: Path) -> None:
    fields = [f"--set={name}={value}" for name, value in {**SMALL["seo"], "epochs": 2, "learning_rate": 30.0}.items()]
    assert main(["tune", "seo", "--quick", "--run-dir", str(tmp_path / "t"), "--steps", "12", *fields]) == 0
    config = tmp_path / "t" / "tuned.yaml"
    assert yaml.safe_load(config.read_text())["learning_rate"] < 1.0
    assert main(["train", "seo", "--config", str(config), "--run-dir", str(tmp_path / "r")]) == 0


def test_a_search_goes_on_where_it_was_and_repeats_nothing(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["tune", f"{script}:make", "--search", "lr,clip", "--run-dir", "out", "--steps", "12"]
    assert main([*command, "--trials", "3"]) == 0
    first = json.loads(Path("out/tune.json").read_text())
    assert capsys.readouterr().out.count("Trial ") == 3

    assert main([*command, "--trials", "5", "--resume"]) == 0
    told = capsys.readouterr().out
    assert [line.split(":")[0] for line in told.splitlines() if line.startswith("Trial ")] == ["Trial 3", "Trial 4"]
    assert "Range test:" not in told
    assert json.loads(Path("out/tune.json").read_text())["range"] == first["range"]
    assert Path("out/tune.db").is_file()
    assert "<h2>Search</h2>" in Path("out/tune.html").read_text()


def test_a_worker_that_was_killed_leaves_a_trial_that_is_tried_again(script: str) -> None:
    import optuna

    command = ["tune", f"{script}:make", "--search", "lr", "--run-dir", "out", "--steps", "12"]
    assert main([*command, "--trials", "1"]) == 0
    study = optuna.load_study(study_name="steadygrad", storage="sqlite:///out/tune.db")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    study.ask().set_user_attr("worker", f"{os.uname().nodename}:{gone.pid}")
    assert main([*command, "--trials", "2", "--resume"]) == 0
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]


def test_a_study_of_other_settings_is_refused_and_one_that_is_there_is_only_joined_when_asked(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", f"{script}:make", "--search", "lr", "--steps", "12", "--storage", "sqlite:///all.db"]
    assert main([*command, "--trials", "1", "--run-dir", "a"]) == 0
    curve = json.loads(Path("a/tune.json").read_text())["range"]
    for more, words in (
        (["--trials", "1"], ("already holds the study 'steadygrad'", "--resume")),
        (["--resume", "--steps", "13"], ("was begun with trial_steps 12, and now it is 13", "--study")),
        (["--resume", "--search", "lr,clip"], ("was begun with search ['lr']", "Ask for the same")),
    ):
        assert main([*command, "--run-dir", "b", *more]) == 2
        told = capsys.readouterr().err
        assert all(word in told for word in words), told
    assert main([*command, "--trials", "1", "--run-dir", "c", "--study", "another"]) == 0
    capsys.readouterr()
    assert main([*command, "--trials", "2", "--run-dir", "d", "--resume"]) == 0, "from another folder"
    told = capsys.readouterr().out
    assert "Range test:" not in told, "it comes with the study"
    assert json.loads(Path("d/tune.json").read_text())["range"]["points"] == curve["points"]
    assert [line.split(":")[0] for line in told.splitlines() if line.startswith("Trial ")] == ["Trial 1"]


def test_a_search_first_tries_the_given_settings_at_the_suggested_rate(tmp_path: Path) -> None:
    names = ("lr", "warmup", "clip", "weight_decay", "betas")
    clip = FixedNorm(max_norm=1.0)
    tunable = make_tunable(guard_config=GuardConfig(clip=clip))
    tuned = tune(tunable, tmp_path, names, Plan(range_steps=30, trial_steps=12, num_trials=1))
    wanted = dataclasses.replace(tunable.given, lr=tuned.curve.suggested)
    assert dataclasses.replace(tuned.searched[0].settings, clip=clip) == wanted
    assert isinstance(tuned.searched[0].settings.clip, FixedNorm)


def test_a_trial_of_the_given_settings_leaves_groups_with_their_own_decay_and_betas() -> None:
    weight, bias = nn.Linear(4, 1).parameters()
    groups = [{"params": [weight]}, {"params": [bias], "betas": (0.5, 0.6), "weight_decay": 0.05}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    tunable = Tunable(model=nn.Linear(4, 1), optimizer=optimizer, loss_fn=nn.functional.mse_loss, loader=[])
    set_optimizers(tunable, tunable.given)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999), (0.5, 0.6)]
    set_optimizers(tunable, dataclasses.replace(tunable.given, weight_decay=0.2, beta2=0.95))
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95), (0.9, 0.95)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_workers_in_one_folder_do_not_lose_each_others_trials(tmp_path: Path) -> None:
    def result(lr: float) -> TrialResult:
        return TrialResult(settings=Settings(lr=lr), score=1.0, num_steps=9, num_batches=9, losses=())

    first, second = Ledger(tmp_path, {}, resume=True), Ledger(tmp_path, {}, resume=True)
    first.keep_trial(result(0.1))
    second.keep_trial(result(0.2))
    again = Ledger(tmp_path, {}, resume=True)
    assert sorted(one.settings.lr for one in again.trials) == [0.1, 0.2]


def try_trials(folder: Path, num: int, *, leads: bool, meanwhile: Callable[[Any, int], None]) -> tuple[Any, list[int]]:
    """A search without a training: its study, and the trials that were told. `meanwhile`: what others do."""
    study, told = open_study(None, folder, {}, resume=True), list[int]()
    rates = iter(range(100))

    def run_trial(settings: Settings, report: Report) -> TrialResult:
        meanwhile(study, next(rates))
        report(0.5, 1.0)
        return TrialResult(settings=settings, score=1.0, num_steps=9, num_batches=9, losses=())

    space = Space(
        names=("lr",),
        given=Settings(lr=0.1),
        rates=(0.01, 0.1),
        norms=(0.1, 1.0),
        clips=("fixed_norm",),
        precisions=(),
        batches=(),
        accumulations=(),
        has_beta1=False,
    )
    Search(study, ("lr",)).run(space, num, run_trial, lambda number, _: told.append(number), leads=leads)
    return study, told


def test_a_trial_that_was_wrongly_taken_for_abandoned_is_tried_again_and_told_once(tmp_path: Path) -> None:
    import optuna

    def take_the_first(study: Any, number: int) -> None:
        if number == 0:
            study.tell(0, state=optuna.trial.TrialState.FAIL)

    study, told = try_trials(tmp_path, 2, leads=True, meanwhile=take_the_first)
    assert told == [1, 2]
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]


def test_a_trial_on_another_machine_counts_until_it_has_taken_far_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = open_study(None, tmp_path, {}).ask()
    elsewhere.set_user_attr("worker", "elsewhere:1")
    study, told = try_trials(tmp_path, 2, leads=False, meanwhile=lambda *_: None)
    assert told == [1]
    assert study.trials[0].state.name == "RUNNING"
    monkeypatch.setattr("steadygrad.tune.search.LEAST_PATIENCE_SECONDS", 0.0)
    study, told = try_trials(tmp_path, 2, leads=True, meanwhile=lambda *_: None)
    assert told == [2]
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]


def test_without_optuna_a_search_says_what_to_install(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", f"{script}:make", "--search", "lr", "--run-dir", "out", "--steps", "12"]) == 2
    told = capsys.readouterr()
    assert "pip install 'steadygrad[tune]'" in told.err
    assert "Range test" not in told.out, "it is told before anything is tried"
    assert main(["tune", f"{script}:make", "--run-dir", "other", "--steps", "12"]) == 0, "the range test needs none"


def test_a_script_that_changes_the_path_keeps_its_entries_and_ours_goes(tmp_path: Path) -> None:
    before = list(sys.path)
    (tmp_path / "changing.py").write_text(f"import sys\nsys.path.insert(0, 'first of its own')\n{SCRIPT}")
    try:
        open_script(f"{tmp_path}/changing.py:make")
        assert sys.path == ["first of its own", *before]
    finally:
        sys.path[:] = before
        sys.modules.pop("changing", None)


def test_wrong_input_is_told_with_where_and_what_to_do(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("used").mkdir()
    Path("used/tune.json").write_text("{}")
    for arguments, words in (
        (["nothing.py:make"], ("there is no script nothing.py", "Give the path")),
        ([f"{script}:absent"], ("no function 'absent'", "Write one that returns")),
        ([f"{script}:make_three"], ("make_three() returned a tuple of 3", "Let it return")),
        ([script], ("names no function", f"Write {script}:FUNCTION")),
        (["soe"], ("no recipe 'soe'", "Did you mean seo?")),
        (["sft"], ("transformers' Trainer runs its loop", "These can: cod, mmdit, seo")),
        (["clip6d"], ("Lightning runs its loop", "script.py:function")),
        (["seo", "--search", "lr,momentum"], ("momentum", "Use some of: lr,warmup")),
        (["seo", "--quick", "--search", "betas"], ("betas", "Leave it out")),
        (["seo", "--set", "learning_rte=1"], ("is not a field of the recipe seo", "Did you mean --learning-rate?")),
        (["seo", "--set", "epochs"], ("--set got 'epochs'", "Write --set FIELD=VALUE")),
        ([f"{script}:make", "--quick"], ("are for recipes", "Set it up inside")),
        ([f"{script}:make", "--steps", "3"], ("at least 12", "got 3")),
        ([f"{script}:make", "--run-dir", "used"], ("already holds a tuning", "--resume")),
        ([f"{script}:make", "--run-dir", "used", "--resume"], ("cannot be read as a tuning", "Move it away")),
        ([f"{script}:make", "--resume"], ("none was named", "--run-dir")),
        ([f"{script}:make", "--run-dir", f"{script}/out"], ("cannot be made: Not a directory", "--run-dir")),
        (
            [f"{script}:make", "--search", "lr", "--run-dir", "x", "--storage", "nosql://me:secret@host/name"],
            ("nosql://me:***@host/name cannot be used", "journal:"),
        ),
    ):
        assert main(["tune", *arguments]) == 2, arguments
        told = capsys.readouterr().err
        assert all(word in told for word in words), (arguments, told)
        assert "secret" not in told
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["tune", f"{script}:make"]) == 2
    assert "Name it with --run-dir" in capsys.readouterr().err
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert main(["tune", f"{script}:make", "--search", "lr", "--run-dir", "y"]) == 2
    assert "Give a --storage that all reach" in capsys.readouterr().err


def test_another_request_does_not_go_on_with_a_tuning(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", f"{script}:make", "--run-dir", "out", "--steps", "12"]) == 0
    assert main(["tune", f"{script}:make_far_too_high", "--run-dir", "out", "--resume"]) == 2
    assert "was tuned with target 'train.py:make'" in capsys.readouterr().err
