"""Reading runs: nothing important is lost, leftovers of a crash do no harm, and memory stays bounded."""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from view_runs import make_incident, make_step, open_directory, write_run

from steadygrad import UsageError
from steadygrad.facts import Severity
from steadygrad.record.encode import to_json
from steadygrad.view.headline import Tone, judge_run, list_numbers
from steadygrad.view.read import RunReader
from steadygrad.view.read.curve import Curve, Share
from steadygrad.view.read.glance import list_glances
from steadygrad.view.read.incident_log import KEPT_FIRST, KEPT_LAST
from steadygrad.view.read.layer_map import ZERO_EXPONENT, LayerMap, fold_names
from steadygrad.view.read.run import find_runs, open_run
from steadygrad.view.read.tail import Tail, as_number


def write_lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{to_json(row)}\n" for row in rows), encoding="utf-8")
    return path


# --- downsampling -------------------------------------------------------------------------------------------------


def test_a_single_spike_up_or_down_is_kept() -> None:
    noise = random.Random(0)
    values = [noise.gauss(0, 1) for _ in range(200_000)]
    values[123_456], values[98_765] = 500.0, -700.0
    curve = Curve(max_buckets=500)
    for start in range(0, len(values), 1000):
        curve.extend(range(start, start + 1000), values[start : start + 1000])
    steps, shown = curve.points()
    assert len(steps) <= 1000
    assert steps == sorted(steps)
    assert (123_456, 500.0) in zip(steps, shown)
    assert (98_765, -700.0) in zip(steps, shown)
    assert all(values[step] == value for step, value in zip(steps, shown))


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(allow_nan=True, allow_infinity=True)), max_size=400),
    st.integers(1, 40),
    st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_every_bucket_keeps_its_extremes_in_any_order(
    pairs: list[tuple[int, float]], max_buckets: int, size: int
) -> None:
    curve = Curve(max_buckets=max_buckets)
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        curve.extend([step for step, _ in part], [value for _, value in part])
    finite = [(step, value) for step, value in pairs if math.isfinite(value)]
    keys = {step // curve.width for step, _ in finite}
    expected = [
        (min(v for s, v in finite if s // curve.width == k), max(v for s, v in finite if s // curve.width == k))
        for k in sorted(keys)
    ]
    assert curve.spans() == expected
    assert len(keys) <= max_buckets


def test_the_fast_path_over_consecutive_steps_equals_the_slow_one() -> None:
    noise = random.Random(1)
    values = [noise.random() for _ in range(30_000)]
    quick, slow = Curve(max_buckets=100), Curve(max_buckets=100)
    for start in range(0, len(values), 700):
        quick.extend(range(start, start + len(values[start : start + 700])), values[start : start + 700])
    for step, value in enumerate(values):
        slow.extend([step], [value])
    assert quick.points() == slow.points()


def test_shares_count_every_step_and_keep_the_first_hit() -> None:
    share = Share(max_buckets=10)
    hits = [step % 7 == 3 for step in range(1000)]
    for start in range(0, 1000, 37):
        share.extend(range(start, min(1000, start + 37)), hits[start : start + 37])
    assert sum(count for _, count in share.hits()) == sum(hits)
    assert share.hits()[0][0] == 3
    assert all(step % 7 == 3 for step, _ in share.hits())
    assert len(share.points()[0]) <= 10


# --- truncated, growing and missing files -------------------------------------------------------------------------


def test_a_partial_line_waits_for_its_end_and_every_line_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step":0}\n{"st')
    tail = Tail(path)
    assert tail.read() == [{"step": 0}]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b'ep":1}\n{"step":2}\n')
    assert tail.read() == [{"step": 1}, {"step": 2}]
    assert tail.read() == []
    assert tail.num_bad == 0


def test_a_truncated_last_line_is_skipped_and_reported(tmp_path: Path) -> None:
    write_run(tmp_path, 50)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step":50,"loss":2.')
    run = RunReader(tmp_path).read_all()
    assert run.steps.num_steps == 50
    assert run.notes == ["1 line of steps.jsonl truncated or corrupt, left out"]
    assert run.progress == 1.0


def test_a_complete_last_line_without_a_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "training_log.jsonl"
    path.write_text('{"loss": 3.0}\n{"loss": 2.0}')
    assert RunReader(path).read_all().steps.num_steps == 2


@pytest.mark.parametrize(
    "corrupt", [b'{"step":1', b"\xff\xfe\x00", b"[1, 2]", b"null", b"NaN", b'{"a":1}{"b":2}', b"[" * 100_000]
)
def test_a_corrupt_line_affects_only_itself(tmp_path: Path, corrupt: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step":0,"loss":1.0}\n' + corrupt + b'\n\n{"step":2,"loss":2.0}\n')
    tail = Tail(path)
    assert [row["step"] for row in tail.read()] == [0, 2]
    assert tail.num_bad == 1


@pytest.mark.parametrize("name", ["steps.jsonl", "rank_0.jsonl"])
def test_corrupt_lines_longer_than_a_chunk_do_not_stop_reading(tmp_path: Path, name: str) -> None:
    lines = [b"\0" * (1 << 20), *(b'{"step":%d,"loss":1.0}' % step for step in range(20))]
    (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
    run = RunReader(tmp_path)

    run.update()

    assert run.progress == 1
    assert (run.steps if name == "steps.jsonl" else next(iter(run.ranks))).last_step == 19


def test_progress_is_incomplete_while_lines_after_corrupt_ones_are_unread(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b"\0" * (1 << 20) + b'\n{"step":0,"loss":1.0}\n')
    run = RunReader(tmp_path)

    run.update(budget_seconds=0)

    assert run.progress < 1


def test_two_halves_of_different_lines_are_not_joined(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step":0\n"loss":1.0}\n')
    tail = Tail(path)
    assert (tail.read(), tail.num_bad) == ([], 2)


def test_a_line_longer_than_a_chunk_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "x" * 1_000_000}, {"step": 1})
    tail = Tail(path)
    rows = [*tail.read(), *tail.read()]
    assert [len(row.get("text", "")) for row in rows] == [1_000_000, 0]


@pytest.mark.parametrize("missing", ["run.json", "steps.jsonl", "layers.jsonl", "incidents.jsonl"])
def test_a_missing_file_gives_a_note(tmp_path: Path, missing: str) -> None:
    write_run(tmp_path, 40)
    (tmp_path / missing).unlink()
    run = RunReader(tmp_path).read_all()
    assert run.notes == [f"{missing} is missing"]
    assert run.steps.num_steps == (0 if missing == "steps.jsonl" else 40)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user may enter; the test runs as a user with limited rights in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        before = os.geteuid()
        yield folder
        os.seteuid(before)


def forbid(path: Path) -> None:
    path.chmod(0)
    if os.geteuid() == 0:  # a user who may read everything
        os.seteuid(65534)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX")
@pytest.mark.parametrize("name", ["steps.jsonl", "layers.jsonl"])
def test_an_unreadable_file_gives_a_note(open_folder: Path, name: str) -> None:
    write_run(open_folder, 40)
    forbid(open_folder / name)

    run = RunReader(open_folder).read_all()

    assert run.notes == [f"{name} cannot be read: Permission denied"]
    assert run.steps.num_steps == (0 if name == "steps.jsonl" else 40)
    assert run.progress == 1


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX")
@pytest.mark.parametrize("name", ["steps.jsonl", "incidents.jsonl"])
def test_an_unreadable_file_does_not_break_the_list_of_runs(open_folder: Path, name: str) -> None:
    write_run(open_folder / "a", 40)
    write_run(open_folder / "b", 40)
    forbid(open_folder / "a" / name)

    assert {one.name for one in list_glances(open_folder)} == {"a", "b"}


def test_a_line_of_brackets_does_not_break_the_list_of_runs(tmp_path: Path) -> None:
    with (write_run(tmp_path / "a", 40) / "steps.jsonl").open("a") as file:
        file.write("[" * 9000 + "\n")

    assert [(one.name, one.last_step) for one in list_glances(tmp_path)] == [("a", 39)]


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    run = RunReader(tmp_path).read_all()
    assert judge_run(run).tone is Tone.EMPTY
    assert list_numbers(run)["steps"] == "0"


def test_a_replaced_run_is_read_again(tmp_path: Path) -> None:
    write_run(tmp_path, 300)
    run = RunReader(tmp_path)
    run.update()
    assert run.steps.num_steps == 300
    for file in tmp_path.iterdir():
        file.unlink()
    write_run(tmp_path, 20, calm=True)
    run.update()
    run.update()
    assert (run.steps.num_steps, run.incidents.count) == (20, 0)


def test_the_time_of_a_resumed_run_continues(tmp_path: Path) -> None:
    first = [to_json(make_step(step, time_seconds=float(step))) for step in range(100)]
    second = [to_json(make_step(80 + step, time_seconds=float(step))) for step in range(50)]
    (tmp_path / "steps.jsonl").write_text("\n".join([*first, *second]) + "\n")
    run = RunReader(tmp_path).read_all()
    assert run.steps.num_returns == 1
    assert run.steps.seconds == 99.0 + 49.0
    assert run.steps.last_step == 129
    assert "the run was resumed" in run.notes[-1]
    steps, _ = run.steps.curves["loss"].points()
    assert steps == sorted(steps)


def test_a_link_that_leaves_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside = write_lines(tmp_path / "outside" / "steps.jsonl", {"step": 0, "loss": 1.0})
    (tmp_path / "root" / "run").mkdir(parents=True)
    (tmp_path / "root" / "run" / "steps.jsonl").symlink_to(outside)
    root = (tmp_path / "root").resolve()
    assert RunReader(root / "run", within=root).read_all().steps.num_steps == 0
    assert RunReader(root / "run").read_all().steps.num_steps == 1


def test_special_files_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "steps.jsonl")
    (tmp_path / "layers.jsonl").mkdir()
    assert RunReader(tmp_path).read_all().steps.num_steps == 0


def test_reading_in_slices_gives_the_same_as_reading_at_once(tmp_path: Path) -> None:
    write_run(tmp_path, 3000)
    whole, sliced = RunReader(tmp_path).read_all(), RunReader(tmp_path)
    rounds = 0
    while sliced.progress < 1 or rounds == 0:
        sliced.update(budget_seconds=1e-9)
        rounds += 1
    assert rounds > 2
    assert sliced.steps.curves["loss"].points() == whole.steps.curves["loss"].points()
    assert sliced.norms.rows() == whole.norms.rows()


# --- steps --------------------------------------------------------------------------------------------------------


def test_a_bare_log_of_losses_is_a_run(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "training_log.jsonl", *({"loss": 3 - i, "lr": 0.1} for i in range(3)))
    run = open_run(path).read_all()
    assert run.steps.curves["loss"].points() == ([0, 1, 2], [3.0, 2.0, 1.0])
    assert run.steps.curves["learning_rate"].points()[1] == [0.1, 0.1, 0.1]
    assert run.notes == []


def test_a_nonfinite_loss_is_counted_and_not_drawn(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "loss": 1.0},
        {"step": 1, "loss": "nan"},
        {"step": 2, "loss": "-inf"},
        {"step": 3, "loss": None},
    ]
    run = RunReader(write_lines(tmp_path / "steps.jsonl", *rows)).read_all()
    assert run.steps.curves["loss"].points() == ([0], [1.0])
    assert run.steps.num_nonfinite == 2
    assert run.steps.nonfinite.hits() == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        ("inf", math.inf),
        ("-inf", -math.inf),
        (None, None),
        (True, None),
        ("1", None),
        ([1], None),
    ],
)
def test_only_numbers_are_read_as_numbers(value: object, number: float | None) -> None:
    assert as_number(value) == number


