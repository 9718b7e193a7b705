"""How often `diagnose` and torch's `detect_anomaly` name the cause, on every case of tests/zoo with a non-finite value.

Each case is trained without a guard up to the failing step, then both diagnose that step. For `diagnose`, correct means
kind, phase, op, module and line; for `detect_anomaly`, only what it can report: the op, by its autograd node, and the
line, by the traceback it prints. Controls must raise no alarm.

    python benchmarks/zoo.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see the Makefile
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "zoo"))

import torch
import zoo_backward  # noqa: F401  (registers its cases)
import zoo_finite  # noqa: F401
import zoo_forward  # noqa: F401
import zoo_own  # noqa: F401
from zoo_case import CASES, Case, Training

from machine import describe_machine, write_results
from steadygrad.diagnose import diagnose
from steadygrad.diagnose.trace import fits_node
from steadygrad.facts import Cause

PARTS = ("kind", "phase", "op", "module", "line")


def train_up_to(case: Case) -> tuple[Training, Any]:
    """Return the training just before the failing step, and that step's batch."""
    training = case.build()
    for batch in training.batches[: case.step]:
        training.step(batch)
    return training, training.batches[case.step]


def score(case: Case, cause: Cause | None) -> dict[str, bool]:
    """Return which parts of the answer are correct."""
    if cause is None:
        return dict.fromkeys(PARTS, False)
    return {
        "kind": cause.kind in case.kinds,
        "phase": cause.phase == case.phase,
        "op": cause.op in case.ops or not case.ops,
        "module": cause.module == case.module,
        "line": cause.line in case.lines or not case.lines,
    }


def ask_anomaly_mode(case: Case) -> str:
    """Return 'exact', 'misleading' or 'silent'."""
    training, batch = train_up_to(case)
    training.optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                result = training.loss(training.model, batch)
                (result["loss"] if isinstance(result, dict) else result).backward()
        except RuntimeError as error:
            found = re.search(r"Function '(\w+)' returned nan", str(error))
            if found is None:
                return "silent"
            traced = "".join(str(one.message) for one in caught)
            lines = [int(number) for number in re.findall(r'zoo_\w+\.py", line (\d+)', traced)]
            is_op = any(fits_node(op, found[1]) for op in case.ops)
            return "exact" if is_op and (not case.lines or (lines and lines[-1] in case.lines)) else "misleading"
        except Exception:  # the step itself raises an error
            return "silent"
    return "silent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every fourth case; nothing is written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    every = 4 if quick else 1
    broken = [case for case in CASES.values() if case.kinds][::every]
    healthy = [case for case in CASES.values() if case.is_healthy][::every]
    for case in broken:
        training, batch = train_up_to(case)
        cause = diagnose(training.loss, training.model, batch, model=training.model)
        rows[case.name] = {
            "parts": score(case, cause),
            "anomaly_mode": ask_anomaly_mode(case),
            "public": bool(case.seen),
        }
        right = all(rows[case.name]["parts"].values())
        wrong = ", ".join(part for part, fine in rows[case.name]["parts"].items() if not fine)
        print(
            f"{case.name:42s} diagnose {'right' if right else 'WRONG: ' + wrong:24s} {rows[case.name]['anomaly_mode']}"
        )
    alarms = []
    for case in healthy:
        training = case.build()
        for batch in training.batches[:8]:
            if diagnose(training.loss, training.model, batch, model=training.model) is not None:
                alarms.append(case.name)
            training.step(batch)
    summary = {
        "cases": len(rows),
        "diagnose": sum(all(row["parts"].values()) for row in rows.values()),
        "anomaly_mode": {
            word: sum(r["anomaly_mode"] == word for r in rows.values()) for word in ("exact", "misleading", "silent")
        },
        "controls": len(healthy),
        "alarms": alarms,
    }
    print(describe_machine(), summary, sep="\n")
    print("written:", write_results("zoo", {"summary": summary, "cases": rows}, quick=quick))


if __name__ == "__main__":
    main()
