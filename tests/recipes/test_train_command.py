"""`steadygrad train`: which recipes there are, what their fields are, what a wrong word is told, what a run leaves."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest

from steadygrad import UsageError
from steadygrad.cli import main
from steadygrad.cli.recipe_config import Source, flatten, nest
from steadygrad.cli.recipe_fields import FieldCommand, check_path, list_fields, spell_value
from steadygrad.cli.recipe_folder import remember_settings, require_same
from steadygrad.cli.recipes import Recipe, find_recipe, list_recipes
from steadygrad.cli.train import Request, make_config
from steadygrad.config.plain import to_plain
from steadygrad_recipes import seo

TINY = ["--num-synthetic", "40", "--epochs", "1", "--hidden", "8", "--text-dim", "4", "--num-buckets", "64"]
TINY += ["--max-words", "16", "--device", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    """How fast."""
    size: int = 3
    """How large,
    in steps."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    path: str | None = None
    """Where it is read from."""
    is_on: bool = True
    names: tuple[str, ...] = ("a", "b")
    inner: Inner = field(default_factory=Inner)
    size: int = field(default=1, metadata={"help": "from metadata"})


@dataclass(frozen=True, kw_only=True)
class Twice:
    one: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=Inner)
    run_dir: str = "taken"


def read(words: list[str], config: type = Outer) -> dict[str, object]:
    run_dir = click.Option(["--run-dir"], callback=check_path)
    command = FieldCommand("outer", config, aliases={"r": "inner.rate"} if config is Outer else {}, options=[run_dir])
    return command.read_fields(command.make_context("steadygrad train outer", words))


# --- fields -----------------------------------------------------------------------------------------------------------


def test_every_field_is_listed_with_the_help_that_stands_below_it() -> None:
    found = {item.path: (item.opts[0], item.usual, item.help) for item in list_fields(Outer)}

    assert found == {
        "path": ("--path", None, "Where it is read from."),
        "is_on": ("--is-on", True, ""),
        "names": ("--names", ("a", "b"), ""),
        "inner.rate": ("--inner.rate", 0.5, "How fast."),
        "inner.size": ("--inner.size", 3, "How large, in steps."),
        "size": ("--size", 1, "from metadata"),
    }


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (["--inner.rate", "2"], {"inner.rate": 2.0}),
        (["--rate=1e-3"], {"inner.rate": 1e-3}),
        (["--r", "-4"], {"inner.rate": -4.0}),
        (["--size", "7", "--inner.size", "8"], {"size": 7, "inner.size": 8}),
        (["--size", "1"], {"size": 1}),  # given, though it is the default: it must win over a file
        (["--size", "7", "--size", "8"], {"size": 8}),
        (["--no-is-on"], {"is_on": False}),
        (["--no-is-on", "--is-on"], {"is_on": True}),
        (["--is-on", "--no-is_on"], {"is_on": False}),
        (["--is-on", "--path", "x"], {"is_on": True, "path": "x"}),
        (["--is_on", "off", "--path", "none"], {"is_on": False, "path": None}),
        (["--is-on=yes", "--path="], {"is_on": True, "path": ""}),
        (["--names", "c,d"], {"names": ("c", "d")}),
        (["--names", "[c, d]"], {"names": ("c", "d")}),
    ],
)
def test_words_become_values(words: list[str], values: dict[str, object]) -> None:
    assert read(words) == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--inner.rte", "2"], "^--inner.rte is not a field of the recipe outer. Did you mean --inner.rate[?]$"),
        (["--zzzz", "2"], "^--zzzz is not a field of the recipe outer. See them: steadygrad train outer --help.$"),
        (["--size", "many"], "^--size must be a number, got 'many'. The default is 1.$"),
        (["--size", "1.5"], "^--size must be a number, got '1.5'"),
        (["--size", "none"], "^--size must be a number, got 'none'"),
        (["--is-on", "perhaps"], "^--is-on must be true or false, got 'perhaps'. The default is true."),
        (["--rate", "1e400"], "^--inner.rate must be a number, got '1e400'"),
        (["--rate", "nan"], "^--inner.rate must be a number, got 'nan'"),
        (["--rate", "-inf"], "^--inner.rate must be a number, got '-inf'"),
        (["--size"], "--size.* requires an argument"),
        (["--size", "--path", "x"], "^--size has no value. Write --size VALUE."),
        (["--path", "--is-on"], "^--path has no value. Write --path VALUE."),
        (["--run-dir", "--is-on"], "^--run-dir has no value. Write --run-dir VALUE."),
        (["--run-dir", ""], "^--run-dir is empty. Write --run-dir VALUE, or leave it out."),
        (["stray"], "unexpected extra argument.*stray"),
    ],
)
def test_a_word_that_means_nothing_is_told(words: list[str], message: str) -> None:
    with pytest.raises((UsageError, click.UsageError)) as told:
        read(words)

    error = told.value
    assert re.search(message, error.format_message() if isinstance(error, click.UsageError) else str(error))


