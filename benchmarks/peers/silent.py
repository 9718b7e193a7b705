"""How many errors that never crash do other tools notice, and how often do they raise a false alarm?

Every case of tests/silent, with and without its error, in the loop of each tool at its defaults. Noticed: it stopped
the training, withheld a step or warned. False alarm: it did so on the healthy twin, or on a program that only looks
like an error. Told apart: noticed, and no alarm on the twin. Clipping reports nothing, so it notices nothing. The
Guard's row counts the same cases in the results of benchmarks/silent.py; TrainCheck's row comes from
traincheck_runs.py. `wait_alone` is left out: it takes no step that a tool could look at. The healthy trainings are
those of harm.py: "changed" means that the final weights have different bits, as after every clip that engages; "goal
missed" means that the training did not reach what it was written to reach, such as a rising reward.

The cases are our own, and some of a Guard's rules were written for some of them: its row is not a score on unseen
errors. The other tools judge the loss and the gradient norms, which are healthy in most of these programs, and many
programs end before a tool's warm-up does. So few errors are visible to them. The cost is the mean processor time of a
step of compare.py's GPT, relative to `clip_grad_norm_` + step.

    python benchmarks/peers/environment.py --silent
    python benchmarks/peers/silent.py [--only NAME] [--quick]        here, with the peers that are installed
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see the Makefile
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "silent"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # first: `silent` is the program there

import numpy as np
import program_case
import program_cases
import rank_cases
import torch
from compare import time_peers
from peer_loops import PEERS, PeerLoop
from torch import Tensor, nn
from wiring import find_source

from machine import describe_machine, write_results
from silent import RANK_KINDS, list_cases
from steadygrad.testing.ranks import RanksFailed, run_ranks

COST_ROUNDS = 60


# --- a peer in a case -------------------------------------------------------------------------------------------------


class SilentLoop(PeerLoop):
    """A peer's loop that also receives the loss of a program with its own `backward()`."""

    heard: Tensor | None = None

    def step(self, subject: Any = None, /, *args: Any) -> Any:
        self._loss = self.heard if subject is None else None
        return super().step(subject, *args)

    def validate(self, loss: Any) -> None:
        """Peers take no validation loss."""


@contextlib.contextmanager
def hear_losses(loops: list[SilentLoop]) -> Iterator[None]:
    """Pass each loss on which `backward()` is called to the loops."""
    original = torch.Tensor.backward

    def backward(loss: Tensor, *args: Any, **options: Any) -> None:
        original(loss, *args, **options)
        for loop in loops:
            loop.heard = loss.detach() if loop._scaler is None else loss.detach() / loop._scaler.get_scale()

    torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def train(name: str, loops: list[SilentLoop], way: str, folder: Path, *, bug: bool) -> None:
    """Run a case of one process in the loops of a peer."""

    def make(model: nn.Module, optimizer: Any, scaler: Any = None) -> SilentLoop:
        loops.append(SilentLoop(model, optimizer, kind=PEERS[way], folder=folder, scaler=scaler))
        return loops[-1]

    if name in program_case.CASES:
        model, optimizer, run = program_case.CASES[name].build(bug)
        run(make(model, optimizer))
    elif name in program_cases.CASES:
        program_cases.CASES[name].train(lambda *given: make(*given).step, bug)
    else:
        program_cases.HEALTHY[name](lambda *given: make(*given).step)


def train_on_rank(name: str, way: str, bug: bool) -> bool:
    """Run a case of two ranks on this rank; return whether the peer has reported anything."""
    loops: list[SilentLoop] = []
    with tempfile.TemporaryDirectory() as folder, hear_losses(loops), quiet():

        def make(model: nn.Module, optimizer: Any) -> SilentLoop:
            loops.append(SilentLoop(model, optimizer, kind=PEERS[way], folder=Path(folder)))
            loops[-1].findings = []  # type: ignore[attr-defined]
            return loops[-1]

        rank_cases.Guard = make  # type: ignore[assignment,misc]
        if name in rank_cases.TRAININGS:
            rank_cases.TRAININGS[name](bug)
        else:
            rank_cases.train_apart()
    return has_alarm(loops)


def has_alarm(loops: list[SilentLoop]) -> bool:
    return any(loop.peer.num_alarms or loop.peer.num_withheld for loop in loops)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the peers' output out of the table; their counters are read instead."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        yield
        logging.disable(logging.NOTSET)


def ask(name: str, way: str, *, bug: bool) -> bool:
    """Return whether a peer reports anything in one case: a stop, a withheld step, an alarm."""
    if name in RANK_KINDS or name == "ranks_that_train_apart":
        try:
            return any(run_ranks(train_on_rank, 2, name, way, bug))
        except RanksFailed:  # it raised, since the plain ranks do not
            return True
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    loops: list[SilentLoop] = []
    with tempfile.TemporaryDirectory() as folder, hear_losses(loops), quiet():
        try:
            train(name, loops, way, Path(folder), bug=bug)
        except Exception as error:
            if way == "torch clip_grad_norm_":  # nothing in it raises, so the wiring is wrong
                raise
            print(f"{name}: {way} raised {type(error).__name__}", file=sys.stderr)
            return True
    return has_alarm(loops)


# --- the whole comparison ---------------------------------------------------------------------------------------------


def judge(name: str, kind: str | None, ways: list[str]) -> dict[str, dict[str, bool | None]]:
    """Judge one case with every peer: noticed (None: there is no error), and false alarm."""
    return {
        way: {"noticed": ask(name, way, bug=True) if kind else None, "alarm": ask(name, way, bug=False)} for way in ways
    }


def summarise(cases: dict[str, dict[str, Any]], ways: list[str]) -> dict[str, dict[str, Any]]:
    """Return the counts of each peer."""
    return {
        way: {
            "source": find_source(way),
            "num_noticed": sum(bool(one[way]["noticed"]) for one in cases.values()),
            "num_told_apart": sum(bool(one[way]["noticed"]) and not one[way]["alarm"] for one in cases.values()),
            "num_alarms": sum(bool(one[way]["alarm"]) for one in cases.values()),
        }
        for way in ways
    }


def main() -> int:
    """Run every case with every installed peer, then measure the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases with this in their names; nothing is written")
    parser.add_argument("--quick", action="store_true", help="every twelfth case, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_part = arguments.quick or arguments.only is not None
    ways = [way for way in PEERS if find_source(way)]
    kinds = {name: kind for name, kind, *_ in list_cases() if name != "wait_alone" and (arguments.only or "") in name}
    cases: dict[str, dict[str, Any]] = {}
    for name in list(kinds)[:: 12 if arguments.quick else 1]:
        cases[name] = judge(name, kinds[name], ways)
        marks = {way: "n" * bool(one["noticed"]) + "f" * bool(one["alarm"]) for way, one in cases[name].items()}
        print(f"{name:<36}" + "  ".join(f"{way}: {mark or '-'}" for way, mark in marks.items()), flush=True)
    peers = summarise(cases, ways)
    timed = [*ways, "steadygrad Guard"]
    cost = {} if is_part else time_peers(timed, rounds=COST_ROUNDS, quick=False, middle=statistics.fmean)
    results = {"num_faulty": sum(bool(kinds[name]) for name in cases), "num_healthy": len(cases), "peers": peers}
    results |= {"missing": [way for way in PEERS if way not in ways], "cost": cost, "cases": cases}
    print(describe_machine(), *peers.items(), cost, sep="\n")
    print("written:", write_results("peers_silent", results, quick=is_part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
