"""TrainCheck on errors that never crash, by its documented workflow: trace a good run, infer invariants, check another.

The good run is the healthy twin of the case itself, which favours TrainCheck: its authors learn from other programs.
Both the case with its error and the twin are then checked with another seed. Noticed: an invariant is violated. False
alarm: one is violated in the twin. Told apart: the error violates an invariant that the twin does not; also counted is
how often the twin with a third seed does the same. All options are TrainCheck's defaults. The errors that its authors
reproduced come first, then every Nth of the others until the time is up; cases on several ranks are left out. A command
that takes longer than five minutes is stopped, and its case counts as failed. The healthy trainings of harm.py are not
included: most take hundreds of steps, and inferring from the 420 of `steps_no_more` already exceeds the limit.

Its advantage over a Guard: it needs no rule for an error. Where an error is told apart, the invariant often names it:
if `zero_grad()` is missing, "Optimizer.zero_grad() always occurs when Adam.step() is called" is violated.

TrainCheck rewrites the source of the program that it traces, so each case is written as one script without annotations
(the rewriting puts code before `from __future__ import annotations`). The cost is that of a step of compare.py's GPT,
traced for the invariants of a smaller one, relative to the same step without tracing; inferring invariants from the GPT
itself was stopped after five minutes.

    python benchmarks/peers/environment.py --traincheck
    python benchmarks/peers/traincheck_runs.py [--every N] [--minutes M] [--only NAME]      where it is installed
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # first: `silent` is the program there

from machine import RESULTS, describe_machine, write_results
from models import SHAPES
from silent import RANK_KINDS, TRAINCHECK, list_cases, program_case, program_cases

HERE = Path(__file__).parent
LIMIT = 300
MOST_WORDS = 300
WARM_UP = 12
"""Steps that are not counted: TrainCheck traces ten whole ones, then, by default, every tenth."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
WITHOUT_STEADYGRAD = "Finding = Guard = GuardConfig = Severity = None\n"
"""Replaces steadygrad in the case's folder, so that none of our code is traced."""
START = """
import random
import numpy
torch.manual_seed({seed}); numpy.random.seed({seed}); random.seed({seed})
"""
PLAIN_LOOP = """
class PlainLoop:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, subject=None, *args):
        if subject is None:
            self.optimizer.step()
            return
        self.optimizer.zero_grad()
        loss = subject(*args) if callable(subject) else subject
        loss.backward()
        self.optimizer.step()

    def validate(self, loss):
        pass

from program_case import CASES
_, optimizer, train = CASES[{name!r}].build({bug})
train(PlainLoop(optimizer))
"""
BY_CALLS = "CASES[{name!r}].train(step_plainly, {bug})\n"
GPT_STEPS = """
import time, json
model = GPT(*{size}, heads=8, context=128)
optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
ids, seconds = torch.randint({size}[2], (2, 129)), []
for _ in range({num}):
    start = time.process_time()
    loss = model(ids)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.process_time() - start)
print("seconds", json.dumps(seconds))
"""


# --- a case as one script ---------------------------------------------------------------------------------------------


class WithoutAnnotations(ast.NodeTransformer):
    """Removes the annotations of functions: without the __future__ import, they name classes that do not exist yet."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module == "__future__" else node


def strip(source: str) -> str:
    """Return a module's source without annotations and without its code as a script."""
    tree = WithoutAnnotations().visit(ast.parse(source))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def write_program(folder: Path, name: str, *, bug: bool, seed: int) -> Path:
    """Write a case as `main.py`, with the modules that it imports."""
    folder.mkdir()
    if name in program_case.CASES:
        build = program_case.CASES[name].build
        module, end = Path(inspect.getsourcefile(build) or ""), PLAIN_LOOP.format(name=name, bug=bug)
    else:
        module, end = Path(program_cases.__file__), BY_CALLS.format(name=name, bug=bug)
    shutil.copy(program_case.__file__, folder)
    (folder / "steadygrad.py").write_text(WITHOUT_STEADYGRAD, encoding="utf-8")
    main = folder / "main.py"
    main.write_text(strip(module.read_text(encoding="utf-8")) + START.format(seed=seed) + end, encoding="utf-8")
    return main