def test_the_numbers_of_a_run_are_those_written(tmp_path: Path) -> None:
    run = RunReader(write_run(tmp_path)).read_all()
    assert (run.steps.num_steps, run.steps.num_skipped, run.steps.num_nonfinite) == (600, 1, 1)
    assert run.steps.worst_norm == (60.0, 120)
    assert run.clip_threshold == 1.0
    assert run.steps.num_clipped == sum(make_step(s).clipped or s in (120, 340) for s in range(600) if s != 200)
    assert run.norms.names[0] == "embed.weight"


# --- layers -------------------------------------------------------------------------------------------------------


def test_a_layer_that_explodes_for_one_step_is_visible_in_a_long_run() -> None:
    table = LayerMap(max_columns=20)
    for step in range(5000):
        table.add(step, ["a", "b"], [0.01, 1e4 if step == 3333 else 0.01])
    rows = table.rows()
    assert len(table.steps) <= 20
    assert max(exponent for exponent in rows["b"] if exponent is not None) == pytest.approx(4.0)
    assert all(exponent == pytest.approx(-2.0) for exponent in rows["a"])


def test_zero_and_nonfinite_values_are_separate() -> None:
    table = LayerMap()
    table.add(0, ["zero", "bad", "late"], [0.0, math.nan, 1.0])
    table.add(1, ["zero", "bad", "late", "new"], [0.0, 1.0, 1.0, 100.0])
    rows = table.rows()
    assert rows["zero"] == [ZERO_EXPONENT, ZERO_EXPONENT]
    assert rows["bad"] == [None, 0.0]
    assert table.bad_columns() == {"bad": [0]}
    assert rows["new"] == [None, 2.0]
    assert table.worst(1) == [("new", 2.0)]


