"""What do the peers do to trainings that are healthy? Every scenario of tests/healthy, with each peer at its defaults.

Stopped: it raised an exception that the plain run does not have. Steps withheld: it skipped or undid a step. Weights
changed: the last weights are not the plain run's to the bit; clipping does that by design. Missed: the run no longer
came to what it was written to show, such as a reward that rises or a loss that falls. Warned: it said that something is
wrong. One run of each scenario, one seed. A peer that only watches changes nothing, and is judged by its alarms. The
Guard's row counts the same scenarios in the results of benchmarks/harm.py.

TrainCheck is not among them: it acts on nothing, and needs a trace of a good run of the same program to begin with.

    python benchmarks/peers/environment.py --harm
    python benchmarks/peers/harm.py [--only NAME] [--every N] [--quick]        here, with the peers that are installed
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from wiring import find_source

from healthy.catalogue import SCENARIOS
from healthy.scenario import Ending, PlainLoop, Scenario, find_loss
from machine import write_results

QUICK = ("class_incremental", "gan_of_two_guards", "catapult")


class Peer:
    """What a peer does at each step; this one does nothing."""

    num_withheld = num_alarms = 0

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        self.model, self.optimizers = model, optimizers

    def clip(self) -> None:
        """Between backward and step; gradients are unscaled."""

    def step(self, index: int, loss: Tensor | None) -> None:
        """The step of one optimizer."""
        self.optimizers[index].step()

    def watch(self, loss: Tensor) -> None:
        """After the step."""


class ClipGradNorm(Peer):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class ZClip(Peer):
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from zclip import ZClip

        super().__init__(model, optimizers, folder)
        self._zclip = ZClip()

    def clip(self) -> None:
        self._zclip.step(self.model)


class SpikeDetection(Peer):
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.utilities.spike import SpikeDetection

        super().__init__(model, optimizers, folder)
        self._fabric = Fabric(accelerator="cpu", devices=1)
        self._spikes = SpikeDetection(exclude_batches_path=folder)
        self._count = 0

    def watch(self, loss: Tensor) -> None:
        self._spikes.on_train_batch_end(self._fabric, loss, None, self._count)
        self._count += 1


class StabilityGuard(Peer):
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from stabilityguard import GuardedOptimizer

        super().__init__(model, optimizers, folder)
        self._guarded = [GuardedOptimizer(optimizer, model, log_dir=str(folder)) for optimizer in optimizers]

    def step(self, index: int, loss: Tensor | None) -> None:
        guarded = self._guarded[index]
        guarded.step(loss=None if loss is None else loss.item())
        self.num_withheld = self.num_alarms = sum(one._total_skips for one in self._guarded)


class TrainPulse(Peer):
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from trainpulse import TrainingCallback

        super().__init__(model, optimizers, folder)
        self._callback, self._count, self._norm = TrainingCallback(), 0, 0.0

    def clip(self) -> None:
        self._callback.on_step_begin(self._count)
        norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        self._norm = float(torch.stack(norms).norm()) if norms else 0.0

    def watch(self, loss: Tensor) -> None:
        self._callback.on_step_end(self._count, loss=loss.item(), grad_norm=self._norm)
        self._count += 1
        self.num_alarms = len(self._callback.monitor.alerts)


PEERS: dict[str, type[Peer]] = {
    "torch clip_grad_norm_": ClipGradNorm,
    "zclip": ZClip,
    "Lightning SpikeDetection": SpikeDetection,
    "stabilityguard GuardedOptimizer": StabilityGuard,
    "trainpulse": TrainPulse,
}
"""By their names in wiring.py."""


class PeerLoop(PlainLoop):
    """The plain loop with a peer in it."""

    def __init__(self, model: nn.Module, optimizer: Any, *, kind: type[Peer], folder: Path, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.peer = kind(model, self._optimizers, folder)
        self._loss: Tensor | None = None

    def backward(self, subject: Any, /, *args: Any) -> Any:
        result = super().backward(subject, *args)
        self._loss = find_loss(result).detach()
        return result

    def step(self, subject: Any = None, /, *args: Any) -> Any:
        result = None if subject is None else self.backward(subject, *args)
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        self.peer.clip()
        for index in range(len(self._optimizers)):
            self.peer.step(index, self._loss)
        if self._scaler is not None:
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        self._num_microbatches = 0
        if self._loss is not None:
            self.peer.watch(self._loss)
        return result


def try_peer(scenario: Scenario, plain: Ending, kind: type[Peer]) -> dict[str, Any]:
    """One scenario with one peer."""
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


def try_all(name: str) -> dict[str, dict[str, Any]]:
    """One scenario, with every peer that is installed."""
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    scenario = SCENARIOS[name]
    plain = scenario.train()
    return {way: try_peer(scenario, plain, kind) for way, kind in PEERS.items() if find_source(way)}


def main() -> int:
    """Run every scenario with every peer that is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="scenarios with this in their names; nothing is written")
    parser.add_argument("--quick", action="store_true", help="three scenarios, nothing written")
    parser.add_argument("--every", type=int, default=1, help="only each Nth scenario; the results say so")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    names = [name for name in SCENARIOS if (arguments.only or "") in name and (not arguments.quick or name in QUICK)]
    names = names[:: arguments.every]
    runs: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for name, run in zip(names, pool.imap(try_all, names)):
            runs[name] = run
            marks = {way: "".join(key[0] for key in HARMS if one[key]) for way, one in run.items()}
            print(f"{name:<36}" + "  ".join(f"{way}: {mark or 'ok'}" for way, mark in marks.items()), flush=True)
    found = {"every": arguments.every, "scenarios": names, **summarise(runs)}
    for way, one in found["peers"].items():
        print(f"{way:<34}" + ", ".join(f"{one[f'num_{key}']} {key}" for key in HARMS))
    print("written:", write_results("peers_harm", found, quick=arguments.quick or arguments.only is not None))
    return 0


def summarise(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts over all scenarios, and the names of those that came to harm."""
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


HARMS = ("stopped", "withheld", "changed", "missed", "warned")


if __name__ == "__main__":
    sys.exit(main())