# --- its four commands ------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A command failed or took too long; the message is the end of what it printed."""


class Workflow:
    """Runs TrainCheck's commands in a folder, and records the seconds of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.invariants = folder, folder / "invariants.json"
        self.seconds: dict[str, float] = {}

    def learn(self, main: Path) -> int:
        """Trace a good run and infer invariants; return how many."""
        trace = self.folder / "reference"
        self.call("collect a reference", "traincheck-collect", *self.spell_program(main), "--output-dir", trace)
        self.call("infer", "traincheck-infer", "-f", trace, "-o", self.invariants)
        return len(self.invariants.read_text(encoding="utf-8").splitlines())

    def trace(self, main: Path) -> Path:
        """Trace a program for the invariants."""
        trace = self.folder / f"trace_{main.parent.name}"
        program = [*self.spell_program(main), "--invariants", self.invariants]
        self.call("collect", "traincheck-collect", *program, "--output-dir", trace)
        return trace

    def check(self, main: Path) -> list[str]:
        """Trace a program and check it; return the violated invariants in TrainCheck's words."""
        trace, found = self.trace(main), self.folder / f"found_{main.parent.name}"
        self.call("check", "traincheck-check", "-f", trace, "-i", self.invariants, "--output-dir", found)
        summaries = [json.loads(path.read_text(encoding="utf-8")) for path in found.rglob("violations_summary.json")]
        return sorted({one["display_name"] for summary in summaries for one in summary["violations"]})

    @staticmethod
    def spell_program(main: Path) -> list[str | Path]:
        return ["--pyscript", main, "--models-to-track", "model"]

    def call(self, what: str, command: str, *arguments: str | Path) -> None:
        """Run one command of the current environment."""
        words = [str(Path(sys.executable).parent / command), *map(str, arguments)]
        start, log = time.monotonic(), self.folder / "log.txt"
        with log.open("w", encoding="utf-8") as output:
            # A separate session, so that processes started by the command end with it.
            process = subprocess.Popen(
                words, stdout=output, stderr=output, cwd=self.folder, start_new_session=True, env=ENVIRONMENT
            )
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - start
        if code:
            printed = re.sub(r"(/[\w.+-]+)+/", "", log.read_text(encoding="utf-8"))[-MOST_WORDS:]  # no folder names
            raise Failed(f"{command}: {f'gave up after {LIMIT} s' if code < 0 else printed}")


def try_case(name: str) -> dict[str, Any]:
    """Run one case; return what was violated with its error and without, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        work = Workflow(Path(folder))
        result: dict[str, Any] = {"num_invariants": 0, "error": [], "twin": [], "other_twin": [], "failed": ""}
        try:
            result["num_invariants"] = work.learn(write_program(work.folder / "good", name, bug=False, seed=0))
            result["twin"] = work.check(write_program(work.folder / "twin", name, bug=False, seed=1))
            result["other_twin"] = work.check(write_program(work.folder / "other", name, bug=False, seed=2))
            result["error"] = work.check(write_program(work.folder / "error", name, bug=True, seed=1))
        except Failed as failure:
            result["failed"] = str(failure)
        return {**result, "seconds": work.seconds}


# --- the cost of a step -----------------------------------------------------------------------------------------------


def write_gpt(folder: Path, size: tuple[int, int, int], num_steps: int) -> Path:
    """Write a program that trains compare.py's GPT for some steps and prints the CPU seconds of each."""
    folder.mkdir()
    source = strip((HERE.parent / "models.py").read_text(encoding="utf-8"))
    end = START.format(seed=0) + "torch.set_num_threads(1)\n" + GPT_STEPS.format(size=size, num=num_steps)
    (folder / "main.py").write_text(source + end, encoding="utf-8")
    return folder / "main.py"


def read_mean(words: str) -> float:
    """Return the mean of the printed seconds after the warm-up."""
    line = next(line for line in words.splitlines() if "seconds" in line)
    return statistics.fmean(json.loads(line[line.index("[") : line.rindex("]") + 1])[WARM_UP:])


