"""The demo as a user sees it: the unguarded run dies, the guarded one survives, and the numbers are real."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

from steadygrad.cli import main
from steadygrad.facts import Action, Finding, Incident, Outcome, Severity, Verdict
from steadygrad_recipes.demo import Comparison, DemoSettings, Fault, RunSummary, run_demo
from steadygrad_recipes.demo import model as bad_model
from steadygrad_recipes.demo.faults import EMPTY_SAMPLE, NAN_SAMPLE, FaultPlan
from steadygrad_recipes.demo.model import TextModel
from steadygrad_recipes.demo.text import LETTERS, PADDING, decode, encode, make_texts
from steadygrad_recipes.demo.words import draw_losses

SETTINGS = DemoSettings.quick()
PLAN = SETTINGS.faults
BAD_STEPS = [PLAN.empty_step, PLAN.nan_step]
BAD_LINE = "size = x.square().mean(-1, keepdim=True).sqrt()"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEADYGRAD", raising=False)


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def number_of(source: str) -> int:
    """Return the line of the model's file with this text."""
    lines = Path(bad_model.__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.strip() == source]
    return number


class Notebook:
    """A Listener that records everything."""

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {}
        self.faults: list[tuple[str, int]] = []
        self.lost: list[tuple[str, int, str]] = []
        self.incidents: list[Incident] = []

    def begin(self, name: str, num_steps: int) -> None:
        self.losses[name] = []

    def fault(self, name: str, fault: Fault) -> None:
        self.faults.append((name, fault.step))

    def step(self, name: str, step: int, loss: float) -> None:
        self.losses[name].append(loss)

    def lose(self, name: str, step: int, what: str) -> None:
        self.lost.append((name, step, what))

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)

    def end(self, summary: RunSummary) -> None:
        pass


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Notebook, Comparison]:
    """Run one demo; return its folder, what the listener recorded, and the result."""
    folder, notebook, threads = tmp_path_factory.mktemp("demo") / "run", Notebook(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STEADYGRAD", raising=False)
        comparison = run_demo(folder, SETTINGS, notebook)
    assert torch.get_num_threads() == threads
    return folder, notebook, comparison


def test_the_unguarded_run_dies_the_guarded_one_survives_and_the_line_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["demo", "--quick", "--device", "cpu"])
    output = capsys.readouterr().out

    assert code == 0
    assert f"Unguarded died at step {PLAN.empty_step}" in output
    assert "Guarded survived: 2 steps skipped, 1 rollback" in output
    assert re.search(r"unguarded +NaN +nothing: all its probabilities are NaN", output)
    assert re.search(r" guarded +0\.\d+ +the old [a-z ]+", output)
    assert "\x1b" not in output

    line = number_of(BAD_LINE)
    assert f"model.py line {line}, in module blocks.0.norm_" in output
    assert re.search(rf"> +{line} \| +{re.escape(BAD_LINE)}$", output, re.MULTILINE)
    assert f"(index {EMPTY_SAMPLE})" in output
    assert "the batch: weights held NaN before any op ran" in output
    assert f"(index {NAN_SAMPLE})" in output

    (folder,) = Path("runs").glob("demo-*")
    assert f"Report      {folder / 'report.html'}" in output
    assert f"{folder / 'model.py'}:{line}" in output
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Lost." in page
    assert "there was no guard to find the cause" in page
    assert "Survived." in page


