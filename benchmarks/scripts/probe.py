"""Runs a script as Python would, and records how it ended: steps, CPU time of a step, a digest of its weights.

    python probe.py RESULT.json BAD_CALL script.py [arguments...]        (or -m package.module)

BAD_CALL: which call of the first layer in training returns NaN (0: none). The fault belongs to the data: whenever the
same input comes again, as in a replay, it gives the same NaN. The script itself is not edited; random numbers are
seeded before it begins. A worker that does not inherit this process calls `begin` and `write_result` itself, with the
arguments from the environment.
"""

import hashlib
import json
import os
import random
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

RESULT, BAD_CALL = "PROBE_RESULT", "PROBE_BAD_CALL"
"""Environment variables that hold the arguments, for workers."""
seen = {"optimizers": {}, "times": []}
fault = {"at": 0, "layer": None, "calls": 0, "input": None}


def note_step(optimizer, _args, _kwargs):
    seen["optimizers"][id(optimizer)] = optimizer
    seen["times"].append(time.process_time())


def read_input(args):
    return [float(x.double().sum()) for x in args if isinstance(x, torch.Tensor)]


def spoil(module, args, output):
    is_layer = not list(module.children()) and any(True for _ in module.parameters(recurse=False))
    if not (is_layer and module.training and isinstance(output, torch.Tensor)):
        return None
    if output.requires_grad and module is (fault["layer"] or module):
        fault["layer"] = module
        fault["calls"] += 1
        if fault["calls"] == fault["at"]:
            fault["input"] = read_input(args)
    if module is not fault["layer"] or fault["input"] is None or fault["input"] != read_input(args):
        return None  # a replay of shards has no graph, yet fails on the same input
    return output + (output.detach().flatten()[:1] * 0 - 1).sqrt()  # HERE


def begin():
    """Listen to every optimizer, and make one call of the first layer fail if requested."""
    fault["at"] = int(os.environ[BAD_CALL])
    register_optimizer_step_post_hook(note_step)
    if fault["at"]:
        torch.nn.modules.module.register_module_forward_hook(spoil)


def write_result():
    """Record what was seen, on the first rank."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0" or not seen["times"]:
        return
    digest, finite = hashlib.sha256(), True
    for optimizer in seen["optimizers"].values():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            values = parameter.detach()
            values = values.to_local() if hasattr(values, "to_local") else values
            digest.update(values.float().contiguous().numpy().tobytes())
            finite = finite and bool(values.isfinite().all())
    times = seen["times"][3:]
    cost = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    result = {"digest": digest.hexdigest(), "finite": finite, "steps": len(seen["times"]), "step_seconds": cost}
    Path(os.environ[RESULT]).write_text(json.dumps(result))


def leave(code, exit=os._exit):
    write_result()
    exit(code)


if __name__ == "__main__":
    os.environ[RESULT], os.environ[BAD_CALL] = os.path.abspath(sys.argv[1]), sys.argv[2]
    target, *arguments = sys.argv[3:]
    begin()
    random.seed(0)
    torch.manual_seed(0)
    os._exit = leave  # a program may end without running its last lines
    try:
        if target == "-m":
            sys.path[0] = os.getcwd()
            sys.argv[:] = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(target))
            sys.argv[:] = [target, *arguments]
            runpy.run_path(target, run_name="__main__")
    finally:
        write_result()