def measure_cost(num_steps: int = 52) -> dict[str, Any]:
    """Measure the mean step of the larger GPT, traced for invariants of the smaller one, and the plain step."""
    with tempfile.TemporaryDirectory() as folder:
        work = Workflow(Path(folder))
        try:
            num = work.learn(write_gpt(work.folder / "good", SHAPES["tiny"], 8))
            main = write_gpt(work.folder / "run", SHAPES["10M"], num_steps)
            traced = read_mean((work.trace(main) / "program_output.txt").read_text(encoding="utf-8"))
        except Failed as failure:
            return {"failed": str(failure), "seconds": work.seconds}
        alone = subprocess.run([sys.executable, main], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    plain = read_mean(alone.stdout)
    return {
        "num_invariants": num,
        "num_steps": num_steps - WARM_UP,
        "plain_ms": 1e3 * plain,
        "traced_ms": 1e3 * traced,
        "ratio": traced / plain,
        "seconds": work.seconds,
    }


# --- the whole comparison ---------------------------------------------------------------------------------------------


def choose(every: int) -> list[str]:
    """Choose the errors that TrainCheck's authors reproduced, if one process shows them, then each Nth other."""
    names = [name for name, kind, *_ in list_cases() if kind and name not in RANK_KINDS and name != "wait_alone"]
    first = [name for name in TRAINCHECK.values() if name in names]
    return first + [name for name in names if name not in first][::every]


def summarise(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return counts, and the mean seconds of a completed case."""
    done = [one for one in cases.values() if not one["failed"]]
    return {
        "num_cases": len(cases),
        "num_done": len(done),
        "num_noticed": sum(bool(one["error"]) for one in done),
        "num_alarms": sum(bool(one["twin"]) for one in done),
        "num_told_apart": sum(bool({*one["error"]} - {*one["twin"]}) for one in done),
        "num_twins_apart": sum(bool({*one["other_twin"]} - {*one["twin"]}) for one in done),
        "mean_seconds": statistics.fmean(sum(one["seconds"].values()) for one in done) if done else None,
    }


def run_cases(names: list[str], minutes: float) -> dict[str, dict[str, Any]]:
    """Run the cases in order; start none after the time is up."""
    start, cases = time.monotonic(), {}
    for name in names:
        if time.monotonic() - start > 60.0 * minutes:
            break
        cases[name] = one = try_case(name)
        shown = {key: len(one[key]) for key in ("error", "twin", "other_twin")}
        print(f"{name:36s} {shown} {sum(one['seconds'].values()):.0f} s {one['failed']}", flush=True)
    return cases


def main() -> int:
    """Run the cases until the time is up, then measure the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=5, help="every Nth of the other cases, after TrainCheck's own")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no case after this")
    parser.add_argument("--only", help="cases with this in their names; nothing is written")
    parser.add_argument("--add", action="store_true", help="run the cases that are missing in the results")
    parser.add_argument("--cost", action="store_true", help="only the cost; the results keep the cases")
    parser.add_argument("--quick", action="store_true", help="one case, nothing written")
    arguments = parser.parse_args()
    names = [name for name in choose(arguments.every) if (arguments.only or "") in name]
    if arguments.add or arguments.cost:
        results = json.loads((RESULTS / "peers_traincheck.json").read_text(encoding="utf-8"))["results"]
    else:
        results = {"source": f"traincheck {metadata.version('traincheck')}", "cases": {}, "cost": {}}
    if not arguments.cost:
        missing = [name for name in names if name not in results["cases"]]
        results["cases"] |= run_cases(missing[:1] if arguments.quick else missing, arguments.minutes)
        results["summary"] = summarise(results["cases"])
        results["left_out"] = [name for name in names if name not in results["cases"]]
    results["load_average"] = os.getloadavg()[2]
    is_part = arguments.quick or arguments.only is not None
    if "ratio" not in results["cost"] and not is_part:
        results["cost"] = measure_cost()
    print(describe_machine(), results["summary"], results["cost"], sep="\n")
    print("written:", write_results("peers_traincheck", results, quick=is_part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
