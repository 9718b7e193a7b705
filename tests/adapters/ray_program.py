"""A guarded TorchTrainer of two workers: `ray_program.py FOLDER [kill]`. With `kill` worker 1 dies once, at step 13."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

NUM_STEPS, MASKED_STEP, KILLED_STEP = 20, 7, 13


def train(config: dict[str, Any]) -> None:
    import ray.train.torch
    import torch
    from torch import nn

    from steadygrad import Guard, GuardConfig
    from steadygrad.config import CheckpointConfig

    torch.manual_seed(0)
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    settings = GuardConfig(checkpoint=CheckpointConfig(every=5, signals=False))
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01), config=settings, run_dir=folder / "run")
    start = guard.resume() or 0
    for step in range(start, NUM_STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
        if rank == 1 and step == MASKED_STEP:
            y[:] = -100
        if rank == 1 and step == KILLED_STEP and config["kills"] and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    weights = [p.detach() for p in model.parameters()]
    torch.save({"weights": weights, "start": start, "stats": guard.stats()}, folder / f"rank{rank}.pt")
    guard.close()


if __name__ == "__main__":
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
    TorchTrainer(
        train,
        train_loop_config={"folder": sys.argv[1], "kills": "kill" in sys.argv},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{sys.argv[1]}/ray", failure_config=FailureConfig(max_failures=2)),
    ).fit()
    ray.shutdown()
