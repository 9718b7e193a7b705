"""A failing disk never ends a training: it is reported once, existing files stay, and the next save tries again.

Full and read-only disks are real: a small tmpfs in a new mount namespace where the system allows that, and otherwise
the limit on file sizes, which every system has.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forks import run_forked
from steadygrad import Guard, GuardConfig
from steadygrad.checkpoint import CheckpointStore
from steadygrad.config import CheckpointConfig
from steadygrad.record.run_directory import require_device

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")

PROGRAM = """
import json, logging, os, resource, subprocess, sys
from pathlib import Path
import torch
from torch import nn
from steadygrad import Guard, GuardConfig
from steadygrad.config import CheckpointConfig

kind, run_dir = sys.argv[1], Path(sys.argv[2])
disk = run_dir / "checkpoints"
logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
torch.manual_seed(0)
model = nn.Linear(200, 200)
guard = Guard(model, torch.optim.AdamW(model.parameters()), run_dir=run_dir,
              config=GuardConfig(checkpoint=CheckpointConfig(keep_last=9, signals=False)))

def train(steps):
    for _ in range(steps):
        guard.step(lambda x: model(x).square().mean(), torch.ones(2, 200))

def save():
    made = guard.save()
    return made is not None and made.wait() is not None

def break_disk():
    if kind == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    elif kind == "full":
        file = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            while os.write(file, b"0" * 4096): pass
        except OSError: os.close(file)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

def mend_disk():
    if kind == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif kind == "full":
        (disk / "filler").unlink()
    else:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

train(2)
saved = [save()]
break_disk()
for _ in range(3):
    train(1)
    saved.append(save())
train(2)
left = sorted(path.name for path in disk.iterdir() if path.name != "filler")
mend_disk()
saved.append(save())
reports = [i.finding.message for i in guard.incidents if i.finding.kind == "checkpoint_failed"]
steps = guard.stats()["num_steps"]
again = nn.Linear(200, 200)
second = Guard(again, torch.optim.AdamW(again.parameters()))
resumed = second.resume(run_dir)
print(json.dumps({"saved": saved, "left": left, "reports": reports, "steps": steps, "resumed": resumed,
                  "equal": torch.equal(model.weight, again.weight)}))
