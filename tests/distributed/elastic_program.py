"""A training started by torchrun that kills one of its own ranks in each of its first lives.

    torchrun --nproc-per-node 2 --max-restarts 2 elastic_program.py RUN_DIR NUM_KILLS NUM_EPOCHS

A life ends by SIGKILL of a random rank at a random moment after some steps, during a step or a save; in the last of
these lives the rank hangs instead, until the others time out. Each rank leaves its final weights in
RUN_DIR/final_RANK.pt. With NUM_KILLS 0 it is the uninterrupted run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from steadygrad import Guard, GuardConfig
from steadygrad.config import CheckpointConfig

NUM_ROWS, SEED = 96, 1
PATIENCE = timedelta(seconds=5)
"""Timeout of a rank whose peer hangs; set only when that happens, so that a slow machine is not mistaken for a hang."""


def train(run_dir: Path, num_kills: int, num_epochs: int) -> dict[str, Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
    guard = Guard(ddp, optimizer, config=GuardConfig(checkpoint=CheckpointConfig(every=2)), run_dir=run_dir)
    generator = torch.Generator().manual_seed(rank)
    rows, labels = torch.randn(NUM_ROWS, 6, generator=generator), torch.randint(3, (NUM_ROWS,), generator=generator)
    if rank == 1:
        rows[17] = torch.nan  # a sample of only one rank
    torch.manual_seed(10 + rank)
    loader = DataLoader(TensorDataset(rows, labels), 8, shuffle=True)
    guard.resume()
    life = _count_kills(run_dir)
    dist.barrier()  # all have counted, and none has died yet
    dice = random.Random(1000 * SEED + life)
    victim, patience, delay = dice.randrange(dist.get_world_size()), dice.randint(3, 6), dice.random() * 0.05
    for _ in range(guard.epoch, num_epochs):
        for x, y in guard.batches(loader):
            guard.step(lambda x, y: nn.functional.cross_entropy(ddp(x), y), x, y)
            patience -= 1
            if life >= num_kills or patience != 0:
                continue
            hangs = life == num_kills - 1
            if rank == victim:
                _note_end(run_dir, rank)
                if hangs:
                    os.kill(os.getpid(), signal.SIGSTOP)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif hangs:
                dist.distributed_c10d._set_pg_timeout(PATIENCE)
        guard.end_epoch()
    guard.close()
    return {name: value.clone() for name, value in ddp.module.named_parameters()}


def _count_kills(run_dir: Path) -> int:
    """Count the kills: torchrun's count of restarts includes lives whose ranks never met."""
    path = run_dir / "kills.txt"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _note_end(run_dir: Path, rank: int) -> None:
    with (run_dir / "kills.txt").open("a") as file:
        file.write(f"rank {rank} process {os.getpid()}\n")


def _end_hung_peer(run_dir: Path) -> None:
    """End the hanging peer like torchrun, which first waits half a minute in vain."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((run_dir / "kills.txt").read_text().split()[-1]), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    run_dir = Path(sys.argv[1])
    try:
        weights = train(run_dir, int(sys.argv[2]), int(sys.argv[3]))
    except BaseException:
        _end_hung_peer(run_dir)
        raise
    torch.save(weights, run_dir / f"final_{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
