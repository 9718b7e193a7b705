"""A real training that is killed repeatedly, at any moment, and must end as if nothing had happened.

The parent imports torch once and forks each life of the training, so that a kill costs milliseconds. Most of the time
it stops the training during a write of a folder and kills it there. Each life confirms the saves that it knows to be on
disk; the next one must begin at the newest of them or later. As a program it prints one line of JSON: `python
crashes.py FOLDER NUM_KILLS SEED`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from steadygrad import Guard, GuardConfig, ZClip
from steadygrad.checkpoint.catalogue import rank, read_infos
from steadygrad.config import CheckpointConfig

SAVE_EVERY = 3
"""Microbatches between two saves; two microbatches make up a step, so every other save is within a step."""
EXTRA_STEPS = 12
"""Steps after the last kill."""
WRITING_SHARE = 0.7
"""Share of kills that wait for a checkpoint in progress."""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows that are augmented with noise."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(60, 8, generator=generator), torch.randint(4, (60,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(8) * random.random(), self.y[i]


class Training:
    """Everything that one life creates before it resumes."""

    def __init__(self, run_dir: Path | None) -> None:
        random.seed(1)
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Dropout(0.2), nn.Tanh(), nn.Linear(300, 4)
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        checkpoint = CheckpointConfig(good_after=3, signals=False)
        config = GuardConfig(clip=ZClip(warmup=4), autocast="bf16", checkpoint=checkpoint)
        self.guard = Guard(self.model, optimizer, config=config, scheduler=scheduler, run_dir=run_dir)
        self.loader = DataLoader(Rows(), 6, shuffle=True)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]).float(), batch[1]) / 2

    def train(self, target: Path, confirm: Any = None) -> None:
        """Train until the step that the file `target` gives, once it exists."""
        num = 2 * self.guard.state_dict()["step"] + self.guard.num_microbatches
        saves: list[Any] = []
        while True:
            for batch in self.guard.batches(self.loader):
                self.guard.backward(self.loss, batch)
                num += 1
                if num % 2 == 0:
                    self.guard.step()
                    if is_reached(target, num // 2):
                        return
                if confirm is not None and num % SAVE_EVERY == 0:
                    saves = [save for save in saves if not confirm(save)]
                    saves.append(self.guard.save())
            self.guard.end_epoch()

    def digest(self) -> str:
        """Return a hash of the weights and buffers."""
        state = {name: value.double().tolist() for name, value in self.model.state_dict().items()}
        return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def is_reached(target: Path, step: int) -> bool:
    return target.exists() and step >= int(target.read_text())


def live(run_dir: Path, target: Path, diary: Path) -> None:
    """Run one life: resume, record where, train, confirm saves; at the end record the weights."""
    pen = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def confirm(save: Any) -> bool:
        if save.done and save.error is None:
            os.write(pen, f"saved {save.step}\n".encode())
        return bool(save.done)

    training = Training(run_dir)
    random.seed(os.getpid())
    torch.manual_seed(os.getpid())
    step = training.guard.resume()
    if step is None:
        random.seed(2)
        torch.manual_seed(2)
    os.write(pen, f"resumed {step}\n".encode())
    training.train(target, confirm)
    os.write(pen, f"weights {training.digest()}\n".encode())


def in_child(call: Any, *arguments: Any) -> int:
    """Fork, run it in the child, and exit there."""
    child = os.fork()
    if child:
        return child
    try:
        call(*arguments)
        sys.stdout.flush()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    os._exit(code)


def read_diary(diary: Path) -> list[tuple[str, str]]:
    if not diary.exists():
        return []
    lines = diary.read_text().split("\n")[:-1]  # the last one may be truncated
    return [(word, value) for word, _, value in (line.partition(" ") for line in lines)]


def is_writing(folder: Path) -> bool:
    try:
        return any(name.startswith(".writing-") for name in os.listdir(folder))
    except OSError:
        return False


def kill_in_time(child: int, folder: Path, diary: Path, rng: random.Random) -> bool:
    """Kill it at a random moment; return whether a checkpoint was being written then."""
    num_saves = rng.randrange(3)
    while sum(word == "saved" for word, _ in read_diary(diary)) < num_saves:
        time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.05))
    if rng.random() < WRITING_SHARE:
        stop_while_writing(child, folder, rng.uniform(0.0, 0.004))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return is_writing(folder)


def stop_while_writing(child: int, folder: Path, delay: float) -> None:
    """Stop it `delay` after a checkpoint has started, if it is still being written; otherwise the next one, sooner.

    So the speed of the disk does not decide how many kills hit a save.
    """
    while True:
        while not is_writing(folder):
            pass
        time.sleep(delay)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        if is_writing(folder):
            return
        os.kill(child, signal.SIGCONT)
        delay /= 2


def crash(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill a training `num_kills` times, let it finish, and compare with an undisturbed one."""
    rng = random.Random(seed)
    Training(None)  # import once what is otherwise imported on first use
    run_dir, target = folder / "run", folder / "target"
    checkpoints = run_dir / "checkpoints"
    num_writing = num_wrong = num_lost = 0
    confirmed = -1
    resumed: list[int | None] = []
    for life in range(num_kills + 1):
        diary = folder / f"diary-{life}"
        newest = rank(read_infos(checkpoints))
        expected = newest[0].step if newest else None
        if life == num_kills:
            target.write_text(str((expected or 0) + EXTRA_STEPS))
        child = in_child(live, run_dir, target, diary)
        if life < num_kills:
            while not read_diary(diary):
                time.sleep(0.001)
            num_writing += kill_in_time(child, checkpoints, diary, rng)
        else:
            _, status = os.waitpid(child, 0)
            assert status == 0, "the last life ended badly"
        words = read_diary(diary)
        begun = next(value for word, value in words if word == "resumed")
        num_wrong += begun != str(expected)
        step = -1 if begun == "None" else int(begun)
        num_lost += step < confirmed
        resumed.append(None if begun == "None" else step)
        confirmed = max([confirmed, *(int(value) for word, value in words if word == "saved")])
    weights = next(value for word, value in words if word == "weights")
    child = in_child(live_alone, target, folder / "alone")
    os.waitpid(child, 0)
    alone = dict(read_diary(folder / "alone"))["weights"]
    aside = len(list((checkpoints / "set_aside").iterdir())) if (checkpoints / "set_aside").exists() else 0
    return {
        "num_kills": num_kills,
        "num_kills_while_writing": num_writing,
        "num_restarts_at_another_checkpoint_than_the_newest": num_wrong,
        "num_restarts_before_a_confirmed_save": num_lost,
        "num_set_aside": aside,
        "num_steps": int(target.read_text()),
        "num_lives_that_got_further": len({step for step in resumed if step is not None}),
        "weights_equal": weights == alone,
    }


def live_alone(target: Path, diary: Path) -> None:
    """Run the same training, never saved and never killed."""
    training = Training(None)
    random.seed(2)
    torch.manual_seed(2)
    training.train(target)
    diary.write_text(f"weights {training.digest()}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("steadygrad").setLevel(logging.ERROR)
    print(json.dumps(crash(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
