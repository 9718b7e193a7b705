"""Two ranks, one with a bad batch: both skip the same step, and their weights stay equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import steadygrad

HERE = Path(__file__).parent
START = """
import json, os, sys
from pathlib import Path
import conftest, torch
torch.set_num_threads(1)
out = Path(sys.argv[1])
"""
LIGHTNING = """
from lightning_trainings import *
from steadygrad.adapters.lightning import GuardCallback
batches, module, callback = make_batches(12), Classifier(), GuardCallback()
batches[4] = spoil(batches[4], "nan")  # rank 0's third
trainer = fit(module, batches, callback, devices=2, strategy="ddp")
rank = trainer.global_rank
"""
TRANSFORMERS = """
from trainer_trainings import *
from steadygrad.adapters.transformers import GuardCallback
callback = GuardCallback()
save, written = torch.save, []

def note_and_save(thing, path, *args, **kwargs):
    written.append(Path(path).name)
    save(thing, path, *args, **kwargs)

torch.save = note_and_save
options = dict(save_strategy="steps", save_steps=3)
trainer = train(Regression(), spoil(make_rows(24), 4, "nan"), out / "trainer", callback, **options)
module, rank = trainer.model, trainer.args.process_index
num_states = sum("steadygrad" in name for name in written)
assert num_states == (2 if rank == 0 else 0), f"rank {rank} has written the guard's state {num_states} times"
kept = torch.load(out / "trainer" / "checkpoint-3" / "steadygrad.pt", weights_only=True)
assert kept["judgement"]["tally"]["num_skipped"] == 1
"""
END = """
stats = callback.guard.stats()
weights = [p.tolist() for p in module.parameters()]
counts = [stats["num_steps"], stats["num_skipped"], sorted({i.step for i in callback.guard.incidents})]
(out / f"rank{rank}.json").write_text(json.dumps({"finite": is_finite(module), "counts": counts, "weights": weights}))
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
# DDP still holds the group, and a thread of gloo that lets go of a tensor while the interpreter ends asks for the GIL,
# is unwound, and aborts the process (pytorch issues 38228, 190489). So the interpreter does not end: the process does.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("code", [LIGHTNING, TRANSFORMERS], ids=["lightning", "transformers"])
def test_both_ranks_skip_a_step_that_is_bad_on_one(code: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(START + code + END)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(HERE), str(Path(steadygrad.__file__).parent.parent)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *launcher, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["finite"]
    assert first["counts"] == second["counts"] == [6, 1, [2]]
    assert first["weights"] == second["weights"]
