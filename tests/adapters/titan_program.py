"""torchtitan's debug model on two gloo ranks: `titan_program.py GUARDED BAD_STEP FOLDER`, started by torchrun.

Parts of torchtitan 0.3 that need an accelerator are replaced for the CPU: its device module, flex attention's backward,
and an NCCL reduction.
"""

import collections
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torchtitan.tools.utils as utils

GUARDED, BAD_STEP, FOLDER = sys.argv[1] == "guarded", int(sys.argv[2]), Path(sys.argv[3])


class Properties:
    total_memory = 8 << 30
    name = "cpu"


device: Any = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu)})
device.set_device = device.reset_peak_memory_stats = device.empty_cache = lambda *_args: None
device.current_device, device.device_count = lambda: 0, lambda: 1
device.get_device_name, device.get_device_properties = lambda *_args: "cpu", lambda *_args: Properties
device.memory_stats = lambda *_args: collections.defaultdict(int)
utils.device_type, utils.device_module = "cpu", device
utils.get_local_device = lambda: torch.device("cpu")

import torchtitan.models.common.attention as attention  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402


def attend(q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **_kwargs: Any) -> Any:
    attended = torch.nn.functional.scaled_dot_product_attention
    return attended(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
torchtitan.trainer.dist_utils.set_pg_timeouts = lambda *_args, **_kwargs: None

config = llama3_debugmodel()
config.hf_assets_path = str(FOLDER / "tokenizer")
config.dump_folder = str(FOLDER / "dump")
config.training.steps, config.training.seq_len, config.training.local_batch_size = 6, 32, 2
config.training.disable_cuda_graphs = True
config.checkpoint.enable = config.validator.enable = False
config.debug.seed = 1
config.activation_checkpoint = None
config.parallelism.spmd_backend = "partial_dtensor"
trainer = config.build()
for module in trainer.model_parts[0].modules():
    if hasattr(module, "set_force_sum_reduction_for_comms"):
        module.set_force_sum_reduction_for_comms(True)
rank, run = torch.distributed.get_rank(), trainer.forward_backward_step


def spoil(**kwargs: Any) -> Any:
    if trainer.step == BAD_STEP and rank == 1:
        kwargs["global_valid_tokens"] = kwargs["global_valid_tokens"] * torch.nan
    return run(**kwargs)


trainer.forward_backward_step = spoil
guard = None
if GUARDED:
    from steadygrad.adapters.torchtitan import guard_trainer

    guard = guard_trainer(trainer)
trainer.train()
result = {
    "weights": {name: p.full_tensor().detach() for name, p in trainer.model_parts[0].named_parameters()},
    "rate": trainer.optimizers.optimizers[0].param_groups[0]["lr"],
    "skipped": None if guard is None else guard.stats()["num_skipped"],
    "incidents": [] if guard is None else [(i.step, i.finding.kind, i.finding.message) for i in guard.incidents],
}
torch.save(result, FOLDER / f"rank{rank}.pt")
sys.stdout.flush()
os._exit(0)  # otherwise gloo's threads outlive the interpreter
