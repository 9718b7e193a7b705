"""How fast `scan` is, compared with loading with safetensors and calling `torch.isfinite` on each tensor.

Both check every element of the same file; scan also returns range, norm, zeros and tied weights. Times are medians of
rounds that take turns, with the file in the page cache ("warm") and after asking the system to drop it ("cold"). Memory
is the peak of a separate process, above that of a process that scans a tiny file.

    python benchmarks/scan.py [--gib 2] [--rounds 5] [--folder DIR] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from machine import describe_machine, write_results
from steadygrad.scan.checkpoint_scan import scan_checkpoint

BASE, OURS = "safetensors + isfinite", "scan"
LAYERS_PER_GIB = 16


def load_and_check(path: Path) -> bool:
    """The common way: load, then check each tensor."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in load_file(path).values())


WAYS: dict[str, Callable[[Path], object]] = {BASE: load_and_check, OURS: scan_checkpoint}


def write_model(path: Path, gib: float, dtype: torch.dtype) -> None:
    """Write matrices of one size and small vectors between them, as in a transformer."""
    rows = int(gib * (1 << 30) / LAYERS_PER_GIB / 4096 / dtype.itemsize)
    tensors = {}
    for i in range(LAYERS_PER_GIB):
        tensors[f"layers.{i}.weight"] = torch.randn(rows, 4096).to(dtype)
        tensors[f"layers.{i}.bias"] = torch.zeros(4096, dtype=dtype)
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def drop_from_cache(path: Path) -> None:
    """Ask the system to drop the file's pages; it drops only clean pages, hence the fsync above."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_ways(path: Path, rounds: int, *, cold: bool) -> dict[str, float]:
    """Return the median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for round_number in range(rounds + 1):
        for name, way in WAYS.items():
            if cold:
                drop_from_cache(path)
            start = time.perf_counter()
            way(path)
            if round_number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_peak(name: str, path: Path) -> int:
    """Return the peak resident bytes of a process that does it once."""
    command = [sys.executable, __file__, "--only", name, str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read_peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def measure(folder: Path, gib: float, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    path, tiny = folder / "model.safetensors", folder / "tiny.safetensors"
    write_model(path, gib, dtype)
    save_file({"w": torch.ones(3)}, tiny)
    result: dict[str, object] = {"num_bytes": path.stat().st_size}
    for kind in ("warm", "cold"):
        times = time_ways(path, rounds, cold=kind == "cold")
        result[kind] = {"seconds": times, "ratio": times[OURS] / times[BASE]}
        for name, seconds in times.items():
            print(f"  {kind}  {name:24s} {seconds:8.3f} s  {path.stat().st_size / seconds / 1e9:6.2f} GB/s")
    result["peak_bytes"] = {name: measure_peak(name, path) - measure_peak(name, tiny) for name in WAYS}
    for name, peak in result["peak_bytes"].items():
        print(f"  peak  {name:24s} {peak / (1 << 20):8.1f} MiB above a tiny file")
    path.unlink()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the files are written; a temporary folder unless given")
    parser.add_argument("--quick", action="store_true", help="an eighth of a GiB, two rounds; nothing is written")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        WAYS[args.only[0]](Path(args.only[1]))
        print(read_peak())
        return
    gib, rounds = (0.125, 2) if args.quick else (args.gib, args.rounds)
    print(describe_machine())
    table = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{gib:g} GiB {str(dtype).removeprefix('torch.')}"
            print(f"\n{name}")
            table[name] = measure(Path(folder), gib, dtype, rounds)
    print("\nwritten:", write_results("scan", table, quick=args.quick))


if __name__ == "__main__":
    main()