def test_the_last_word_of_a_path_must_be_of_one_field_only() -> None:
    with pytest.raises(
        UsageError, match=r"^--rate is a field of several parts: --one.rate or --other.rate. Write which."
    ):
        read(["--rate", "3"], Twice)
    assert read(["--one.rate", "3"], Twice) == {"one.rate": 3.0}


def test_a_field_does_not_take_the_place_of_an_option_of_the_command() -> None:
    assert read(["--run-dir", "runs/a"], Twice) == {}


def test_values_may_stand_under_dotted_names_or_nested_and_the_later_win() -> None:
    nested = flatten({"a.b": 1, "a": {"c": 2, "d": {}}, True: 3})

    assert nested == {"a.b": 1, "a.c": 2, "True": 3}
    assert nest(nested, {"a.b": 4}) == {"a": {"b": 4, "c": 2}, "True": 3}
    assert nest({"a": 1}, {"a.b": 2}) == {"a": {"b": 2}}
    assert nest({"a.b": 2}, {"a": 1}) == {"a": 1}


def test_fields_win_over_the_file_the_file_over_quick_and_quick_over_what_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("hidden: 48\nlearning_rate: 1e-2\n")
    request = Request(config=str(tmp_path / "own.yaml"), quick=True, values={"learning_rate": 0.5})

    config = make_config(seo, request, Source(values={"patience": 7, "epochs": 99}))

    assert (config.learning_rate, config.hidden, config.epochs, config.patience) == (0.5, 48, seo.QUICK["epochs"], 7)


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_offers_what_the_command_needs(recipe: Recipe) -> None:
    package = recipe.load()

    assert dataclasses.is_dataclass(package.Config)
    known = {item.path for item in list_fields(package.Config)}
    leaves = {path.rpartition(".")[2] for path in known}
    assert set(package.QUICK) <= known | leaves
    for verb in ("train", "predict", "sample"):  # a module of that name would take the function's place when imported
        assert callable(getattr(package, verb, print))
        assert not (Path(package.__file__).parent / f"{verb}.py").exists()


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert main(["train"]) == 2
    listed = capsys.readouterr().out
    for recipe in list_recipes():
        assert f"  {recipe.name}" in listed


def test_the_help_of_a_recipe_lists_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "seo", "--help"]) == 0

    told = " ".join(capsys.readouterr().out.split())
    assert f"--predict PATH {seo.PREDICT}" in told
    assert "--sample" not in told
    assert "--learning-rate number Initial learning rate. [default: 0.001]" in told
    assert (
        "--num-buckets number Words are hashed into so many rows of the table of word vectors. [default: 8192]" in told
    )
    for item in list_fields(seo.Config):
        assert item.help, item.path
        default = f"[default: {spell_value(item.usual)}]"
        assert f"{item.opts[0]} {item.kind} {item.help} {default}".replace("- ", "-") in told.replace("- ", "-")


