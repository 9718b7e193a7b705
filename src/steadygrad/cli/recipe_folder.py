"""Which run directory a `steadygrad train` uses, and what that directory remembers about its recipe.

A directory holds one training. One that already has steps is resumed or left alone: a second training in it would mix
two records, and its best checkpoint could be the other's.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from steadygrad.cli.recipe_config import Source
from steadygrad.cli.recipe_fields import spell_flag, spell_value
from steadygrad.errors import SteadygradError, TrainingHalted, UsageError

RUNS = Path("runs")
SETTINGS = "recipe.json"
CHECKPOINTS = "checkpoints"
STEPS = "steps.jsonl"
WORDS = ("latest", "best")
"""Words that --resume takes besides a path."""


def choose_folder(
    name: str, run_dir: str | None, resume: str | None, *, uses_run: bool = False, takes_weights: bool = False
) -> Path:
    """Return the run directory to write to or read; `uses_run`: it must have been trained already.

    `takes_weights`: --resume may name another program's file, whose weights a new run starts from.
    """
    if run_dir is not None:
        return _require_folder(Path(run_dir), "--run-dir")
    if resume is not None and takes_weights and is_weights(resume):
        return name_folder(RUNS, name)
    if resume is not None and resume not in WORDS:
        found = _require_folder(find_run(Path(resume)), "--resume")
        if not (found / SETTINGS).is_file():
            raise UsageError(f"--resume {found} is not a run of {name}: it has no {SETTINGS}. Give a run directory.")
        return found
    if resume is None and not uses_run:
        return name_folder(RUNS, name)
    newest = find_newest(RUNS, name, holding=CHECKPOINTS)
    if newest is None and not uses_run:
        newest = find_newest(RUNS, name)  # it ended before its first checkpoint
    if newest is None:
        raise UsageError(f"there is no run of {name} in {RUNS}/. Train one first, or say where it is with --run-dir.")
    return newest


def is_weights(resume: str) -> bool:
    """Whether --resume names a file of weights: a new run starts from it."""
    return resume not in WORDS and Path(resume).is_file()


def name_start(resume: str | None, run_dir: Path) -> str | None:
    """Return what a recipe resumes from; the run directory itself means its newest checkpoint, if there is one yet."""
    return "latest" if resume is not None and Path(resume) == run_dir else resume


def find_run(path: Path) -> Path:
    """Return the run directory that `path` is, or that it is a checkpoint of."""
    is_inside = path.parent.name == CHECKPOINTS
    if not path.exists() and not (is_inside and path.parent.exists()):
        raise UsageError(f"{path} does not exist, so nothing can be resumed from it. Give a run directory.")
    return path.parent.parent if is_inside else path


def _require_folder(path: Path, flag: str) -> Path:
    if path.is_file():
        raise UsageError(f"{flag} {path} is a file. Give a run directory, or one of the folders in its checkpoints.")
    return path


def read_settings(run_dir: Path, name: str) -> Source | None:
    """Read the fields that the run was started with; None for a directory that is not a run yet."""
    path = run_dir / SETTINGS
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        recipe, config = settings["recipe"], dict(settings["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error!r}. Use another --run-dir.") from None
    if recipe != name:
        raise UsageError(f"{run_dir} holds a run of {recipe}, not of {name}. Use another --run-dir.")
    return Source(values=config, file=path, is_remembered=True)


@contextlib.contextmanager
def remember_settings(run_dir: Path, name: str, config: Any, files: Sequence[str] = ()) -> Iterator[None]:
    """Record the settings for the training inside. If it cannot begin, those of before are put back.

    So are the `files` in which the recipe describes its model: a resume that does not fit must not replace them.
    A folder that was made for it is removed after an error of ours; another one may come from the first step, and what
    was recorded of that is kept.
    """
    # Looked at before the folder is made: only a folder of ours may be removed again
    is_ours, num_bytes = not run_dir.exists(), _measure_steps(run_dir)
    paths = [run_dir / file for file in (SETTINGS, *files)]
    before = {path: path.read_bytes() if path.is_file() else None for path in paths}
    run_dir.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(json.dumps({"recipe": name, "config": config}, indent=1) + "\n", encoding="utf-8")
    try:
        yield
    # It is a SteadygradError too, but of a training that has begun
    except TrainingHalted:
        raise
    except BaseException as error:
        if is_ours:
            # rmtree only where this call has made the folder and nothing was trained in it
            if isinstance(error, SteadygradError) and not has_begun(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)
        # Not one step was added, so the settings of before still describe the run
        elif _measure_steps(run_dir) == num_bytes:
            for path, content in before.items():
                path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        raise


def require_new(run_dir: Path, command: str) -> None:
    """Refuse to start a new training in a directory that already has one."""
    if has_begun(run_dir):
        raise UsageError(
            f"{run_dir} already holds a training. Continue it with {command} --resume {run_dir}, "
            "or give another --run-dir."
        )


def require_same(fields: Sequence[str], before: Source, now: Source, run_dir: Path) -> None:
    """Refuse to resume with another value of one of these fields, or of one inside it."""
    for path, value in now.values.items():
        is_fixed = any(f"{path}.".startswith(f"{field}.") for field in fields)
        earlier = before.values.get(path, value)  # a field that the run did not have yet cannot differ
        # Through JSON, which has made lists of the run's tuples
        if is_fixed and json.loads(json.dumps(value)) != earlier != value and not _is_moved(earlier, value):
            raise UsageError(
                f"{spell_flag(path)} is {spell_value(value)}, and {run_dir} was trained with {spell_value(earlier)}. "
                "Its weights, or what it holds out for validation, depend on that. Leave out "
                f"{spell_flag(path)}, or start a new run."
            )


def _is_moved(earlier: object, value: object) -> bool:
    """Whether both are paths of one name: a model's folder may have been moved since."""
    return isinstance(earlier, str) and isinstance(value, str) and Path(earlier).name == Path(value).name


def has_begun(run_dir: Path) -> bool:
    """Whether the directory has a step or a checkpoint."""
    return _measure_steps(run_dir) > 0 or any(path.is_dir() for path in (run_dir / CHECKPOINTS).glob("*"))


def is_recorded(run_dir: Path) -> bool:
    """Whether there is something to report."""
    return (run_dir / "run.json").is_file() or (run_dir / STEPS).is_file()


def _measure_steps(run_dir: Path) -> int:
    """Return the size of the record in bytes."""
    steps = run_dir / STEPS
    return steps.stat().st_size if steps.is_file() else 0


# --- folders ------------------------------------------------------------------------------------------------------
# Where a command writes its run: a new folder with the time in its name, or the newest existing one.


def name_folder(parent: Path, name: str) -> Path:
    """Return a new name such as runs/seo-20260131-101500, with -2, -3, ... if it was taken in the same second."""
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


def find_newest(parent: Path, name: str, *, holding: str = "") -> Path | None:
    """Return the latest folder named by `name_folder`, of those that contain a folder `holding`."""
    # By name, which holds the time: a copy or a backup changes the time of the folder itself
    folders = sorted(path for path in parent.glob(f"{name}-[0-9]*") if (path / holding).is_dir())
    return folders[-1] if folders else None
