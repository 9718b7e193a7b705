"""Runs thousands of short real trainings on a Guard that only watches; writes traces with the step of instability.

Each run draws a program, optimizer, learning rate, schedule, batch size, precision, clipping, weight decay and initial
scale. Half of the rates lie near the rate at which this worker saw the same program and optimizer become unstable, so
that many runs become unstable late and many are healthy just below that rate. fp16 and bf16 are emulated by rounding
after every layer, forward and backward, with a GradScaler for fp16; no GPU is used.

    PYTHONPATH=src python benchmarks/forecast/generate.py --seconds 400 --workers 16 --out DIR
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from programs import PROGRAMS, Program
from torch import Tensor, nn
from truth import find_onset

from steadygrad import FixedNorm, Guard, GuardConfig, Policy, ZClip
from steadygrad.config import DetectConfig, DiagnoseConfig, MeasureConfig, SnapshotConfig
from steadygrad.detect import standard_rules
from steadygrad.facts import Fact, Finding, Reading

COLUMNS = ("loss", "norm", "coefficient", "rate", "scale", "skipped", "adam_rms", "update_norm", "ratio", "top", "peak")
"""One number of each per step: see `take_row`."""
LOW_BITS = np.uint32(0xFFFFFC00)
"""Keeps 13 bits of a float32's fraction (1e-4): the rest is noise and does not compress."""
AFTER = 24
"""Steps kept after the onset."""


# --- one run ---------------------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1.0 - group["betas"][0]).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1.0 - group["betas"][1])


OPTIMIZERS: dict[str, tuple[float, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (0.6, lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd)),
    "momentum": (0.12, lambda p, lr, wd: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=wd)),
    "adam": (0.05, lambda p, lr, wd: torch.optim.Adam(p, lr=lr, foreach=False)),
    "adamw": (0.05, lambda p, lr, wd: torch.optim.AdamW(p, lr=lr, weight_decay=wd, foreach=False)),
    "adamw_95": (0.05, lambda p, lr, wd: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95), weight_decay=wd)),
    "rmsprop": (0.015, lambda p, lr, wd: torch.optim.RMSprop(p, lr=lr, weight_decay=wd, foreach=False)),
    "lion": (0.01, lambda p, lr, wd: Lion(p, lr=lr, weight_decay=wd)),
}
"""Name -> a rate near which things usually become unstable, and the factory."""
EDGES = {
    "mlp_classes": 2.5,
    "gru_memory": 2.5,
    "contrastive": 3.0,
    "transformer": 1.2,
    "conv_classes": 1.0,
    "linear_model": 1.2,
    "gan": 1.0,
    "mixer": 0.8,
    "value_learning": -1.0,
    "graph": -0.5,
    "ratings": 0.2,
}
"""Program -> log of how much higher its critical rate is; 0.6 for others; where each worker's search begins."""


def make_schedule(kind: str, steps: int, r: random.Random) -> Callable[[int], float]:
    """Return step -> factor of the learning rate, at most 1 except for `jump`."""
    warm, at, growth = r.randint(10, 80), r.randint(40, max(41, steps - 60)), r.uniform(20, 300)
    factor = r.choice([3.0, 10.0, 30.0])
    period = r.randint(60, 150)
    return {
        "constant": lambda t: 1.0,
        "warmup": lambda t: min(1.0, (t + 1) / warm),
        "cosine": lambda t: min(1.0, (t + 1) / warm) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * t / steps))),
        "rise": lambda t: (t + 1) / steps,
        "ramp": lambda t: growth ** (t / steps - 1.0),
        "drop": lambda t: 1.0 if t < at else 0.1,
        "restarts": lambda t: 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (t % period) / period)),
        "jump": lambda t: 1.0 / factor if t < at else 1.0,
    }[kind]


class Round(torch.autograd.Function):
    """Rounds through a narrower number format, values and gradients alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def round_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Round every layer's output, and the gradient that comes back through it, to `dtype`."""
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, i, out: Round.apply(out, dtype))


