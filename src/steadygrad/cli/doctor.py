"""`steadygrad doctor`: what was found on this machine -> what to fix and what to choose, in plain sentences.

`find_problems` and `advise` are pure: a Machine in, sentences out. A problem is something that costs correctness or a
crash, or much speed, and that the user can change; everything else is advice.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FOUND
from steadygrad.cli.machine import ISA_CAP, Device, Machine, examine_machine, parse_version
from steadygrad.config import Precision

MIN_TORCH = (2, 6)
"""The oldest torch that steadygrad installs with."""
CAP = f"ONEDNN_MAX_CPU_ISA={ISA_CAP}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that should be fixed."""

    found: str
    fix: str


def report_machine(console: Console, *, as_json: bool) -> int:
    """Examine the machine, print what was found, and return the exit code."""
    machine = examine_machine()
    problems, advice = find_problems(machine), advise(machine)
    if as_json:
        everything = dataclasses.asdict(machine) | {
            "problems": [dataclasses.asdict(problem) for problem in problems],
            "advice": advice,
            "healthy": not problems,
        }
        console.say(json.dumps(everything, indent=1))
    else:
        _print(console, machine, problems, advice)
    return FOUND if problems else DONE


# --- what to fix -----------------------------------------------------------------------------------------------------


def find_problems(machine: Machine) -> list[Problem]:
    """Return what should be fixed, most harmful first."""
    problems = [*_find_matmul_problem(machine), *_find_cuda_problem(machine)]
    if parse_version(machine.torch) < MIN_TORCH:
        least = ".".join(map(str, MIN_TORCH))
        problems.append(
            Problem(
                found=f"torch {machine.torch} is older than {least}, which steadygrad needs.",
                fix=f"pip install 'torch>={least}'",
            )
        )
    if machine.steadygrad_is_off:
        problems.append(
            Problem(found="STEADYGRAD=off is set: every Guard is the plain loop.", fix="unset STEADYGRAD"),
        )
    if _has_gpu(machine) and not machine.triton_is_usable:
        what = "not installed" if machine.triton is None else f"{machine.triton}, too old"
        problems.append(
            Problem(
                found=f"Triton is {what}: gradients on CUDA are measured with many launches instead of three.",
                fix=f"pip install 'triton>={machine.min_triton}' (torch's CUDA builds for Linux include Triton)",
            )
        )
    if machine.num_threads > machine.num_cpus:
        problems.append(
            Problem(
                found=f"torch uses {machine.num_threads} threads on {machine.num_cpus} cores; they wait for each other",
                fix=f"export OMP_NUM_THREADS={machine.num_cpus}",
            )
        )
    return problems


def _find_matmul_problem(machine: Machine) -> list[Problem]:
    works = {"bf16": machine.bf16_matmul_works, "fp16": machine.fp16_matmul_works}
    broken = " and ".join(name for name, fine in works.items() if not fine)
    if not broken:
        return []
    if machine.isa_cap_helps:
        fix = f"export {CAP} before Python starts (tried here: with it they work)"
    else:
        fix = f"train in fp32 on the CPU ({CAP} was tried here and does not help)"
    found = f"A {broken} matmul on this CPU kills the process or gives a wrong result (tried in a separate process)."
    return [Problem(found=found, fix=fix)]


def _find_cuda_problem(machine: Machine) -> list[Problem]:
    if _has_gpu(machine) or not machine.has_nvidia_driver:
        return []
    if machine.cuda is None:
        found = f"There is an NVIDIA driver, but torch {machine.torch} was built without CUDA."
        return [Problem(found=found, fix="install a CUDA build of torch, if you want to train on the GPU")]
    said = f" torch says: {machine.warnings[0]}" if machine.warnings else ""
    return [
        Problem(
            found=f"There is an NVIDIA driver, but torch sees no GPU.{said}",
            fix=f"check CUDA_VISIBLE_DEVICES and nvidia-smi; this torch needs a driver for CUDA {machine.cuda}",
        )
    ]


# --- what to choose --------------------------------------------------------------------------------------------------


def advise(machine: Machine) -> list[str]:
    """Return what to choose on this machine, in sentences."""
    sentences = [_advise_precision(device) for device in machine.devices]
    if _has_gpu(machine):
        names = ", ".join(next(d for d in machine.devices if d.name != "cpu").fused_optimizers)
        sentences.append(
            f"On CUDA create the optimizer with fused=True ({names}): a guarded step then never waits for the device. "
            "Every other optimizer costs one host read per step."
        )
        if machine.triton_is_usable:
            sentences.append(f"Triton {machine.triton} measures the gradients on CUDA.")
    else:
        sentences.append("On the CPU a Guard costs the same with every optimizer, and Triton is not used.")
    return sentences


def _advise_precision(device: Device) -> str:
    if device.precision is Precision.BF16:
        return f"On {device.name} train in bf16, without a GradScaler: GuardConfig(autocast=Precision.BF16)."
    if device.precision is Precision.FP16:
        return (
            f"On {device.name} train in fp16 with a loss scaler: GuardConfig(autocast=Precision.FP16) and "
            "scaler=conservative_scaler()."
        )
    return f"On {device.name} train in fp32."


# --- saying it -------------------------------------------------------------------------------------------------------


def _print(console: Console, machine: Machine, problems: list[Problem], advice: list[str]) -> None:
    for name, value in _describe(machine):
        console.say(f"{name:12s}{value}")
    console.say()
    console.say("What to choose", "bold")
    for sentence in advice:
        console.say(f"  {sentence}")
    console.say()
    if not problems:
        console.say("Nothing to fix.", "green")
        return
    console.say("What to fix", "bold")
    for problem in problems:
        console.say(f"  {problem.found}", "red")
        console.say(f"    Fix: {problem.fix}")


def _describe(machine: Machine) -> list[tuple[str, str]]:
    cap = machine.onednn_max_cpu_isa
    matmuls = {"bf16": machine.bf16_matmul_works, "fp16": machine.fp16_matmul_works}
    rows = [
        ("steadygrad", machine.steadygrad + (" (switched off: STEADYGRAD=off)" if machine.steadygrad_is_off else "")),
        ("python", f"{machine.python} on {machine.system}"),
        ("torch", f"{machine.torch}, " + (f"built for CUDA {machine.cuda}" if machine.cuda else "built without CUDA")),
        ("triton", machine.triton or "not installed (pip install triton); used on CUDA only"),
        ("threads", f"{machine.num_threads} of {machine.num_cpus} cores"),
    ]
    for device in machine.devices:
        rows.append((device.name, _describe_device(device)))
        rows.append(("", f"recommended precision: {device.precision}"))
        rows.append(("", f"fused optimizers: {', '.join(device.fused_optimizers) or 'none'}"))
        if device.name == "cpu":
            tried = ", ".join(f"{name} {'works' if fine else 'DIES'}" for name, fine in matmuls.items())
            rows.append(("", f"half-precision matmul: {tried}" + (f" (ONEDNN_MAX_CPU_ISA={cap})" if cap else "")))
    return rows


def _describe_device(device: Device) -> str:
    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 2**30:.0f} GiB"
    kind = "instruction set" if device.name == "cpu" else "capability"
    return f"{device.description}, {kind} {device.capability}{memory}"


def _has_gpu(machine: Machine) -> bool:
    return any(device.name != "cpu" for device in machine.devices)