@pytest.mark.parametrize(
    "name", [lambda i: f"blocks.{i // 10}.mlp.{i % 10}.weight", lambda i: f"w{i}", lambda i: f"a.b.c.d.{i}"]
)
def test_large_models_are_folded_without_losing_a_parameter(name: Callable[[int], str]) -> None:
    names = [name(i) for i in range(1000)]
    folds = fold_names(names, 160)
    assert len(folds) <= 160
    assert sorted(one for group in folds.values() for one in group) == sorted(names)


# --- incidents and the verdict ------------------------------------------------------------------------------------


def test_a_huge_list_is_counted_and_few_items_are_kept(tmp_path: Path) -> None:
    line = to_json(make_incident(7)) + "\n"
    (tmp_path / "incidents.jsonl").write_text(line * 30_000, encoding="utf-8")
    run = RunReader(tmp_path).read_all()
    assert run.incidents.count == 30_000
    assert len(run.incidents.shown()) == KEPT_FIRST + KEPT_LAST
    assert run.incidents.marks["skip"].hits() == [(7, 30_000)]


def test_the_number_of_kinds_is_bounded(tmp_path: Path) -> None:
    lines = [to_json(make_incident(i, kind=f"kind{i}")) for i in range(5000)]
    (tmp_path / "incidents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = RunReader(tmp_path).read_all()
    assert run.incidents.count == 5000
    assert len(run.incidents.shown()) < 200


def test_a_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    headline = judge_run(RunReader(write_run(tmp_path, 400, calm=True)).read_all())
    assert (headline.tone, headline.word) == (Tone.GOOD, "Healthy")
    assert "The loss fell from" in headline.text


def test_a_run_with_a_skip_has_survived_and_its_cause_is_named(tmp_path: Path) -> None:
    headline = judge_run(RunReader(write_run(tmp_path)).read_all())
    assert headline.tone is Tone.WARNING
    assert "1 step of 600 skipped, 1 rollback, 3 incidents" in headline.text
    assert "First cause, step 200: NaN gradient, born in the backward of aten.sqrt at model.py:41." in headline.text


def test_a_run_whose_loss_stays_nan_is_lost(tmp_path: Path) -> None:
    rows = [make_step(step, loss=math.nan if step >= 60 else 2.0) for step in range(100)]
    headline = judge_run(RunReader(write_lines(tmp_path / "steps.jsonl", *rows)).read_all())
    assert (headline.tone, headline.word) == (Tone.BAD, "Lost")
    assert "since step 60" in headline.text


@pytest.mark.parametrize("cuts", [(), (100,), (30, 100, 120)])
def test_a_run_still_nan_after_a_resume_is_lost_from_its_first_nan(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    healthy = [make_step(step, loss=2.0) for step in range(100)]
    resumed = [make_step(step, loss=math.nan) for step in range(50, 90)]
    rows = [*healthy, *resumed]
    path, reader = tmp_path / "steps.jsonl", RunReader(write_lines(tmp_path / "steps.jsonl"))
    for end in (*cuts, len(rows)):  # read as written, at once or in parts
        write_lines(path, *rows[:end])
        reader.update()

    headline = judge_run(reader)

    assert (headline.tone, headline.word) == (Tone.BAD, "Lost")
    assert "since step 50" in headline.text
    assert "was 2 at step 99" in headline.text


def test_the_window_after_a_rollback_does_not_make_a_run_lost(tmp_path: Path) -> None:
    rows = [make_step(s, loss=None, grad_norm=0.0, skipped=True) if s >= 80 else make_step(s) for s in range(100)]
    headline = judge_run(RunReader(write_lines(tmp_path / "steps.jsonl", *rows)).read_all())
    assert headline.word == "Unwell"


def test_a_halted_run_says_why(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    directory.write_step(make_step(0))
    from steadygrad.facts import Action

    directory.write_incident(
        make_incident(9, action=Action.HALT, message="three rollbacks", severity=Severity.CRITICAL)
    )
    directory.close()
    assert "at step 9: three rollbacks" in judge_run(RunReader(tmp_path).read_all()).text


# --- finding runs -------------------------------------------------------------------------------------------------


def test_runs_are_found_in_nested_folders(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        write_lines(tmp_path / name / "steps.jsonl", {"step": 0})
    (tmp_path / "empty").mkdir()
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == ["a", "b/c"]


def test_the_guards_of_one_training_are_found_together(tmp_path: Path) -> None:
    for name in ("gan", "gan/guard-2", "gan/checkpoints/guard-3", "other", "script/optimizer-1", "script/optimizer-2"):
        write_run(tmp_path / name, 3)
    found = [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)]
    assert found == ["gan", "gan/guard-2", "other", "script/optimizer-1", "script/optimizer-2"]
    assert find_runs(tmp_path / "gan") == [tmp_path / "gan", tmp_path / "gan" / "guard-2"]


def test_an_error_suggests_what_was_meant(tmp_path: Path) -> None:
    write_lines(tmp_path / "first" / "steps.jsonl", {"step": 0})
    with pytest.raises(UsageError, match=r"It holds runs: .*first"):
        open_run(tmp_path)
    with pytest.raises(UsageError, match="There is no"):
        open_run(tmp_path / "nowhere")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    "step",
    "loss",
    "grad_norm",
    "clipped",
    "learning_rates",
    "gradients",
    "finding",
    "outcome",
    "cause",
    "severity",
)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=5), max_size=6), ANYTHING)
@settings(max_examples=60, deadline=None)
@example([{"step": 0.0}], None)
@example([{"step": False}, {"step": 1.0}], None)
def test_no_line_of_any_shape_breaks_a_report(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], about: object
) -> None:
    from steadygrad.view.render.report import render_report

    path = tmp_path_factory.mktemp("run")
    for name in ("steps.jsonl", "layers.jsonl", "incidents.jsonl"):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (path / "run.json").write_text(json.dumps({"config": about, "parameters": about, "resumed": about}))
    assert "<!doctype html>" in render_report([RunReader(path).read_all()])


