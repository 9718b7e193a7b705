"""What do other tools notice of four faults, what reaches the weights, what do they name, and what do they cost?

Each installed tool trains the same small model (subject.py), which one batch breaks in a known op on a known line.
Noticed: it raised an error, or reported something at that step that it does not report on healthy ones. Saved: no
weight is NaN or Inf afterwards. Continues: it did not raise, and still trains at the end. Named: op, line, module and
sample appear in its own output. Cost: processor time of a healthy step of a 10M-parameter GPT, relative to
`clip_grad_norm_` + step, on one thread; medians of rounds in which all take turns; processes that a tool starts are not
counted.

Tools that are not installed are left out; `environment.py` installs them in a separate environment and runs this
program there.

    python benchmarks/peers/environment.py [-q]        or here: python benchmarks/peers/compare.py [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from subject import FAULT, FAULTS, Net, compute_loss, make_batches, names_in
from torch import Tensor, nn
from wiring import PEERS, close, find_source

from machine import describe_machine, write_results
from models import GPT, SHAPES

QUESTIONS = ("op", "line", "module", "sample")


@contextlib.contextmanager
def listen() -> Iterator[io.StringIO]:
    """Collect all output: prints, logs, warnings."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("default")
            yield said
    finally:
        logging.getLogger().removeHandler(handler)


def ask(name: str, way: str) -> dict[str, Any]:
    """Run one peer on one fault."""
    torch.manual_seed(0)
    model = Net(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    said, raised, chatter = "", False, set()
    with tempfile.TemporaryDirectory() as folder:
        with listen():
            step = PEERS[name][1](model, optimizer, Path(folder))
        for number, batch in enumerate(make_batches(way)):
            with listen() as heard:
                try:
                    step(compute_loss, batch)
                except Exception:
                    if number < FAULT:  # the wiring is wrong: our fault, not the peer's
                        raise
                    raised = True
                    heard.write(traceback.format_exc(limit=1))
            lines = heard.getvalue().splitlines()
            if number < FAULT:
                chatter.update(lines)
            elif number == FAULT:
                said = "\n".join(line for line in lines if line.strip() and line not in chatter)
            if raised:
                break
        with listen():
            close(step)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    noticed = bool(said)
    names = names_in(said, way) if noticed else dict.fromkeys(QUESTIONS, False)
    return {"noticed": noticed, "saved": finite, "goes_on": finite and not raised, "names": names}


def time_peers(
    names: list[str], *, rounds: int, quick: bool, middle: Callable[[list[float]], float] = statistics.median
) -> dict[str, float]:
    """Time a healthy step, relative to the first of `names`, in processor time, which other programs affect least."""
    size = (64, 2, 512) if quick else SHAPES["10M"]
    torch.manual_seed(0)
    base = GPT(*size, heads=8, context=128)
    ids = torch.randint(size[2], (2, 129))
    times: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, listen():
        steps = {}
        for name in names:
            model = copy.deepcopy(base)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            steps[name] = PEERS[name][1](model, optimizer, Path(folder) / name.replace(" ", "-"))
        for number in range(rounds + 1):
            for name, step in steps.items():
                start = time.process_time()
                step(loss_of, ids)
                if number:  # the first round warms up
                    times[name].append(time.process_time() - start)
        for step in steps.values():
            close(step)
    taken = {name: middle(seconds) for name, seconds in times.items()}
    return {name: seconds / taken[names[0]] for name, seconds in taken.items()}


def loss_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(ids)
    return loss, loss


def compare_symile(*, quick: bool) -> dict[str, Any]:
    """Compare symile's loss over all combinations of three modalities with ours: the same number, and its time."""
    try:
        from symile import Symile
    except ImportError:
        return {}
    from steadygrad.losses.multiway import multiway_contrastive

    torch.manual_seed(0)
    features = [nn.functional.normalize(torch.randn(16 if quick else 48, 64), dim=1) for _ in range(3)]
    theirs = Symile(negative_sampling="n_squared")
    ways = {
        "symile": lambda given: theirs(given, torch.tensor(10.0)),
        "steadygrad": lambda given: multiway_contrastive(given, 10.0),
    }
    found: dict[str, Any] = {"num_modalities": 3, "batch": len(features[0])}
    for name, way in ways.items():
        times = []
        for _ in range(6):
            given = [feature.clone().requires_grad_() for feature in features]
            start = time.process_time()
            loss = way(given)
            loss.backward()
            times.append(time.process_time() - start)
        found[name] = {"loss": float(loss), "milliseconds": statistics.median(times[1:]) * 1e3}
    return found


def show(rows: dict[str, Any]) -> None:
    """Print the table."""
    print(f"\n{'':44}{'noticed':>8}{'saved':>8}{'goes on':>9}{'op':>5}{'line':>6}{'module':>8}{'sample':>8}{'cost':>9}")
    for name, row in rows.items():
        counts = [row["counts"][key] for key in ("noticed", "saved", "goes_on", *QUESTIONS)]
        cells = "".join(f"{count:>{width}}" for count, width in zip(counts, (8, 8, 9, 5, 6, 8, 8)))
        print(f"{name:44}{cells}{row['cost']:>8.2f}x   {row['source']}")
    print(f"of {len(FAULTS)} faults each; the cost is that of a healthy step, relative to clip_grad_norm_ + step")


def count(answers: dict[str, Any]) -> dict[str, int]:
    """Count how many of the faults were noticed, kept out of the weights, survived, and named."""
    counts = {key: sum(one[key] for one in answers.values()) for key in ("noticed", "saved", "goes_on")}
    return counts | {key: sum(one["names"][key] for one in answers.values()) for key in QUESTIONS}


def main() -> None:
    """Run, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model is timed, briefly; nothing is written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(describe_machine())
    names = [name for name in PEERS if find_source(name) is not None]
    missing = [name for name in PEERS if name not in names]
    if missing:
        print(f"not installed here, and left out: {', '.join(missing)}. Run benchmarks/peers/environment.py for all.")
    rows: dict[str, Any] = {}
    for name in names:
        answers = {fault: ask(name, way) for fault, way in FAULTS.items()}
        rows[name] = {"source": find_source(name), "counts": count(answers), "faults": answers}
        print(f"  {name}: done", flush=True)
    for name, cost in time_peers(names, rounds=5 if quick else 15, quick=quick).items():
        rows[name]["cost"] = cost
    show(rows)
    symile = compare_symile(quick=quick)
    if symile:
        print(f"\nsymile and our multiway loss: {symile}")
    results = {"num_faults": len(FAULTS), "missing": missing, "peers": rows, "symile": symile}
    print("written:", write_results("peers", results, quick=quick))


if __name__ == "__main__":
    main()