def test_the_help_of_the_recipes_does_not_load_torch() -> None:
    names = [recipe.name for recipe in list_recipes()]
    code = (
        "import sys; from steadygrad.cli import main; "
        f"codes = [main(['train', name, '--help']) for name in {names}]; "
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--predict PATH  score an HTML page, a folder of them" in " ".join(done.stdout.split("\n"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["soe"], "there is no recipe 'soe' to train. Did you mean seo?"),
        (
            ["seo", "--learning-rat", "1"],
            "--learning-rat is not a field of the recipe seo. Did you mean --learning-rate?",
        ),
        (
            ["mmdit", "--seed", "1"],
            "--seed is a field of several parts: --training.seed or --sampling.seed. Write which.",
        ),
        (["mmdit", "--num_stps", "1"], "--num-stps is not a field of the recipe mmdit. Did you mean --num-steps?"),
        (["seo", "--learning-rate", "-1"], "Error: --learning-rate must be a finite number above 0, got -1.0."),
        (["mmdit", "--lr", "0"], "Error: --optimizer.lr must be a finite number above 0, got 0.0."),
        (["mmdit", "--lr", "0", "--training.max-steps", "0"], "  --training.max-steps must be a whole number"),
        (["clip6d", "--modalities", "image"], "Error: --modalities must be two to 6, got 1: image."),
        (["mmdit", "--max-steps", "few"], "Error: --training.max-steps must be a number or none, got 'few'."),
        (["cod", "--epochs", "few"], "Error: --epochs must be a number, got 'few'. The default is 140."),
        (["seo", "--config", "none.yaml"], "none.yaml: no such file."),
        (["seo", "--resume", "nowhere"], "nowhere does not exist, so nothing can be resumed from it."),
        (["seo", "--resume", "latest"], "there is no run of seo in runs/."),
        (["seo", "--resume", "."], "--resume . is not a run of seo: it has no recipe.json. Give a run directory."),
        (["seo", "--resume", "model.pth"], "--resume model.pth is a file. Give a run directory, or one of"),
        (["seo", "--run-dir", "model.pth"], "--run-dir model.pth is a file."),
        (["seo", "--predict", "page.html"], "there is no run of seo in runs/."),
        (["seo", "--sample", "--run-dir", "x"], "the recipe seo cannot sample."),
        (["seo", "--data", "nowhere"], "there is no file or folder nowhere to read pages from, seen from "),
    ],
)
def test_what_cannot_be_done_is_exit_code_2_and_told(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pth").touch()

    assert main(["train", *arguments]) == 2

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "text", "words", "told"),
    [
        ("seo", "epochs: abc", [], ["Error: own.yaml: epochs: must be int, got 'abc'."]),
        ("seo", "epochs: -1", [], ["Error: own.yaml: epochs must be a whole number, at least 1, got -1."]),
        ("seo", "learning_rat: 1", [], ["Error: own.yaml: learning_rat: unknown; did you mean learning_rate? "]),
        ("seo", "epochs: abc\nhidden: 0", ["--quick"], ["2 wrong", "  own.yaml: epochs: ", "  own.yaml: hidden must "]),
        ("seo", "epochs: abc", ["--hidden", "0"], ["2 wrong", "  own.yaml: epochs: ", "  --hidden must be a whole"]),
        (
            "mmdit",
            "optimizer: {lr: 0}",
            [],
            ["Error: own.yaml: optimizer.lr must be a finite number above 0, got 0.0."],
        ),
        ("mmdit", "training.dtype: fp9", [], ["Error: own.yaml: training.dtype: must be one of bf16, fp16, fp32, got"]),
        ("mmdit", "optimizer: 3", [], ["Error: own.yaml: optimizer: must be a mapping of fields, got 3."]),
        ("mmdit", "on: 3\n7: 4", [], ["2 wrong", "  own.yaml: True: unknown; ", "  own.yaml: 7: unknown; "]),
        ("clip6d", "modalities: [1, 2]", [], ["Error: own.yaml: modalities: 1, 2 is not a modality"]),
        # The field is a default, a flag or --quick's; the file has the one that it does not fit.
        ("cod", "epochs: 2", [], ["Error: --stage1-epochs must be less than epochs, ", " epochs is from own.yaml."]),
        ("cod", "epochs: 2", ["--quick"], ["Error: --stage1-epochs must be less than", " epochs is from own.yaml."]),
        ("cod", "epochs: 2", ["--stage1-epochs", "9"], ["Error: --stage1-epochs must be", " epochs is from own.yaml."]),
    ],
)
def test_a_wrong_field_of_a_file_is_told_with_the_name_of_the_file(
    recipe: str,
    text: str,
    words: list[str],
    told: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(text)

    assert main(["train", recipe, "--config", "own.yaml", *words]) == 2

    said = capsys.readouterr().err
    assert [part for part in told if part not in said] == []
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


def test_a_field_that_the_command_line_gives_is_not_blamed_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("epochs: abc\nhidden: 16\n")

    assert main(["train", "seo", "--config", "own.yaml", "--epochs", "0"]) == 2

    told = capsys.readouterr().err
    assert told.startswith("Error: --epochs must be a whole number, at least 1, got 0.")
    assert "own.yaml" not in told


def test_a_run_that_remembers_a_field_that_is_no_more_is_told_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", "recipe.json").write_text(json.dumps({"recipe": "cod", "config": {"epoch": 3, "stage1_epochs": 30}}))
    assert main(["train", "cod", "--resume", "run"]) == 2
    assert f"Error: {Path('run', 'recipe.json')}: epoch: unknown; did you mean epochs? " in capsys.readouterr().err

    # What it remembers did fit: what is wrong then is what was given beside it.
    Path("run", "recipe.json").write_text(json.dumps({"recipe": "cod", "config": {"stage1_epochs": 30}}))
    assert main(["train", "cod", "--resume", "run", "--epochs", "9"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("Error: --stage1-epochs must be less than epochs, which is 9, got 30.")
    assert "recipe.json" not in told


def test_a_run_leaves_its_record_its_settings_its_checkpoints_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["train", "seo", *TINY]) == 0

    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("seo-")
    names = {path.name for path in run.iterdir()}
    assert {"run.json", "steps.jsonl", "train.log", "checkpoints", "recipe.json", "report.html"} <= names
    assert [path for path in tmp_path.iterdir() if path.name != "runs"] == []
    settings = json.loads((run / "recipe.json").read_text())
    assert settings["recipe"] == "seo"
    assert settings["config"]["num_synthetic"] == 40
    told = capsys.readouterr().out
    assert f"The report is in {Path('runs') / run.name / 'report.html'}" in told


def test_a_resumed_run_has_the_settings_it_was_started_with_and_those_given_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert main(["train", "seo", *TINY, "--run-dir", run]) == 0

    assert main(["train", "seo", "--resume", run, "--epochs", "3"]) == 0

    told = capsys.readouterr().out
    assert "Resumed at step 1." in told
    assert "Epoch 3/3" in told
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["config"]["num_synthetic"] == 40


def test_values_are_spelled_in_the_help_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "clip6d", "--help"]) == 0
    assert main(["train", "mmdit", "--help"]) == 0

    told = capsys.readouterr().out
    assert max(len(line) for line in told.splitlines()) <= 100
    told = " ".join(told.split())
    assert re.search(r"--modalities text,\.\.\. .*? \[default: image,en,de,es,zh,vector\] --val-share", told)
    assert re.search(r"--data text \| none .*? \[default: none\] --images", told)
    assert re.search(r"--training.dtype bf16\|fp16\|fp32 .*? \[default: bf16\] --training.grad", told)
    assert "Fields of optimizer: --optimizer.lr number Learning rate after the warm-up. [default: 5e-05]" in told


