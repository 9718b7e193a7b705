"""Which programs does `steadygrad run` guard, and at what cost? Real programs, unedited, each run four times.

First plain and guarded, both healthy: "equal bits" means that the final weights of all optimizers are bit-identical;
the cost is the mean CPU time of a step, plain and guarded, where a difference of less than a tenth is noise. Then both
again with a NaN in the output of the first layer at one call. The plain weights end as NaN; "plain too" marks programs
where they do not, because the program skips such a step or stops by itself. The fault is survived if the guarded
weights are finite, and the line is named if the diagnosis gives the line that produced the NaN. Programs of public
repositories are read from a folder of clones. A program is left out if its package or clone is missing, or if it fails
without a guard. `--program` adds one of yours.

All rows come from one run on a machine busy with other work, so costs are rough; in a run of 16 steps, one-time work is
most of the cost (plain loop: 1.7 ms per step, and 33 ms once). Four rows (denoising-diffusion, word_language_model,
dqn, timm) were measured again right afterwards with `--only` and corrected settings: two had not started, and two had
ended before the fault or hit it in code that does not train.

    python benchmarks/any_script.py [--repositories FOLDER] [--quick] [--only NAME] [--program "NAME = script.py ..."]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import RESULTS, write_results
from script_programs import OWN, PACKAGES, QUICK, REPOSITORIES, Program

PROBE, MATERIAL = OWN / "probe.py", OWN / "material.py"
SECONDS = 600
"""Time limit of a program."""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "RAY_TRAIN_V2_ENABLED": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


def furnish(program: Program, folder: Path, clones: Path | None) -> None:
    """Copy the program's files and data into a new folder."""
    if program.repository:
        assert clones is not None
        copied = shutil.ignore_patterns(".git")
        shutil.copytree(clones / program.repository.split("/")[1] / program.part, folder, ignore=copied)
    else:
        folder.mkdir(parents=True)
    for script in ((str(MATERIAL), *program.material) if program.material else (), program.setup):
        if script:
            subprocess.run([sys.executable, *script], cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)


