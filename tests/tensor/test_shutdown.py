"""A signal at any point of the program: every guard saves at a consistent moment, and the exit code is 75."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forks import run_forked, start_forked
from steadygrad import Guard
from steadygrad.checkpoint import signals
from steadygrad.checkpoint.catalogue import read_infos
from steadygrad.checkpoint.signals import EXIT_CODE

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")

HEAD = """
import logging, os, signal, sys, threading, time
import torch
from torch import nn
from steadygrad import Guard, GuardConfig
from steadygrad.checkpoint import signals
from steadygrad.config import CheckpointConfig
logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with SIGINT ignored
folder = sys.argv[1]
def make(name="run"):
    model = nn.Linear(4, 1)
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=os.path.join(folder, name))
def step(model, guard, x=None):
    guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4) if x is None else x)
def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
"""


def run_program(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(HEAD + textwrap.dedent(code), str(folder))


def saved_steps(folder: Path) -> list[int]:
    return [info.step for info in read_infos(folder / "checkpoints")]


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("sleep", "time.sleep(600)\nprint('still here')"),
        ("work", "while True: sum(range(1000))"),
        ("error", "raise ValueError('after the signal')"),
        ("worker", "raise RuntimeError('DataLoader worker (pid 1) exited unexpectedly')"),
        ("inside with", "with guard:\n    raise ValueError('after the signal')"),
        ("validate", "guard.validate(0.5)\nprint('still here')\ntime.sleep(600)"),
        ("end_epoch", "guard.end_epoch()\nprint('still here')\ntime.sleep(600)"),
        ("loader", "for x in guard.batches(iter(lambda: 1 / 0, None)): pass"),
        ("function", "guard.step(lambda: 1 / 0)"),
    ],
)
def test_a_signal_between_two_steps_is_handled_at_once(tmp_path: Path, where: str, code: str) -> None:
    lines = ["signals.GRACE_SECONDS = 0.5", "model, guard = make()", "for _ in range(7): step(model, guard)", "send()"]
    lines += code.splitlines()
    done = run_program("\n".join(lines), tmp_path)
    assert done.returncode == EXIT_CODE, (where, done.stderr)
    assert saved_steps(tmp_path / "run") == [7]
    assert "still here" not in done.stdout


def test_a_program_that_will_step_soon_is_not_stopped_between_its_steps(tmp_path: Path) -> None:
    """The step is completed, so that the resumed run draws the same random numbers as an uninterrupted one."""
    code = """
    model, guard = make()
    for t in range(9):
        if t == 5: send()
        time.sleep(0.1)
        step(model, guard)
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert saved_steps(tmp_path / "run") == [6]


def test_a_step_that_would_take_too_long_is_not_started(tmp_path: Path) -> None:
    code = """
    signals.GRACE_SECONDS = 0.2
    import steadygrad.guard.shutdown as shutdown
    shutdown.GRACE_SECONDS = 0.2
    model, guard = make()
    def slow(x):
        time.sleep(0.3)
        return model(x).square().mean()
    for t in range(9):
        if t == 3: send()
        guard.step(slow, torch.randn(8, 4))
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert saved_steps(tmp_path / "run") == [3]


@pytest.mark.parametrize("at", [("before", 0), ("between", 1), ("after", 1)], ids=lambda at: at[0])
@pytest.mark.parametrize("where", ["one directory", "two directories"])
def test_guards_that_step_in_turn_exit_at_the_same_step(tmp_path: Path, at: tuple[str, int], where: str) -> None:
    names = ("run", "run") if where == "one directory" else ("a", "b")
    code = f"""
    a, ga = make({names[0]!r})
    b, gb = make({names[1]!r})
    for t in range(30):
        if t == 25 and {at[0]!r} == "before": send()
        step(a, ga)
        if t == 25 and {at[0]!r} == "between": send()
        step(b, gb)
        if t == 25 and {at[0]!r} == "after": send()
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    folders = [tmp_path / "run", tmp_path / "run" / "guard-2"] if where == "one directory" else None
    found = [saved_steps(folder) for folder in folders or [tmp_path / "a", tmp_path / "b"]]
    assert found == ([[27], [27]] if at[0] == "after" else [[26], [26]])