# --- one directory, one training --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", "seo", *TINY, "--epochs", "2", "--run-dir", str(run)]) == 0
    return run


def test_a_second_training_in_a_run_directory_is_refused_and_changes_nothing(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}

    assert main(["train", "seo", *TINY, "--run-dir", str(finished)]) == 2

    assert f"{finished} already holds a training. Continue it with steadygrad train seo --resume" in (
        capsys.readouterr().err
    )
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("words", [["--resume", "latest"], ["--predict", "leaf.jpg"]])
def test_a_run_of_another_recipe_is_told(finished: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cod", *words, "--run-dir", str(finished)]) == 2

    assert f"{finished} holds a run of seo, not of cod. Use another --run-dir." in capsys.readouterr().err


def test_a_training_that_cannot_begin_leaves_no_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "seo", *TINY]) == 0
    (run,) = (tmp_path / "runs").iterdir()

    assert main(["train", "seo", "--data", "nowhere"]) == 2
    assert main(["train", "seo", *TINY, "--device", "nothing"]) == 2

    assert list((tmp_path / "runs").iterdir()) == [run]
    capsys.readouterr()
    assert main(["train", "seo", "--resume", "latest"]) == 0
    assert f"Training seo in {Path('runs') / run.name}" in capsys.readouterr().out


