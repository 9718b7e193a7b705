"""Signals: the step is finished and saved, and the exit code asks for a restart; a second signal exits at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from torch import nn

from steadygrad import Guard, GuardConfig
from steadygrad.checkpoint import signals
from steadygrad.checkpoint.signals import EXIT_CODE, SignalWatch
from steadygrad.config import CheckpointConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """Restores SIGINT, which a background job ignores and its children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


PROGRAM = """
import hashlib, logging, random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from steadygrad import Guard

class Noisy(TensorDataset):
    def __getitem__(self, i):
        x, = super().__getitem__(i)
        return x + torch.randn(4) * random.random()

def main(run_dir, seed, workers):
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    guard = Guard(model, torch.optim.AdamW(model.parameters()), run_dir=run_dir)
    torch.manual_seed(seed)
    random.seed(seed)
    loader = DataLoader(Noisy(torch.arange(160.0).reshape(40, 4) / 160), 2, shuffle=True, num_workers=workers)
    print("resumed", guard.resume(), flush=True)
    for epoch in range(guard.epoch, 2):
        for batch in guard.batches(loader):
            guard.step(lambda x: model(x).square().mean(), batch)
            print("step", guard.last.step, flush=True)
            if sys.argv[3] == "slowly":
                sys.stdin.readline()
        guard.end_epoch()
    guard.close()
    text = str([p.tolist() for p in model.parameters()])
    print("weights", hashlib.sha256(text.encode()).hexdigest(), flush=True)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[4]))
"""


def start(run_dir: Path, seed: int, pace: str, workers: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(run_dir), str(seed), pace, str(workers)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def read_until(stream: IO[str], line: str) -> None:
    for found in stream:
        if found.strip() == line:
            return
    pytest.fail(f"the program ended before {line!r}")


def finish(run_dir: Path, seed: int, workers: int = 0) -> list[str]:
    output, errors = start(run_dir, seed, "freely", workers).communicate(timeout=600)
    assert "weights" in output, errors
    return output.splitlines()


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGTERM, 2), (signal.SIGINT, 2)], ids=["SIGTERM to the group", "Ctrl-C"]
)
def test_the_step_is_finished_and_saved_and_a_restart_continues(tmp_path: Path, number: int, workers: int) -> None:
    """Signals go to the whole group, as clusters and terminals send them: data workers must survive the last step."""
    program = start(tmp_path / "run", 1, "slowly", workers)
    assert program.stdin is not None
    assert program.stdout is not None
    for step in range(23):  # into the second epoch
        read_until(program.stdout, f"step {step}")
        if step == 22:
            os.killpg(program.pid, number)
        program.stdin.write("\n")
        program.stdin.flush()
    output, errors = program.communicate(timeout=600)
    assert program.returncode == EXIT_CODE == 75, errors
    assert f"{signal.Signals(number).name}: finishing the step" in errors
    assert "Traceback" not in errors
    assert output.split() == ["step", "23"] or output.split() == []

    if number == signal.SIGINT:
        return
    rest = finish(tmp_path / "run", 99, workers)
    assert rest[0] in ("resumed 23", "resumed 24")
    assert rest[-1] == finish(tmp_path / "whole", 1, workers)[-1]


# --- the signal handler itself, in a small process without torch --------------------------------------------------

WATCH = f"""
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("signals", {signals.__file__!r})
signals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(signals)
watch = signals.SignalWatch()
"""


def run_watch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCH + code], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    send = f"os.kill(os.getpid(), signal.{number.name})\n"
    once = f"signals.REPEAT_SECONDS = 0\nwatch.start()\n{send}print(watch.received.name, flush=True)\n"
    done = run_watch(f"{once}{send}print('still here')\n")
    assert done.stdout.split() == [number.name]
    assert done.returncode == (-signal.SIGTERM if number is signal.SIGTERM else -signal.SIGINT)


@pytest.mark.parametrize("setting", ["sys.ps1 = '>>> '", "sys.modules['ipykernel'] = sys"], ids=["prompt", "notebook"])
def test_in_a_terminal_ctrl_c_stays_a_keyboard_interrupt(setting: str) -> None:
    code = (
        f"{setting}\nwatch.start()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('interrupted')\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(watch.received.name)\n"
    )
    assert run_watch(code).stdout.split() == ["interrupted", "SIGTERM"]


def test_a_forked_child_gets_the_signal_with_its_default_action() -> None:
    code = (
        "watch.start()\nchild = os.fork()\n"
        "if child == 0:\n    os.kill(os.getpid(), signal.SIGTERM)\n    os._exit(7)\n"
        "print(os.WTERMSIG(os.waitpid(child, 0)[1]), watch.received)\n"
    )
    assert run_watch(code).stdout.split() == ["15", "None"]


def test_a_handler_of_the_user_is_kept() -> None:
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: print('mine'))\nwatch.start()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(watch.received)\n"
    )
    assert run_watch(code).stdout.split() == ["mine", "None"]


def test_the_previous_handlers_are_restored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    watch = SignalWatch()
    watch.start()
    assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    watch.stop()
    assert {number: signal.getsignal(number) for number in before} == before


def test_two_guards_of_one_process_receive_the_same_signal() -> None:
    code = (
        "other = signals.SignalWatch()\nwatch.start()\nother.start()\nother.stop()\nother.start()\n"
        "watch.stop()\nos.kill(os.getpid(), signal.SIGTERM)\nprint(watch.received, other.received.name)\n"
        "other.stop()\nprint(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
    )
    assert run_watch(code).stdout.split() == ["None", "SIGTERM", "True"]


def test_other_threads_do_not_handle_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=SignalWatch().start)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("how", ["no run directory", "signals=False"])
def test_a_guard_without_a_place_to_save_does_not_handle_signals(tmp_path: Path, how: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    model = nn.Linear(2, 1)
    config = GuardConfig(checkpoint=CheckpointConfig(signals=how == "no run directory"))
    run_dir = None if how == "no run directory" else tmp_path
    guard = Guard(model, torch.optim.SGD(model.parameters()), config=config, run_dir=run_dir)
    guard.step(lambda x: model(x).square().mean(), torch.ones(1, 2))
    assert signal.getsignal(signal.SIGTERM) is before
    guard.close()


def test_a_guard_handles_signals_from_its_first_step_until_it_is_closed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    model = nn.Linear(2, 1)
    with Guard(model, torch.optim.SGD(model.parameters()), run_dir=tmp_path) as guard:
        assert signal.getsignal(signal.SIGTERM) is before
        guard.step(lambda x: model(x).square().mean(), torch.ones(1, 2))
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_signal_is_handled_after_the_step_in_this_process(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path)
    seen = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(seen))
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return model(x).square().mean()

    def train() -> None:
        for _ in range(9):
            guard.step(loss, torch.ones(1, 2))

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == EXIT_CODE
    assert seen == [0, 1, 2]
    assert [info.step for info in guard.checkpoints.list()] == [3]