def test_a_critic_that_steps_more_often_exits_between_its_steps(tmp_path: Path) -> None:
    code = """
    critic, gc = make("critic")
    generator, gg = make("generator")
    for t in range(40):
        for k in range(3):
            if t == 10 and k == 1: send()
            step(critic, gc)
        step(generator, gg)
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert (saved_steps(tmp_path / "critic"), saved_steps(tmp_path / "generator")) == ([32], [10])


def test_an_error_during_the_optimizer_step_is_not_saved(tmp_path: Path) -> None:
    """Half of the weights may have changed."""
    code = """
    model = nn.Linear(4, 1)
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if guard.num_steps == 3:
                send()
                raise RuntimeError("half way")
    guard = Guard(model, Broken(model.parameters(), lr=0.01), run_dir=os.path.join(folder, "run"))
    for _ in range(9): step(model, guard)
    """
    done = run_program(code, tmp_path)
    assert done.returncode == 1
    assert "half way" in done.stderr
    assert saved_steps(tmp_path / "run") == []


def test_gradients_of_a_cancelled_step_are_not_saved(tmp_path: Path) -> None:
    code = """
    signals.GRACE_SECONDS = 0.5
    model, guard = make()
    for t in range(4):
        model(torch.ones(8, 4)).square().mean().backward()
        if t == 3:
            send()
            time.sleep(600)
        guard.step()
        model.zero_grad()
    """
    assert run_program(code, tmp_path).returncode == EXIT_CODE
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=tmp_path / "run")
    assert guard.resume() == 3
    assert all(parameter.grad is None for parameter in model.parameters())
    guard.close()


WORKERS = """
os.setsid()
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100000
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.randn(4)
model, guard = make()
loader = torch.utils.data.DataLoader(Slow(), 4, num_workers=2)
for x in (guard.batches(loader) if sys.argv[2] == "batches" else loader):
    step(model, guard, x)
    if guard.num_steps == 5:
        with open(os.path.join(folder, "ready"), "w") as ready: ready.write(str(os.getpid()))
"""


@pytest.mark.parametrize(
    ("number", "loop"),
    [(signal.SIGTERM, "batches"), (signal.SIGTERM, "own"), (signal.SIGINT, "batches"), (signal.SIGINT, "own")],
    ids=["SIGTERM, batches", "SIGTERM, own", "Ctrl-C, batches", "Ctrl-C, own"],
)
def test_a_signal_to_the_whole_group_with_data_workers_saves(tmp_path: Path, number: int, loop: str) -> None:
    os.mkfifo(tmp_path / "ready")
    program = start_forked(HEAD + WORKERS, str(tmp_path), loop)
    os.killpg(int((tmp_path / "ready").read_text()), number)
    done = program.wait()
    assert done.returncode == EXIT_CODE, done.stderr
    assert len(saved_steps(tmp_path / "run")) == 1


def test_a_worker_killed_by_the_signal_does_not_break_the_current_step(tmp_path: Path) -> None:
    """A DataLoader raises in its parent at any point: here during the optimizer step."""
    code = """
    import multiprocessing, subprocess
    model = nn.Linear(4, 1)
    class Signalled(torch.optim.SGD):
        def step(self, closure=None):
            if guard.num_steps == 4:
                send()
                pids = [str(worker.pid) for worker in multiprocessing.active_children()]
                subprocess.run(["kill", "-TERM", *pids])  # not by their parent, whose they would obey in silence
                time.sleep(0.5)
            super().step(closure)
    guard = Guard(model, Signalled(model.parameters(), lr=0.01), run_dir=os.path.join(folder, "run"))
    data = torch.utils.data.TensorDataset(torch.randn(400, 4))
    for x, in torch.utils.data.DataLoader(data, 4, num_workers=2): step(model, guard, x)
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert saved_steps(tmp_path / "run") == [4]