class Tap:
    """A rule that records each Reading and reports nothing."""

    name = "tap"

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []

    def observe(self, fact: Fact) -> Iterable[Finding]:
        if isinstance(fact, Reading):
            self.rows.append(take_row(fact))
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def take_row(reading: Reading) -> tuple[float, ...]:
    """Return the numbers of `COLUMNS`; NaN for what this step did not measure."""
    cells, norm = reading.gradients.cells, reading.finite_grad_norm
    norms, peaks = cells[0::5], cells[1::5]
    top = max(norms, default=0.0) / norm if norm > 0 else 0.0
    peak = max((m * math.sqrt(n) / g for m, g, n in zip(peaks, norms, reading.gradients.numels) if g > 0), default=0.0)
    ratios = sorted((reading.update_ratios or {}).values())
    return (
        math.nan if reading.loss is None else reading.loss,
        reading.grad_norm,
        reading.clip_coefficient,
        reading.learning_rate or 0.0,
        math.nan if reading.loss_scale is None else reading.loss_scale,
        float(reading.skipped),
        max((v for v in (reading.adam_rms or {}).values() if math.isfinite(v)), default=math.nan),
        math.nan if reading.update_norm is None else reading.update_norm,
        ratios[len(ratios) // 2] if ratios else math.nan,
        top,
        peak,
    )


OFF = tuple(rule.name for rule in standard_rules(DetectConfig()))


def make_config(setup: Mapping[str, Any], tap: Tap) -> GuardConfig:
    """Return the settings of a Guard that only watches; bad steps are skipped, as always."""
    clip = {"none": None, "zclip": ZClip(max_norm=None)}.get(setup["clip"], FixedNorm(max_norm=setup["max_norm"]))
    return GuardConfig(
        clip=clip,
        policy=Policy.observe(),
        snapshots=SnapshotConfig(enabled=False),
        diagnose=DiagnoseConfig(enabled=False),
        detect=DetectConfig(off=OFF, rules=(tap,)),
        measure=MeasureConfig(scan_every=setup["scan_every"], parameters_every=setup["parameters_every"]),
    )


def train(setup: Mapping[str, Any], change: Callable[[GuardConfig], GuardConfig] = lambda config: config) -> np.ndarray:
    """Train once; return float32 [steps, columns]. Ends early once the run has nothing more to teach."""
    torch.manual_seed(setup["seed"])
    r = random.Random(setup["seed"])
    program = PROGRAMS[setup["program"]]()
    with torch.no_grad():
        for p in program.model.parameters():
            if p.dim() > 1:
                p.mul_(setup["init_scale"])
    if setup["precision"] != "fp32":
        round_layers(program.model, torch.float16 if setup["precision"] == "fp16" else torch.bfloat16)
    optimizer = OPTIMIZERS[setup["optimizer"]][1](program.model.parameters(), setup["rate"], setup["weight_decay"])
    schedule = make_schedule(setup["schedule"], setup["steps"], r)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=50) if setup["precision"] == "fp16" else None
    )
    tap = Tap()
    guard = Guard(program.model, optimizer, config=change(make_config(setup, tap)), scheduler=scheduler, scaler=scaler)
    try:
        run_steps(guard, program, setup, tap)
    finally:
        guard.close()
    return np.array(tap.rows, dtype=np.float64).clip(-3e38, 3e38).astype(np.float32)


def run_steps(guard: Guard, program: Program, setup: Mapping[str, Any], tap: Tap) -> None:
    bad, first = 0, math.nan
    for t in range(setup["steps"]):
        batch = list(program.draw(setup["batch"]))
        if t == setup["outlier_at"] and batch[0].is_floating_point():
            batch[0] = batch[0] * setup["outlier"]
        if setup["drift"] and batch[0].is_floating_point():
            batch[0] = batch[0] * setup["drift"] ** (t / setup["steps"])
        guard.step(program.loss, *batch)
        loss, norm = tap.rows[-1][0], tap.rows[-1][1]
        first = loss if t == 0 else first
        hopeless = not math.isfinite(loss) or not math.isfinite(norm) or loss > 1e6 * max(first, 1e-3)
        bad = bad + 1 if hopeless else 0
        if bad >= 24:
            return


# --- many runs -------------------------------------------------------------------------------------------------------


class Edges:
    """Estimates critical rates: log rate = the optimizer's + the program's; unstable runs lower it, others raise it."""

    def __init__(self) -> None:
        self._programs = {name: EDGES.get(name, 0.6) for name in PROGRAMS}
        self._optimizers = {name: math.log(rate) for name, (rate, _) in OPTIMIZERS.items()}

    def draw(self, program: str, optimizer: str, r: random.Random) -> float:
        """Draw a learning rate: most near the critical rate, the others from well below it to above."""
        spread = r.gauss(0.4, 0.9) if r.random() < 0.6 else r.uniform(-5.0, 2.0)
        return math.exp(self._programs[program] + self._optimizers[optimizer] + spread)

    def learn(self, program: str, optimizer: str, rate: float, *, broke: bool) -> None:
        """Move the estimate, most after an informative run: unstable below it, or stable above it."""
        distance = math.log(rate) - self._programs[program] - self._optimizers[optimizer]
        move = -0.8 / (1.0 + math.exp(2.0 * distance)) if broke else 1.2 / (1.0 + math.exp(-2.0 * distance))
        self._programs[program] = min(self._programs[program] + move, 6.0)
        self._optimizers[optimizer] += 0.2 * move