def test_a_resume_that_cannot_begin_leaves_the_settings_as_they_were(finished: Path) -> None:
    before = (finished / "recipe.json").read_text()

    assert main(["train", "seo", "--resume", str(finished), "--data", "nowhere"]) == 2

    assert (finished / "recipe.json").read_text() == before


def test_a_model_whose_folder_was_moved_is_the_same_and_another_one_is_not(tmp_path: Path) -> None:
    before = Source(values={"model": "/old/disk/base"})
    require_same(("model",), before, Source(values={"model": str(tmp_path / "base")}), tmp_path)
    with pytest.raises(UsageError, match="was trained with /old/disk/base"):
        require_same(("model",), before, Source(values={"model": str(tmp_path / "other")}), tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "9"], "--seed is 9, and {run} was trained with {seed}. "),
        (["--num-synthetic", "50"], "--num-synthetic is 50, and {run} was trained with 40. "),
        (["--val-share", "0.5"], "--val-share is 0.5, and {run} was trained with 0.2. "),
    ],
)
def test_a_resume_that_would_split_the_pages_in_another_way_is_refused_and_leaves_the_run_as_it_was(
    words: list[str], message: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    seed = json.loads((finished / "recipe.json").read_text())["config"]["seed"]

    assert main(["train", "seo", "--resume", str(finished), "--epochs", "5", *words]) == 2

    told = capsys.readouterr().err
    assert message.format(run=finished, seed=seed) in told
    assert f"Leave out {words[0]}, or start a new run." in told
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["seo", "clip6d", "cod", "mmdit", "sft"])
def test_fields_that_a_resume_cannot_change_exist(name: str) -> None:
    package = find_recipe(name).load()
    paths = Source(values=to_plain(package.Config())).values

    assert [field for field in package.FIXED if not any(f"{path}.".startswith(f"{field}.") for path in paths)] == []


def fail(run: Path, epochs: int, error: BaseException, **written: str) -> None:
    """A training that ends with this error after it has written these files."""
    with remember_settings(run, "seo", {"epochs": epochs}):
        for name, text in written.items():
            (run / f"{name}.jsonl").write_text(text)
        raise error


@pytest.mark.parametrize("error", [UsageError("no data"), RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("trains", [False, True])
def test_settings_are_those_of_the_steps_on_disk_whatever_ends_a_resume(
    tmp_path: Path, error: BaseException, trains: bool
) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step":0}\n')
    with remember_settings(tmp_path, "seo", {"epochs": 1}):
        pass

    with pytest.raises(type(error)):
        fail(tmp_path, 2, error, **({"steps": '{"step":0}\n{"step":1}\n'} if trains else {}))

    assert json.loads((tmp_path / "recipe.json").read_text())["config"] == {"epochs": 2 if trains else 1}


def test_a_new_run_that_crashes_in_its_first_step_keeps_what_was_recorded_of_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RuntimeError):
        fail(run, 2, RuntimeError("probability tensor contains nan"), incidents="{}\n")

    assert sorted(path.name for path in run.iterdir()) == ["incidents.jsonl", "recipe.json"]


def test_the_best_checkpoint_can_be_resumed_from(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluations = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluations] == [1, 2]
    assert set(evaluations[0]) >= {"epoch", "stage", "val_loss", "val_r2"}
    best = min(evaluations, key=lambda line: line["val_loss"])

    assert main(["train", "seo", "--resume", "best", "--run-dir", str(finished)]) == 0

    assert f"Resumed at step {best['step']}." in capsys.readouterr().out


def test_without_protection_norms_and_report_are_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "seo", *TINY, "--no-protect", "--run-dir", str(tmp_path / "run")]) == 0

    told = capsys.readouterr().out
    assert "Epoch 1/1: loss=" in told
    assert "nan" not in told
    assert told.splitlines()[-1] == "No report: without protection nothing is recorded."


def test_a_training_that_somebody_interrupts_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("steadygrad_recipes.seo.trainer.UltraOptimizedSEOTrainer.end_epoch", interrupt)
        assert main(["train", "seo", *TINY, "--epochs", "2", "--run-dir", str(run)]) != 0
    assert capsys.readouterr().out.splitlines()[-1] == f"To continue: steadygrad train seo --resume {run}"

    assert main(["train", "seo", "--resume", str(run)]) == 0

    assert "Epoch 2/2: loss=" in capsys.readouterr().out