def test_both_runs_are_recorded_step_by_step(recorded: tuple[Path, Notebook, Comparison]) -> None:
    folder, _, _ = recorded
    dead, guarded = (read_lines(folder / name / "steps.jsonl") for name in ("unguarded", "guarded"))
    assert [len(dead), len(guarded)] == [SETTINGS.num_steps] * 2
    assert {step["loss"] for step in dead[PLAN.empty_step + 1 :]} == {"nan"}
    assert not any(step["skipped"] for step in dead)
    # Clipped steps round differently in the two loops, and training amplifies that: only the first ones must be equal.
    assert [step["loss"] for step in dead[:10]] == pytest.approx([step["loss"] for step in guarded[:10]], rel=1e-4)
    rates = [step["learning_rates"][0] for step in dead]  # type: ignore[index]
    jumped = [i for i, rate in enumerate(rates) if rate != SETTINGS.learning_rate]
    assert jumped == list(range(PLAN.jump_step, PLAN.jump_step + PLAN.jump_length))
    incidents = read_lines(folder / "guarded" / "incidents.jsonl")
    assert {i["step"] for i in incidents if i["outcome"]["action"] == "skip"} == set(BAD_STEPS)  # type: ignore[index]
    assert (folder / "unguarded" / "incidents.jsonl").read_text() == ""


def test_a_disabled_guard_is_not_a_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    assert main(["demo", "--quick", "--device", "cpu", "--run-dir", "here"]) == 2
    output = capsys.readouterr().out
    assert re.search(r" guarded +NaN +nothing: all its probabilities are NaN", output)
    assert "STEADYGRAD=off" in output
    assert "No record of the guarded run was written" in output


