"""What does a Guard do to healthy trainings? Every scenario of tests/healthy, plain and guarded.

A run is harmed when a Guard skips, changes a learning rate, rolls back or halts, or when weights, losses or side
effects are not bit-identical to the plain run's. `warned` counts runs with a finding of severity warning or above. Each
runs twice: with the policy that acts at the first symptom, as training guides advise, and with the default, which acts
on proof. No clipping.

    python benchmarks/harm.py [--seeds N] [--only NAME] [--clip none|default|fixed1] [--quick]

Clipping changes the bits: with a clip, only actions, halts and missed goals count, and nothing is written. The exit
code is 1 when the default harmed a run.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from machine import write_results

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from healthy.catalogue import SCENARIOS
from healthy.scenario import Ending, Scenario
from steadygrad import FixedNorm, GuardConfig, Policy

CLIPS = {"none": None, "default": GuardConfig().clip, "fixed1": FixedNorm(max_norm=1.0)}
POLICIES = {"at_once": Policy.eager(), "on_proof": Policy()}
QUICK = ("class_incremental", "gan_of_two_guards", "counts_its_calls", "bf16_model")


def compare(scenario: Scenario, seed: int, plain: Ending, config: GuardConfig) -> dict[str, Any]:
    """Run one scenario on a Guard and return what the Guard did to it."""
    guarded = scenario.train(seed=seed, config=config)
    differences = guarded.compare(plain) if config.clip is None else guarded.shortfalls
    return {
        "name": scenario.name,
        "family": scenario.family,
        "seed": seed,
        "harmed": bool(guarded.halted or guarded.actions or differences),
        "actions": guarded.actions,
        "warnings": guarded.warnings,
        "halted": guarded.halted,
        "differences": differences,
        "plain_shortfalls": plain.shortfalls,
        "plain_loss": find_last(plain),
        "guarded_loss": find_last(guarded),
        "plain_seconds": round(plain.seconds, 2),
        "guarded_seconds": round(guarded.seconds, 2),
    }


def find_last(ending: Ending) -> float | None:
    """Return the median of the last 50 losses of the first loop."""
    return statistics.median(ending.losses[0][-50:]) if ending.losses[0] else None


def describe(run: dict[str, Any]) -> str:
    """Return one line about one run."""
    parts = [f"{'HARMED' if run['harmed'] else 'ok':<7}{run['name']:<36}{run['seed']}"]
    parts.append(f"{show(run['plain_loss']):>10} -> {show(run['guarded_loss']):<10}")
    more = len(run["actions"]) - 3
    parts += [", ".join(run["actions"][:3]) + (f" and {more} more" if more > 0 else "")] if run["actions"] else []
    parts += [f"[{', '.join(run['warnings'])}]"] if run["warnings"] else []
    parts += [run["halted"][:60]] if run["halted"] else []
    if run["harmed"] and not run["actions"] and not run["halted"]:
        parts.append("; ".join(run["differences"])[:120])
    parts += [f"PLAIN RUN NOT HEALTHY: {run['plain_shortfalls']}"] if run["plain_shortfalls"] else []
    return "  ".join(parts)


def show(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts over all runs, and the names of those that were harmed or warned."""
    chosen = {
        "harmed": [run for run in runs if run["harmed"]],
        "acted_on": [run for run in runs if run["actions"]],
        "halted": [run for run in runs if run["halted"]],
        "warned": [run for run in runs if run["warnings"]],
    }
    counts = {f"num_{word}": len(those) for word, those in chosen.items()}
    names = {word: sorted({run["name"] for run in those}) for word, those in chosen.items()}
    return {"num_runs": len(runs), **counts, **names}


def choose(only: str | None, quick: bool) -> Iterator[Scenario]:
    """Return the requested scenarios."""
    for name, scenario in SCENARIOS.items():
        if (only is None or only in name) and (not quick or name in QUICK):
            yield scenario


def main() -> int:
    """Run the scenarios and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each scenario")
    parser.add_argument("--only", help="scenarios with this in their names; nothing is written")
    parser.add_argument("--clip", choices=CLIPS, default="none", help="how the Guard clips")
    parser.add_argument("--quick", action="store_true", help="four scenarios, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors are tiny: a second thread would only wait
    warnings.simplefilter("ignore")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    for scenario in choose(arguments.only, arguments.quick):
        for seed in range(arguments.seeds):
            plain = scenario.train(seed=seed)
            for name, policy in POLICIES.items():
                config = GuardConfig(clip=CLIPS[arguments.clip], policy=policy)
                runs[name].append(compare(scenario, seed, plain, config))
                print(f"{name:<9}{describe(runs[name][-1])}", flush=True)
    if not runs["on_proof"]:
        parser.error(f"no scenario has {arguments.only!r} in its name")
    both = {name: {"summary": summarise(those), "rules": count_rules(those)} for name, those in runs.items()}
    for name, one in both.items():
        counts = (f"{count} {word.removeprefix('num_')}" for word, count in one["summary"].items() if "num_" in word)
        print(f"{name:<9}" + ", ".join(counts).replace("_", " "), one["rules"])
    partly = arguments.quick or arguments.only is not None or arguments.clip != "none"
    print("written:", write_results("harm", both, quick=partly))
    return int(both["on_proof"]["summary"]["num_harmed"] > 0)


def count_rules(runs: list[dict[str, Any]]) -> dict[str, int]:
    """Return in how many runs each rule acted."""
    acted = Counter(kind for run in runs for kind in {word.split()[1] for word in run["actions"]})
    return dict(sorted(acted.items()))


if __name__ == "__main__":
    sys.exit(main())
