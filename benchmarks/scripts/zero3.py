"""DeepSpeed's engine, ZeRO 3, started by torchrun."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import deepspeed.ops
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    },
)
torch.manual_seed(torch.distributed.get_rank())
for _ in range(30):
    x = torch.randn(4, 8)
    loss = nn.functional.cross_entropy(engine(x), x[:, :3].argmax(1))
    engine.backward(loss)
    engine.step()
torch.distributed.destroy_process_group()