"""


def run_program(kind: str, run_dir: Path) -> dict[str, Any]:
    (run_dir / "checkpoints").mkdir(parents=True)
    if kind == "file size":
        done = run_forked(PROGRAM, kind, str(run_dir))
    else:
        script = 'mount -t tmpfs -o size=3m tmpfs "$0" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", script, str(run_dir / "checkpoints")]
        command += [sys.executable, "-W", "ignore", "-c", PROGRAM, kind, str(run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def can_mount() -> bool:
    """Whether this system allows us a mount."""
    if shutil.which("unshare") is None:
        return False
    script = "mount -t tmpfs -o size=64k tmpfs /mnt"
    return subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["file size", "full", "read-only"])
def test_training_continues_the_last_good_checkpoint_stays_and_the_failure_is_reported_once(
    tmp_path: Path, kind: str
) -> None:
    if kind != "file size" and not can_mount():
        pytest.skip("mounts are not allowed here")
    found = run_program(kind, tmp_path / "run")
    assert found["saved"] == [True, False, False, False, True]
    assert found["left"] == ["step_00000002"], "no half-written one is left, the good one is"
    assert len(found["reports"]) == 1, found["reports"]
    assert "could not be saved" in found["reports"][0]
    assert found["steps"] == 7
    assert (found["resumed"], found["equal"]) == (7, True)


def train(guard: Guard, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        guard.step(lambda x: model(x).square().mean(), torch.ones(2, 3))


def make_guard(run_dir: Path, **settings: Any) -> tuple[nn.Module, Guard]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    config = GuardConfig(checkpoint=CheckpointConfig(**settings))
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, run_dir=run_dir)


def reports(guard: Guard) -> list[str]:
    return [i.finding.message for i in guard.incidents if i.finding.kind == "checkpoint_failed"]


def test_a_vanished_folder_is_created_again_and_reported(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path / "run")
    train(guard, model, 1)
    guard.save()
    guard.checkpoints.wait()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for _ in range(3):
        train(guard, model, 1)
        save = guard.save()
        assert save is not None
        assert save.wait() is not None
    train(guard, model, 1)
    assert len(reports(guard)) == 1
    assert "had been deleted" in reports(guard)[0]
    assert [info.step for info in guard.checkpoints.list()] == [2, 3, 4]


def test_a_vanished_run_directory_is_created_again_and_reported(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path / "run")
    train(guard, model, 1)
    guard.save()
    guard.checkpoints.wait()
    shutil.rmtree(tmp_path / "run")
    for _ in range(3):
        train(guard, model, 1)
        save = guard.save()
        assert save is not None
        assert save.wait() is not None
    train(guard, model, 2)
    guard.close()
    kinds = [finding.kind for finding in guard.findings]
    assert kinds.count("run_directory_lost") == 1
    assert [info.step for info in guard.checkpoints.list()] == [2, 3, 4]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5], (
        "step 0 was on the disk that is gone; lines held back since are written to the new one"
    )


def test_a_folder_is_not_created_again_below_an_unmounted_disk(tmp_path: Path) -> None:
    """The files under a mount point belong to another file system."""
    require_device(tmp_path / "run" / "checkpoints", tmp_path.stat().st_dev)
    with pytest.raises(OSError, match="gone, and so is the disk"):
        require_device(tmp_path / "run" / "checkpoints", tmp_path.stat().st_dev + 1)


def test_a_file_at_the_folders_path_is_reported_without_an_exception(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with CheckpointStore(tmp_path / "checkpoints") as store:
        save = store.save({"model": {"w": torch.ones(2)}}, step=0)
        assert save.wait() is None
    assert save.error is not None
    assert "File exists" in save.error
    assert len(store.take_failures()) == 1
    assert store.take_failures() == []


def test_a_wrongly_written_checkpoint_is_found_before_older_ones_are_removed(tmp_path: Path) -> None:
    """A disk flips a bit: the new checkpoint is set aside, and the old one is still there."""

    class LosingStore(CheckpointStore):
        def _put_on_disk(self, *args: Any) -> Path:
            path = super()._put_on_disk(*args)
            file = path / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            return path

    with CheckpointStore(tmp_path, keep_last=1) as store:
        store.save({"model": {"w": torch.ones(2)}}, step=0)
    with LosingStore(tmp_path, keep_last=1) as losing:
        save = losing.save({"model": {"w": torch.ones(2)}}, step=1)
        assert save.wait() is None
    assert "read back" in str(save.error)
    assert [info.step for info in store.list()] == [0]
    assert (tmp_path / "set_aside" / "step_00000001" / "reason.txt").exists()


def test_a_program_that_exits_without_close_finishes_its_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from steadygrad.checkpoint import CheckpointStore\n"
        "store = CheckpointStore(sys.argv[1])\n"
        "store.save({'model': {'w': torch.ones(8 << 20)}}, step=0)\n"
    )
    assert run_forked(code, str(tmp_path)).returncode == 0
    found = CheckpointStore(tmp_path).load()
    assert found is not None
    assert found.state["model"]["w"].eq(1.0).all()


def test_a_save_waits_until_the_previous_one_no_longer_needs_the_memory(tmp_path: Path) -> None:
    """Many saves at once: each has its own values and none mixes with the next."""
    with CheckpointStore(tmp_path, keep_last=9) as store:
        for step in range(8):
            store.save({"model": {"w": torch.full((1 << 18,), float(step))}}, step=step)
        assert sum(thread.name == "steadygrad-checkpoint" for thread in threading.enumerate()) <= 2
    for step in range(8):
        found = store.load(step)
        assert found is not None
        assert found.state["model"]["w"].eq(float(step)).all()
