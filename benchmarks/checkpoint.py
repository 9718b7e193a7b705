"""How long does training wait for a checkpoint? `torch.save` with fsync, compared with CheckpointStore.

Model and AdamW state: 100M parameters on the CPU (1.2 GB), 1B on a GPU (12 GB). "Training waits": until training may
continue. "Durable": until the checkpoint is fsynced under its final name; by then ours has also been checked for
non-finite values and hashed. "Verified": until ours has also been read back. The first save allocates host memory and
is listed separately. The baseline writes to a temporary name, fsyncs, renames and fsyncs the folder, which any durable
save has to do. All times are medians.

Run `python benchmarks/checkpoint.py --device cpu` or `cuda`; `--folder` chooses the disk, `--quick` is a twentieth of
the size; writes results/checkpoint_DEVICE.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from machine import write_results
from steadygrad.checkpoint import CheckpointStore

SIZES = {"cpu": 100_000_000, "cuda": 1_000_000_000}
WIDTHS = {"cpu": 1024, "cuda": 4096}


def make_training(device: str, num_parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make square layers and AdamW with both moments."""
    width = WIDTHS[device]
    layers = [nn.Linear(width, width, device=device) for _ in range(max(1, num_parameters // (width * width)))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def wait_for_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def save_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> float:
    """Save with `torch.save`, durably; return the seconds, all of which training waits."""
    begin = time.perf_counter()
    with (folder / "plain.tmp").open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    (folder / "plain.tmp").replace(folder / "plain.pt")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - begin


def save_ours(
    store: CheckpointStore, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> dict[str, float]:
    """Save once; return how long training waits, and when the save is on disk and verified."""
    begin = time.perf_counter()
    save = store.save({"model": model, "optimizer": optimizer}, step=step)
    if save.wait() is None or save.durable_seconds is None:
        raise SystemExit(f"the checkpoint could not be saved: {save.error}")
    verified = time.perf_counter() - begin
    return {"stall": save.stall_seconds, "durable": save.durable_seconds, "verified": verified}


def measure(device: str, folder: Path, num_parameters: int, repeats: int) -> dict[str, Any]:
    """Time both ways in turn, so that a change in disk speed affects both."""
    model, optimizer = make_training(device, num_parameters)
    num_bytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    plain, ours = [], []
    with CheckpointStore(folder / "ours", keep_last=1, keep_best=0, good_after=0) as store:
        wait_for_device(device)
        first = save_ours(store, model, optimizer, 0)
        save_plainly(model, optimizer, folder)
        for step in range(1, repeats + 1):
            (folder / "plain.pt").unlink()
            gc.collect()
            wait_for_device(device)
            plain.append(save_plainly(model, optimizer, folder))
            wait_for_device(device)
            ours.append(save_ours(store, model, optimizer, step))
    medians = {key: statistics.median(one[key] for one in ours) for key in ours[0]}
    baseline = statistics.median(plain)
    return {
        "device": device,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": num_bytes,
        "torch_save_seconds": [round(one, 4) for one in plain],
        "ours_seconds": [{key: round(value, 4) for key, value in one.items()} for one in ours],
        "first_save_seconds": {key: round(value, 4) for key, value in first.items()},
        "torch_save_median_seconds": round(baseline, 4),
        "stall_share": round(medians["stall"] / baseline, 4),
        "durable_ratio": round(medians["durable"] / baseline, 4),
        "verified_ratio": round(medians["verified"] / baseline, 4),
        **{f"{key}_median_seconds": round(value, 4) for key, value in medians.items()},
    }


def show(found: dict[str, Any]) -> None:
    size = found["state_bytes"] / 1e9
    print(f"{found['device']}: {found['num_parameters'] / 1e6:.0f}M parameters, {size:.1f} GB with AdamW's moments")
    print(f"torch.save, fsynced      {found['torch_save_median_seconds']:8.3f} s, all of it stall")
    print(f"ours: stall              {found['stall_median_seconds']:8.3f} s = {found['stall_share']:.1%} of it")
    print(f"ours: durable            {found['durable_median_seconds']:8.3f} s = {found['durable_ratio']:.2f}x")
    print(f"ours: verified           {found['verified_median_seconds']:8.3f} s = {found['verified_ratio']:.2f}x")
    print(f"ours: stall, first save  {found['first_save_seconds']['stall']:8.3f} s")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=int, help="another size; then nothing is written")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the size, twice; nothing is written")
    parser.add_argument("--folder", type=Path, help="where to write; by default the system's temporary folder")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        size = arguments.parameters or SIZES[arguments.device] // (20 if arguments.quick else 1)
        found = measure(arguments.device, folder, size, 2 if arguments.quick else arguments.repeats)
    finally:
        shutil.rmtree(folder)
    show(found)
    if arguments.parameters is None:
        print("written:", write_results(f"checkpoint_{arguments.device}", found, quick=arguments.quick))


if __name__ == "__main__":
    main()
