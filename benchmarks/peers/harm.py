"""What do other tools do to healthy trainings? Every scenario of tests/healthy, with each tool at its defaults.

Stopped: it raised an exception that the plain run does not raise. Steps withheld: it skipped or undid a step. Weights
changed: the final weights are not bit-identical to the plain run's; clipping changes them by design. Missed: the run no
longer reached what it was written to show, such as a rising reward or a falling loss. Warned: it reported a problem.
One run of each scenario, one seed. A tool that only watches changes nothing, and is rated by its alarms. The Guard has
two rows: with its defaults, which clip, and without clipping, from the results of benchmarks/harm.py.

TrainCheck is not included: it does not act, and needs a trace of a good run of the same program first;
traincheck_runs.py has its results on healthy programs.

    python benchmarks/peers/environment.py --harm
    python benchmarks/peers/harm.py [--only NAME] [--every N] [--peer PEER] [--quick]        here, with those installed
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from peer_loops import PEERS, Peer, PeerLoop
from torch import nn
from wiring import find_source

from healthy.catalogue import SCENARIOS
from healthy.scenario import Ending, Scenario
from machine import RESULTS, write_results
from steadygrad import GuardConfig

GUARD = "steadygrad Guard"
QUICK = ("class_incremental", "gan_of_two_guards", "catapult")


def try_peer(scenario: Scenario, plain: Ending, kind: type[Peer]) -> dict[str, Any]:
    """Run one scenario with one peer."""
    loops: list[PeerLoop] = []

    def make_loop(model: nn.Module, optimizer: Any, **options: Any) -> PeerLoop:
        loops.append(PeerLoop(model, optimizer, kind=kind, folder=Path(folder), **options))
        return loops[-1]

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ending = scenario.train(make_loop=make_loop)
    return judge(
        ending,
        plain,
        withheld=any(loop.peer.num_withheld for loop in loops),
        warned=any(loop.peer.num_alarms for loop in loops),
    )


def try_guard(scenario: Scenario, plain: Ending) -> dict[str, Any]:
    """Run one scenario on Guards with their defaults, including clipping."""
    ending = scenario.train(config=GuardConfig())
    return judge(ending, plain, withheld=bool(ending.actions), warned=bool(ending.warnings))


def judge(ending: Ending, plain: Ending, *, withheld: bool, warned: bool) -> dict[str, Any]:
    stopped = ending.halted is not None
    return {
        "stopped": stopped,
        "withheld": withheld,
        "changed": stopped or any(not torch.equal(plain.weights[name], ending.weights[name]) for name in plain.weights),
        "missed": stopped or bool(ending.shortfalls),
        "warned": stopped or warned,
        "why": (ending.halted or "; ".join(ending.shortfalls))[:120],
    }


def try_all(name: str, only: str | None = None) -> dict[str, dict[str, Any]]:
    """Run one scenario with every installed peer, or with one."""
    torch.set_num_threads(1)  # tensors are tiny: a second thread would only wait
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    scenario = SCENARIOS[name]
    plain = scenario.train()
    ways = [way for way in (*PEERS, GUARD) if find_source(way) and only in (None, way)]
    return {way: try_guard(scenario, plain) if way == GUARD else try_peer(scenario, plain, PEERS[way]) for way in ways}


def main() -> int:
    """Run every scenario with every installed peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="scenarios with this in their names; nothing is written")
    parser.add_argument("--quick", action="store_true", help="three scenarios, nothing written")
    parser.add_argument("--every", type=int, default=1, help="only each Nth scenario; the results say so")
    parser.add_argument(
        "--peer", choices=[*PEERS, GUARD], help="only this peer; the results keep the rows of the others"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    names = [name for name in SCENARIOS if (arguments.only or "") in name and (not arguments.quick or name in QUICK)]
    names = names[:: arguments.every]
    runs: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for name, run in zip(names, pool.imap(functools.partial(try_all, only=arguments.peer), names)):
            runs[name] = run
            marks = {way: "".join(key[0] for key in HARMS if one[key]) for way, one in run.items()}
            print(f"{name:<36}" + "  ".join(f"{way}: {mark or 'ok'}" for way, mark in marks.items()), flush=True)
    found = {"every": arguments.every, "scenarios": names, **summarise(runs)}
    if arguments.peer is not None:
        found = keep_others(found)
    for way, one in found["peers"].items():
        print(f"{way:<34}" + ", ".join(f"{one[f'num_{key}']} {key}" for key in HARMS))
    print("written:", write_results("peers_harm", found, quick=arguments.quick or arguments.only is not None))
    return 0


def summarise(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return counts over all scenarios, and the names of those that were harmed."""
    ways = list(next(iter(runs.values())))
    peers = {
        way: {
            "source": find_source(way),
            **{f"num_{key}": sum(run[way][key] for run in runs.values()) for key in HARMS},
            **{key: [name for name, run in runs.items() if run[way][key]] for key in HARMS},
        }
        for way in ways
    }
    return {"num_runs": len(runs), "peers": peers, "missing": [way for way in PEERS if way not in ways]}


def keep_others(found: dict[str, Any]) -> dict[str, Any]:
    """Add the new row to the existing results, which must be of the same scenarios."""
    before = json.loads((RESULTS / "peers_harm.json").read_text(encoding="utf-8"))["results"]
    if before["scenarios"] != found["scenarios"]:
        raise ValueError("The results in peers_harm.json are of other scenarios. Run all peers, without --peer.")
    return {**before, "peers": {**before["peers"], **found["peers"]}}


HARMS = ("stopped", "withheld", "changed", "missed", "warned")


if __name__ == "__main__":
    sys.exit(main())
