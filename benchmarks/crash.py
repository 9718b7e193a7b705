"""Is there a good checkpoint after `kill -9` at any moment? A real training, killed 200 times, mostly while saving.

Every restart must begin at the newest complete save, no confirmed save may be lost, and the final weights must be
bit-identical to those of an uninterrupted training. The training is the one of the tests (tests/stories/crashes.py):
dropout, shuffling, noise, accumulation, scheduler, autocast, adaptive clipping.

Run `python benchmarks/crash.py`; `--kills N` for another number, `--quick` for ten; writes results/crash.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import write_results

PROGRAM = Path(__file__).parent.parent / "tests" / "stories" / "crashes.py"


def main() -> int:
    """Run it and print the result; exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="ten kills; nothing is written")
    arguments = parser.parse_args()
    kills = 10 if arguments.quick else arguments.kills
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PROGRAM), folder, str(kills), str(arguments.seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    found["wall_seconds"] = round(time.perf_counter() - begin, 1)
    for name, value in found.items():
        print(f"{name:<55}{value}")
    kept = (
        found["weights_equal"]
        and not found["num_restarts_before_a_confirmed_save"]
        and not found["num_restarts_at_another_checkpoint_than_the_newest"]
        and found["num_kills_while_writing"] * 2 > kills
    )
    if kills >= 200 or arguments.quick:
        print("written:", write_results("crash", found, quick=arguments.quick))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