@pytest.mark.parametrize("name", ["guarded/steps.jsonl", "unguarded/run.json", "run.json"])
def test_a_directory_with_a_run_is_not_touched(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("here") / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert main(["demo", "--quick", "--run-dir", "here"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert [p for p in Path("here").rglob("*") if p.is_file()] == [path]
    assert path.read_text() == "{}"


def test_a_directory_that_cannot_be_created_fails_before_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert main(["demo", "--quick", "--run-dir", "file/below"]) == 2
    captured = capsys.readouterr()
    assert "cannot write to file/below" in captured.err
    assert "1. Unguarded" not in captured.out


def test_a_missing_device_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--device", "cuda:99"]) == 2
    assert "cannot train on device 'cuda:99'" in capsys.readouterr().err


def test_the_listener_gets_the_same_as_the_comparison(recorded: tuple[Path, Notebook, Comparison]) -> None:
    _, notebook, comparison = recorded
    steps = [PLAN.jump_step, PLAN.empty_step, PLAN.nan_step]
    assert notebook.faults == [(name, step) for name in ("unguarded", "guarded") for step in steps]
    assert math.isfinite(notebook.losses["unguarded"][PLAN.empty_step])  # the loss is fine; the gradient is not
    assert all(math.isnan(loss) for loss in notebook.losses["unguarded"][PLAN.empty_step + 1 :])
    assert [i for i, loss in enumerate(notebook.losses["guarded"]) if not math.isfinite(loss)] == [PLAN.nan_step]
    assert notebook.lost == [
        ("unguarded", PLAN.empty_step, "weights"),
        ("unguarded", PLAN.empty_step + 1, "loss"),
        ("guarded", PLAN.nan_step, "loss"),
    ]
    assert tuple(notebook.incidents) == comparison.incidents
    assert comparison.unguarded_died
    assert comparison.guarded_survived
    assert list(comparison.guarded.losses) == notebook.losses["guarded"]


def test_the_guarded_run_ends_like_a_run_without_faults(
    recorded: tuple[Path, Notebook, Comparison], tmp_path: Path
) -> None:
    beyond = SETTINGS.num_steps + 1
    calm = dataclasses.replace(SETTINGS, faults=FaultPlan(jump_step=beyond, empty_step=beyond, nan_step=beyond))
    clean = run_demo(tmp_path / "clean", calm, Notebook()).unguarded
    saved = recorded[2].guarded
    assert clean.weights_are_finite
    # The rollback costs about 50 of 180 steps, on a curve that is still falling.
    assert clean.final_loss < saved.final_loss < 1.5 * clean.final_loss


@pytest.mark.parametrize(("empty", "finite"), [(False, True), (True, False)])
def test_only_an_empty_text_triggers_the_bug_and_its_loss_does_not_show_it(empty: bool, finite: bool) -> None:
    torch.manual_seed(0)
    model = TextModel(width=16, num_layers=1, context=12)
    tokens = make_texts(1, 4, 13, seed=0)[0]
    if empty:
        tokens[2] = PADDING
    loss = model(tokens=tokens, weights=torch.ones(4))
    loss.backward()
    assert math.isfinite(loss.item())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients) is finite


def test_texts_consist_of_words_and_are_not_padded() -> None:
    texts = make_texts(3, 5, 40, seed=1)
    assert texts.shape == (3, 5, 40)
    assert int(texts.min()) > PADDING
    words = decode(texts.flatten()[:40]).split()
    assert set("".join(words)) <= set(LETTERS)
    assert decode(encode("the old fox.")) == "the old fox."
    assert not torch.equal(texts, make_texts(3, 5, 40, seed=2))


def answer(kind: str, action: Action, step: int) -> Incident:
    finding = Finding(kind=kind, severity=Severity.ERROR, step=step, message="it is")
    return Incident(
        step=step,
        finding=finding,
        verdict=Verdict(action=action, reason="so"),
        outcome=Outcome(action=action, message=""),
    )


ANSWERS = (
    answer("unrecovered_loss", Action.ROLLBACK, 104),
    answer("nonfinite_gradient", Action.SKIP, 130),
    answer("nonfinite_input", Action.SKIP, 150),
)
SURVIVOR = RunSummary(
    name="guarded",
    losses=(0.5,) * 180,
    final_loss=0.1,
    written="the old fox.",
    weights_are_finite=True,
    num_skipped=2,
    num_rollbacks=1,
    first_bad_loss=150,
    seconds=1.0,
)
DEAD = dataclasses.replace(SURVIVOR, final_loss=math.nan, weights_are_finite=False, first_bad_weight=30)


def compare(
    *, unguarded: RunSummary = DEAD, guarded: RunSummary = SURVIVOR, incidents: tuple[Incident, ...] = ANSWERS
) -> Comparison:
    return Comparison(unguarded=unguarded, guarded=guarded, incidents=incidents, faults=PLAN.list())


@pytest.mark.parametrize(
    "guarded",
    [
        DEAD,
        dataclasses.replace(SURVIVOR, final_loss=0.6),
        dataclasses.replace(SURVIVOR, final_loss=math.nan),
        dataclasses.replace(SURVIVOR, num_skipped=1),
        dataclasses.replace(SURVIVOR, num_skipped=3),
        dataclasses.replace(SURVIVOR, num_rollbacks=0),
        dataclasses.replace(SURVIVOR, first_bad_weight=50),
    ],
)
def test_survival_needs_finite_weights_a_response_to_each_fault_and_progress(guarded: RunSummary) -> None:
    assert compare().guarded_survived
    assert not compare(guarded=guarded).guarded_survived


def test_an_unnamed_fault_is_not_survival() -> None:
    assert not compare(incidents=ANSWERS[:2]).guarded_survived


def test_an_unguarded_run_that_lives_is_not_reported_as_dead() -> None:
    assert compare().unguarded_died
    assert not compare(unguarded=SURVIVOR).unguarded_died


def test_curves_share_a_scale_and_show_when_a_run_is_lost() -> None:
    dead, alive = draw_losses([[1.0, 100.0, math.nan, math.nan], [1.0, 1.0, math.nan, 0.01]], width=4)
    assert [row[2:] for row in dead] == ["  ", "××"]
    assert dead[0][1] == "█"
    assert alive[1][2] == "×"
    assert alive[1][3] == "▁"
    assert dead[1][0] == alive[1][0]
    (many,) = draw_losses([[1.0] * 500 + [math.nan] * 500], width=10)
    assert many[1].endswith("×××××")
    assert len(many[1]) == 10