def draw_setup(r: random.Random, edges: Edges) -> dict[str, Any]:
    """Draw everything about one run."""
    program, optimizer = r.choice(list(PROGRAMS)), r.choice(list(OPTIMIZERS))
    precision = r.choices(["fp32", "bf16", "fp16"], [0.6, 0.2, 0.2])[0]
    schedules = {"constant": 5, "warmup": 4, "cosine": 3, "rise": 3, "ramp": 3, "drop": 1, "restarts": 1, "jump": 1}
    steps = r.randint(200, 380)
    return {
        "program": program,
        "optimizer": optimizer,
        "rate": edges.draw(program, optimizer, r),
        "schedule": r.choices(list(schedules), list(schedules.values()))[0],
        "steps": steps,
        "batch": r.choice([2, 8, 16, 32, 64]),
        "precision": precision,
        "clip": r.choices(["none", "fixed", "zclip"], [0.5, 0.42, 0.08])[0],
        "max_norm": r.choice([1.0, 1.0, 1.0, 0.3, 5.0]),
        "weight_decay": r.choice([0.0, 0.0, 0.01, 0.1]),
        "init_scale": r.choice([1.0, 1.0, 1.0, 1.0, 0.5, 1.5]),
        "scan_every": r.choice([100, 100, 10]),
        "parameters_every": r.choice([0, 0, 10]),
        "outlier_at": r.randint(40, steps - 1) if r.random() < 0.08 and precision != "fp16" else -1,
        "outlier": r.choice([3.0, 10.0]),
        "drift": r.choice([3.0, 10.0]) if r.random() < 0.06 else 0.0,
        "seed": r.getrandbits(40),
    }


def cut(rows: np.ndarray, onset: int | None) -> np.ndarray:
    """Return what is kept: all of a stable run, an unstable one until just after its onset; 13 bits per number."""
    kept = np.ascontiguousarray(rows if onset is None else rows[: onset + AFTER])
    odd = ~np.isfinite(kept)
    rounded = (kept.view(np.uint32) & LOW_BITS).view(np.float32)
    return np.where(odd, kept, rounded)


def make_runs(seed: int) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield runs forever."""
    r, edges = random.Random(seed), Edges()
    while True:
        setup = draw_setup(r, edges)
        start = time.perf_counter()
        rows = train(setup)
        onset = find_onset(rows[:, 0].astype(float), rows[:, 1].astype(float), rows[:, 4].astype(float))
        edges.learn(setup["program"], setup["optimizer"], setup["rate"], broke=onset is not None)
        outcome = {"onset": onset, "num_steps": len(rows), "seconds": round(time.perf_counter() - start, 3)}
        yield {**setup, **outcome}, cut(rows, onset)


def write_chunk(path: Path, setups: list[dict[str, Any]], rows: list[np.ndarray]) -> int:
    """Write column by column, which compresses best; return the file's size."""
    table = np.concatenate(rows)
    lengths = np.array([len(one) for one in rows], dtype=np.int32)
    columns = {name: table[:, i] for i, name in enumerate(COLUMNS)}
    half = {name: columns[name].astype(np.float16) for name in ("coefficient", "top", "peak")}
    waiting = path.with_suffix(".part.npz")
    np.savez_compressed(waiting, setups=np.array(json.dumps(setups)), lengths=lengths, **(columns | half))
    waiting.replace(path)
    return path.stat().st_size


def work(worker: int, seed: int, seconds: float, max_bytes: int, out: Path) -> None:
    """Run one process until the time or the space is used up; every written chunk is complete."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    np.seterr(all="ignore")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    end, used, chunk = time.monotonic() + seconds, 0, 0
    setups: list[dict[str, Any]] = []
    rows: list[np.ndarray] = []
    for setup, trace in make_runs(seed * 1000 + worker):
        setups.append(setup)
        rows.append(trace)
        over = time.monotonic() > end
        if over or len(rows) == 60:
            used += write_chunk(out / f"traces-{seed}-{worker:02d}-{chunk:03d}.npz", setups, rows)
            setups, rows, chunk = [], [], chunk + 1
        if over or used > max_bytes:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each worker runs")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-mb", type=float, default=36.0, help="space for all traces")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    room = int(arguments.max_mb * 1e6 / arguments.workers)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=work, args=(i, arguments.seed, arguments.seconds, room, arguments.out))
        for i in range(arguments.workers)
    ]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    files = sorted(arguments.out.glob(f"traces-{arguments.seed}-*.npz"))
    print(f"{len(files)} files, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")
    return max(abs(one.exitcode or 0) for one in workers)


if __name__ == "__main__":
    sys.exit(main())
