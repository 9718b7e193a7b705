"""Data-parallel training, started by torchrun or by mp.spawn; the batch of one rank may be NaN at one step."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(args, **group):
    dist.init_process_group("gloo", **group)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(6):
        x = torch.randn(8, 4)
        if step == args.poison and rank == 1:
            x[0] = float("nan")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.module.state_dict()}, f"{args.out}.{rank}")
    dist.destroy_process_group()
    # A group whose own thread waits for the GIL while the interpreter ends hangs or aborts (pytorch issue 38228).
    os._exit(0)


def train_spawned(rank, args):
    train(args, init_method=f"file://{args.spawn}", rank=rank, world_size=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--poison", type=int, default=-1, help="step at which the batch of rank 1 is NaN")
    parser.add_argument("--spawn", default=None, help="start the ranks; they meet at this file")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.spawn:
        mp.spawn(train_spawned, args=(args,), nprocs=2)
    else:
        train(args)
