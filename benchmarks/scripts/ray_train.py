"""Ray Train's TorchTrainer with two workers."""

import os
import sys


def train(config):
    sys.path.insert(0, config["here"])
    os.environ |= config["environment"]
    import probe
    import ray.train.torch
    import torch
    from torch import nn

    os.environ["RANK"] = str(ray.train.get_context().get_world_rank())
    probe.begin()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(30):
        x = torch.randn(4, 8)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    probe.write_result()


if __name__ == "__main__":
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
    environment = {name: value for name, value in os.environ.items() if name.startswith("PROBE_")}
    TorchTrainer(
        train,
        train_loop_config={"here": os.path.dirname(os.path.abspath(__file__)), "environment": environment},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("ray")),
    ).fit()
    ray.shutdown()
