"""Describes the machine that a benchmark ran on, and writes its results."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe_machine() -> dict[str, Any]:
    """Return platform, processor, cores, versions and the GPU, if any."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    try:
        import torch
    except ImportError:
        return facts
    facts["torch"] = torch.__version__
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def write_results(name: str, results: Any, *, quick: bool = False) -> Path | None:
    """Write `results` and the machine's description into benchmarks/results/NAME.json, or under $OUT.

    Quick results never replace measured ones: without $OUT they are not written, and None is returned.
    """
    if quick and not os.environ.get("OUT"):
        return None
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n", encoding="utf-8")
    return path


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