@pytest.mark.parametrize("where", ["in a step", "between steps"])
def test_workers_that_get_the_signal_first_do_not_end_the_training(tmp_path: Path, where: str) -> None:
    """SLURM and systemd signal one process after the other, in any order."""
    code = f"""
    import multiprocessing, subprocess
    signals.LATE_SECONDS = 60.0  # a busy machine may be late as well
    def signal_workers_first():
        pids = [str(worker.pid) for worker in multiprocessing.active_children()]
        threading.Timer(0.4, send).start()
        subprocess.run(["kill", "-TERM", *pids])  # not by their parent, whose they would obey in silence
        time.sleep(0.2)
    model, guard = make()
    def fn(x):
        if guard.num_steps == 4 and {where!r} == "in a step": signal_workers_first()
        return model(x).square().mean()
    data = torch.utils.data.TensorDataset(torch.randn(400, 4))
    for x, in torch.utils.data.DataLoader(data, 4, num_workers=2):
        if guard.num_steps == 4 and {where!r} == "between steps": signal_workers_first()
        guard.step(fn, x)
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert len(saved_steps(tmp_path / "run")) == 1


def test_a_worker_that_dies_by_itself_raises_the_usual_error(tmp_path: Path) -> None:
    code = """
    class Deadly(torch.utils.data.Dataset):
        def __len__(self): return 100
        def __getitem__(self, i):
            if i == 50: os._exit(3)
            return [1.0, 2.0, 3.0, 4.0]
    model, guard = make()
    # Lists, not tensors: those are fetched from the worker, which may be dead by then, with an error of another kind
    for x in torch.utils.data.DataLoader(Deadly(), 4, num_workers=1, collate_fn=list):
        step(model, guard, torch.tensor(x))
    """
    done = run_program(code, tmp_path)
    assert done.returncode == 1
    assert "DataLoader worker" in done.stderr, done.stderr


@pytest.mark.parametrize("where", ["a destructor", "a weak reference's callback"])
def test_the_exit_is_not_lost_where_exceptions_are_swallowed(tmp_path: Path, where: str) -> None:
    """The iterator of a DataLoader waits for its workers when deleted; exceptions raised there are swallowed."""
    code = f"""
    import weakref
    signals.GRACE_SECONDS = 0.2
    class Dropped:
        def __del__(self):
            if {where!r} == "a destructor": time.sleep(1.0)
    model, guard = make()
    for _ in range(3): step(model, guard)
    thing = Dropped()
    if {where!r} != "a destructor": weakref.finalize(thing, time.sleep, 1.0)
    send()
    del thing
    for _ in range(50): time.sleep(0.1)
    raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert saved_steps(tmp_path / "run") == [3]


def test_the_exit_is_not_lost_while_a_traceback_is_printed(tmp_path: Path) -> None:
    """The interpreter discards exceptions raised while it prints."""
    code = """
    signals.GRACE_SECONDS = 0.2
    class Terminal:
        def write(self, text):
            time.sleep(0.1)
            return os.write(2, text.encode())
        def flush(self): pass
    model, guard = make()
    for _ in range(3): step(model, guard)
    send()
    sys.stderr = Terminal()
    raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert "exited unexpectedly" in done.stderr
    assert saved_steps(tmp_path / "run") == [3]


def test_a_program_that_swallows_the_exit_gets_it_again_at_its_next_step(tmp_path: Path) -> None:
    code = """
    model, guard = make()
    for _ in range(3): step(model, guard)
    send()
    try: guard.validate(0.5)
    except BaseException: print("swallowed")
    step(model, guard)
    """
    done = run_program(code, tmp_path)
    assert "swallowed" in done.stdout
    assert done.returncode == EXIT_CODE, done.stderr
    assert saved_steps(tmp_path / "run") == [3]


def test_a_second_signal_during_the_last_save_does_not_start_another(tmp_path: Path) -> None:
    code = """
    signals.GRACE_SECONDS = 0.3
    model, guard = make()
    for _ in range(3): step(model, guard)
    fsync = os.fsync
    def slow(file):
        time.sleep(0.1)
        fsync(file)
    os.fsync = slow
    send()
    guard.end_epoch()
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert done.stderr.count("Traceback") == 0
    assert saved_steps(tmp_path / "run") == [3]


def test_the_same_signal_twice_at_once_counts_once(tmp_path: Path) -> None:
    """`timeout` signals the program, and then its process group."""
    code = """
    signals.REPEAT_SECONDS = 60.0  # a busy machine may let long pass between the two
    model, guard = make()
    step(model, guard)
    send()
    send()
    step(model, guard)
    """
    done = run_program(code, tmp_path)
    assert done.returncode == EXIT_CODE, done.stderr
    assert saved_steps(tmp_path / "run") == [2]


def test_a_failed_save_is_shown_by_the_exit_code(tmp_path: Path) -> None:
    code = """
    model, guard = make()
    step(model, guard)
    with torch.no_grad(): model.weight.fill_(float("nan"))
    send()
    guard.end_epoch()
    """
    done = run_program(code, tmp_path)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_closed_guard_removes_its_signal_handling(tmp_path: Path) -> None:
    hook, handler = sys.excepthook, signal.getsignal(signal.SIGTERM)
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=tmp_path)

    def train() -> Any:
        guard.step(lambda x: model(x).square().mean(), torch.ones(1, 4))
        os.kill(os.getpid(), signal.SIGTERM)
        guard.validate(1.0)

    with pytest.raises(SystemExit):
        train()
    assert sys.excepthook is hook
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not signals._switchboard.is_overdue