# --- what a reader concludes ----------------------------------------------------------------------------------------


def test_a_batch_omitted_by_a_rollback_has_no_norm(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(10):
        left_out = step in (4, 5)
        changes = {"loss": None, "grad_norm": 0.0, "skipped": True} if left_out else {"grad_norm": 2.0}
        directory.write_step(make_step(step, **changes))
    directory.close()
    run = RunReader(tmp_path).read_all()
    steps, norms = run.steps.curves["grad_norm"].points()
    assert steps == [0, 1, 2, 3, 6, 7, 8, 9]
    assert set(norms) == {2.0}
    assert run.steps.num_skipped == 2


def test_a_log_with_a_loss_that_is_not_a_number_is_not_healthy(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"loss": 3.0}\n{"loss": NaN}\n{"loss": 2.0}\n')
    headline = judge_run(RunReader(log).read_all())
    assert headline.tone is Tone.WARNING
    assert "1 step of 3 not finite, none skipped" in headline.text


@pytest.mark.parametrize("content", [b"root:x:0:0", b"\x89PNG\r\n", b"[1, 2]", b"\n\nstep,loss\n"])
def test_a_file_that_is_not_a_log_is_refused_with_its_first_characters(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is not a file of JSON lines: it begins with"):
        open_run(path)


@pytest.mark.parametrize("content", [b"", b"\n", b'{"loss": 1}\n', b'\xef\xbb\xbf{"loss": 1}\n'])
def test_a_log_may_be_empty_or_begin_with_a_byte_order_mark(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    open_run(path).read_all()
