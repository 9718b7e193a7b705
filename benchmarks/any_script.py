"""Which programs does `steadygrad run` guard, and at what price? Real programs, unedited, each run four times.

Plainly and guarded, healthy: equal bits means that the weights of all optimizers are the same at the end, to the bit;
the cost is the CPU time of the mean step, guarded over plain. Then both again with a NaN in the output of the first
layer at one call: plainly the weights end as NaN; the fault is survived if the guarded ones are finite, and the line is
named if the diagnosis gives the very line that made the NaN. `--program` adds programs of yours, such as those of a
cloned repository.

    python benchmarks/any_script.py [--quick] [--only NAME] [--program "NAME = script.py arguments"]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import write_results

HERE = Path(__file__).parent
OWN, STORIES = HERE / "scripts", HERE.parent / "tests" / "stories" / "scripts"
PROBE = OWN / "probe.py"
TWO_RANKS = ("torchrun", "--nproc-per-node", "2", "--standalone")
SECONDS = 600
"""After which a program is given up."""


@dataclass(frozen=True)
class Program:
    """A script with its arguments, the packages it is about, and the launcher that starts it."""

    command: tuple[str, ...]
    packages: tuple[str, ...] = ("torch",)
    launcher: tuple[str, ...] = ()
    bad_call: int = 12


PROGRAMS = {
    "plain loop": Program((str(STORIES / "plain_loop.py"), "--out", "w.pt")),
    "GradScaler": Program((str(STORIES / "amp_scaler.py"), "--out", "w.pt")),
    "two optimizers (GAN)": Program((str(STORIES / "gan.py"), "--out", "w.pt"), bad_call=5),
    "LBFGS with a closure": Program((str(STORIES / "lbfgs.py"), "--out", "w.pt")),
    "Optuna sweep": Program((str(OWN / "optuna_sweep.py"),), ("optuna",)),
    "Trainer": Program((str(STORIES / "hf_trainer.py"), "--out", "w.pt"), ("transformers",), bad_call=3),
    "Trainer with LoRA": Program((str(OWN / "peft_lora.py"),), ("peft", "transformers")),
    "SFTTrainer": Program((str(OWN / "trl_sft.py"),), ("trl", "transformers")),
    "Accelerator": Program((str(OWN / "accelerate_loop.py"),), ("accelerate",)),
    "Accelerator, accelerate launch": Program(
        (str(OWN / "accelerate_loop.py"),), ("accelerate",), ("accelerate", "launch", "--cpu")
    ),
    "Lightning": Program((str(STORIES / "lightning_mnist.py"), "--out", "w.pt"), ("lightning",)),
    "DistributedDataParallel": Program((str(STORIES / "ddp.py"), "--out", "w.pt"), ("torch",), TWO_RANKS, bad_call=4),
    "FSDP2": Program((str(OWN / "fsdp2.py"),), ("torch",), TWO_RANKS),
    "averaged inside step()": Program((str(OWN / "average_in_step.py"),), ("torch",), TWO_RANKS),
}
QUICK = ("plain loop", "Optuna sweep")


def start(program: Program, folder: Path, *, guarded: bool, bad_call: int) -> dict[str, Any] | None:
    """Run it once; return what the probe wrote down, None if it came to nothing."""
    folder.mkdir(parents=True)
    run = ["-m", "steadygrad", "run", "--run-dir", "run"] if guarded else []
    launcher = list(program.launcher)
    if launcher and not guarded:
        launcher[0] = str(Path(sys.executable).parent / launcher[0])
    command = [sys.executable, *run, *launcher, str(PROBE), "told.json", str(bad_call), *program.command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(folder / "output.txt", "w") as output:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return None
    told = folder / "told.json"
    return {**json.loads(told.read_text()), "code": done.returncode} if told.exists() else None


def is_line_named(folder: Path) -> bool:
    """Whether an incident's cause is the line of the probe that made the NaN."""
    lines = PROBE.read_text().splitlines()
    here = next(number for number, line in enumerate(lines, 1) if line.endswith("# HERE"))
    for path in folder.rglob("incidents.jsonl"):
        causes = [json.loads(line)["cause"] for line in path.read_text().splitlines()]
        if any(cause and cause["line"] == here and str(cause["file"]).endswith("probe.py") for cause in causes):
            return True
    return False


def examine(program: Program) -> dict[str, Any]:
    """All that the table says about one program."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = start(program, folder / "plain", guarded=False, bad_call=0)
        ours = start(program, folder / "ours", guarded=True, bad_call=0)
        dying = start(program, folder / "dying", guarded=False, bad_call=program.bad_call)
        saved = start(program, folder / "saved", guarded=True, bad_call=program.bad_call)
        guarded = any((folder / "ours").rglob("steps.jsonl"))
        named = is_line_named(folder / "saved")
    found: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in program.packages},
        "started": " ".join(program.launcher[:2] if program.launcher[:1] == ("accelerate",) else program.launcher[:1]),
        "guarded": guarded,
        "equal_bits": None if plain is None or ours is None else plain["digest"] == ours["digest"],
        "plain_dies": None if dying is None else not dying["finite"],
        "survived": None if saved is None else saved["finite"] and saved["steps"] > 0,
        "line_named": named,
    }
    if plain and ours and plain["step_seconds"] and ours["step_seconds"]:
        found["plain_ms"], found["guarded_ms"] = plain["step_seconds"] * 1e3, ours["step_seconds"] * 1e3
        found["cost"] = ours["step_seconds"] / plain["step_seconds"]
    return found


def read_program(text: str) -> tuple[str, Program]:
    """'NAME = script.py arguments'."""
    name, _, command = text.partition("=")
    return name.strip(), Program(tuple(shlex.split(command)))


def main() -> int:
    """Examine the programs, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small programs; nothing is overwritten")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--program", action="append", default=[], metavar='"NAME = script.py arguments"')
    arguments = parser.parse_args()
    programs = {**PROGRAMS, **dict(map(read_program, arguments.program))}
    chosen = arguments.only or (QUICK if arguments.quick else tuple(programs))
    results = {}
    for name in chosen:
        results[name] = examine(programs[name])
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    if not arguments.only:
        write_results("any_script", results, quick=arguments.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
