"""What this machine and torch offer, found by trying: python, torch, devices, half-precision matmuls, Triton, threads.

Anything that could kill the process is tried in another one. Nothing is changed or judged here: `doctor` judges.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from steadygrad._version import __version__
from steadygrad.act.precision import choose_precision, half_matmul_works
from steadygrad.config import Precision
from steadygrad.config.switch import is_switched_off
from steadygrad.measure.meter import MIN_TRITON

ISA_CAP = "AVX512_CORE_BF16"
"""The value of ONEDNN_MAX_CPU_ISA that keeps oneDNN off AMX, which some virtual CPUs advertise and fault on."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A place to train on."""

    name: str
    """As torch calls it: 'cpu', 'cuda:0'."""
    description: str
    capability: str | None
    """CUDA's compute capability, '9.0'; for the CPU the instruction set that torch uses."""
    memory_bytes: int | None
    precision: Precision
    """What `choose_precision` recommends."""
    fused_optimizers: tuple[str, ...]
    """Optimizers of torch.optim that made a step with fused=True here."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All that was found."""

    steadygrad: str
    python: str
    system: str
    torch: str
    cuda: str | None
    """The CUDA version that torch was built with."""
    devices: tuple[Device, ...]
    bf16_matmul_works: bool
    """On the CPU, tried in a separate process."""
    fp16_matmul_works: bool
    onednn_max_cpu_isa: str | None
    """The environment variable ONEDNN_MAX_CPU_ISA."""
    isa_cap_helps: bool | None
    """Whether both matmuls work with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; None: they work anyway."""
    triton: str | None
    triton_is_usable: bool
    """Whether it is installed and at least `min_triton`, the oldest version the kernels were run with."""
    min_triton: str
    num_cpus: int
    """Cores that this process may use."""
    num_threads: int
    """Threads that torch uses on the CPU."""
    has_nvidia_driver: bool
    steadygrad_is_off: bool
    """Whether the environment has STEADYGRAD=off."""
    warnings: tuple[str, ...]
    """What torch warned about while it was examined."""


def examine_machine() -> Machine:
    """Examine everything; takes a few seconds, mostly for the matmuls in separate processes."""
    with warnings.catch_warnings(record=True) as caught:
        # So that a warning that was shown before is recorded too
        warnings.simplefilter("always")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        bf16, fp16 = matmul_works(Precision.BF16), matmul_works(Precision.FP16)
        devices = (_examine_cpu(), *(_examine_gpu(i) for i in range(num_gpus)))
    triton = _find_version("triton")
    return Machine(
        steadygrad=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        devices=devices,
        bf16_matmul_works=bf16,
        fp16_matmul_works=fp16,
        onednn_max_cpu_isa=os.environ.get("ONEDNN_MAX_CPU_ISA"),
        isa_cap_helps=None if bf16 and fp16 else _isa_cap_helps(),
        triton=triton,
        triton_is_usable=triton is not None and parse_version(triton) >= MIN_TRITON,
        min_triton=".".join(map(str, MIN_TRITON)),
        # A container or taskset may allow fewer cores than cpu_count() says
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        has_nvidia_driver=shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists(),
        steadygrad_is_off=is_switched_off(),
        warnings=tuple(dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught)),
    )


def matmul_works(precision: Precision) -> bool:
    """Like `half_matmul_works`, but a process that hangs counts as failed too."""
    try:
        return half_matmul_works(precision)
    except subprocess.TimeoutExpired:
        return False


def find_fused_optimizers(device: str) -> tuple[str, ...]:
    """Return names of torch's optimizers that step with fused=True on `device`, tried on two elements."""
    kinds = [k for k in vars(torch.optim).values() if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)]
    offered = [kind for kind in kinds if "fused" in inspect.signature(kind).parameters]
    return tuple(sorted(kind.__name__ for kind in offered if _steps_fused(kind, device)))


def _steps_fused(kind: type[torch.optim.Optimizer], device: str) -> bool:
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    weight.grad = torch.ones(2, device=device)
    try:
        kind([weight], fused=True).step()  # type: ignore[call-arg]
    # What torch raises for fused=True differs between optimizers, devices and versions
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _examine_cpu() -> Device:
    works = matmul_works(Precision.BF16)
    return Device(
        name="cpu",
        description=_find_cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        memory_bytes=None,
        precision=choose_precision("cpu") if works else Precision.FP32,
        fused_optimizers=find_fused_optimizers("cpu"),
    )


def _examine_gpu(index: int) -> Device:
    name = f"cuda:{index}"
    with torch.cuda.device(index):  # choose_precision uses the current device
        facts = torch.cuda.get_device_properties(index)
        return Device(
            name=name,
            description=facts.name,
            capability=f"{facts.major}.{facts.minor}",
            memory_bytes=facts.total_memory,
            precision=choose_precision(name),
            fused_optimizers=find_fused_optimizers(name),
        )


def _isa_cap_helps() -> bool:
    """Try again with the cap in the environment, since oneDNN reads it only once, when it is loaded."""
    code = (
        "from steadygrad.act.precision import half_matmul_works as works\n"
        "from steadygrad.config import Precision\n"
        "assert works(Precision.BF16) and works(Precision.FP16)"
    )
    # The new process must import this steadygrad, also from a checkout that is not installed
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": ISA_CAP, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", code]  # -P: modules in the current directory must not be run
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def parse_version(version: str) -> tuple[int, ...]:
    """Return the major and minor number: (2, 13) of '2.13.0+cpu'."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