def start(program: Program, folder: Path, *, guarded: bool, bad_call: int) -> dict[str, Any] | None:
    """Run it once and return what the probe recorded, or None if it recorded nothing."""
    run = ["-m", "steadygrad", "run", "--run-dir", "run"] if guarded else []
    launcher = list(program.launcher)
    if launcher and not guarded:
        launcher[0] = str(Path(sys.executable).parent / launcher[0])
    command = [sys.executable, *run, *launcher, str(PROBE), "result.json", str(bad_call), *program.command]
    with open(folder / "output.txt", "w") as output:
        try:
            done = subprocess.run(
                command, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return None
    result = folder / "result.json"
    return {**json.loads(result.read_text()), "code": done.returncode} if result.exists() else None


def is_line_named(folder: Path) -> bool:
    """Whether an incident's cause is the line of the probe that made the NaN."""
    lines = PROBE.read_text().splitlines()
    here = next(number for number, line in enumerate(lines, 1) if line.endswith("# HERE"))
    for path in folder.rglob("incidents.jsonl"):
        causes = [json.loads(line)["cause"] for line in path.read_text().splitlines()]
        if any(cause and cause["line"] == here and str(cause["file"]).endswith("probe.py") for cause in causes):
            return True
    return False


def examine(program: Program, clones: Path | None) -> dict[str, Any] | None:
    """Return the table's row for one program, or None if it does not run here even without a guard."""
    with tempfile.TemporaryDirectory() as place, concurrent.futures.ThreadPoolExecutor() as pool:
        inside = Path("1", "2", "3", "program")  # deep: a program may read files next to its folder
        furnish(program, Path(place) / "new" / inside, clones)
        folders = {name: Path(place) / name / inside for name in ("plain", "ours", "dying", "saved")}
        for name in folders:
            shutil.copytree(Path(place) / "new", Path(place) / name)
        waiting = {
            name: pool.submit(
                start,
                program,
                folder,
                guarded=name in ("ours", "saved"),
                bad_call=program.bad_call if name in ("dying", "saved") else 0,
            )
            for name, folder in folders.items()
        }  # in parallel, so that other load on the machine slows them equally
        plain, ours, dying, saved = (waiting[name].result() for name in folders)
        guarded = any((folders["ours"] / "run").rglob("steps.jsonl"))
        named = is_line_named(folders["saved"] / "run")
        if None in (plain, ours, dying, saved):
            for name, folder in folders.items():
                print(name, "...", (folder / "output.txt").read_text()[-1500:], file=sys.stderr)
    if plain is None:
        return None
    found: dict[str, Any] = {
        "versions": read_versions(program, clones),
        "started": " ".join(program.launcher[:2] if program.launcher[:1] == ("accelerate",) else program.launcher[:1]),
        "guarded": guarded,
        "equal_bits": None if ours is None else plain["digest"] == ours["digest"],
        "plain_dies": None if dying is None else not dying["finite"],
        "survived": None if saved is None else saved["finite"] and saved["steps"] > 0,
        "line_named": named,
    }
    if ours and plain["step_seconds"] and ours["step_seconds"]:
        found["plain_ms"], found["guarded_ms"] = plain["step_seconds"] * 1e3, ours["step_seconds"] * 1e3
        found["cost"] = ours["step_seconds"] / plain["step_seconds"]
    return found


def read_versions(program: Program, clones: Path | None) -> dict[str, str]:
    """Return the versions of the packages, and the commit of the repository."""
    versions = {name: importlib.metadata.version(name) for name in program.packages}
    if program.repository and clones is not None:
        clone = clones / program.repository.split("/")[1]
        head = subprocess.run(["git", "-C", str(clone), "log", "-1", "--format=%h"], capture_output=True, text=True)
        versions = {program.repository: head.stdout.strip(), **versions}
    return versions


def is_here(program: Program, clones: Path | None) -> bool:
    """Return whether its packages are installed and its repository is cloned."""
    if program.repository and (clones is None or not (clones / program.repository.split("/")[1]).is_dir()):
        return False
    try:
        return bool([importlib.metadata.version(name) for name in program.packages])
    except importlib.metadata.PackageNotFoundError:
        return False


def read_program(text: str) -> tuple[str, Program]:
    """Parse 'NAME = script.py arguments'."""
    name, _, command = text.partition("=")
    return name.strip(), Program(tuple(shlex.split(command)))


def main() -> int:
    """Examine the programs, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small programs; nothing is overwritten")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--program", action="append", default=[], metavar='"NAME = script.py arguments"')
    parser.add_argument(
        "--repositories", type=Path, metavar="FOLDER", help="folder of clones, each under the name of its repository"
    )
    arguments = parser.parse_args()
    clones = arguments.repositories and arguments.repositories.resolve()
    programs = {**PACKAGES, **REPOSITORIES, **dict(map(read_program, arguments.program))}
    chosen = arguments.only or (QUICK if arguments.quick else tuple(programs))
    results: dict[str, Any] = {}
    if arguments.only and (RESULTS / "any_script.json").exists():  # measure these rows again and keep the others
        results = json.loads((RESULTS / "any_script.json").read_text())["results"]
    for name in chosen:
        if not is_here(programs[name], clones):
            print(f"{name}: left out, its packages or its clone are missing", flush=True)
            continue
        found = examine(programs[name], clones)
        if found is None:
            print(f"{name}: left out, it fails without a guard too", flush=True)
            continue
        results[name] = found
        print(f"{name}: {json.dumps(results[name])}", flush=True)
        ordered = {name: results[name] for name in [*programs, *results] if name in results}
        write_results("any_script", ordered, quick=arguments.quick)  # after each program: all take a while
    return 0


if __name__ == "__main__":
    sys.exit(main())
