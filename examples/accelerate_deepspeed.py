"""accelerate with a DeepSpeed plugin (ZeRO 2): the guard recognises the engine, and all ranks skip together.

Without --deepspeed the same loop runs on plain accelerate.

    accelerate launch examples/accelerate_deepspeed.py --deepspeed        # on one GPU or more
    python examples/accelerate_deepspeed.py                               # anywhere
"""

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn

from steadygrad import Guard

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", action="store_true")
arguments = parser.parse_args()

plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0) if arguments.deepspeed else None
accelerator = Accelerator(deepspeed_plugin=plugin)
if plugin is not None:
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8  # there is no DataLoader to read it from
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True  # torch's AdamW instead of DeepSpeed's

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)

guard = Guard.from_accelerator(accelerator, model, optimizer, run_dir="runs/accelerate")
for step in range(20):
    x, labels = torch.randn(8, 8, device=accelerator.device), torch.randint(3, (8,), device=accelerator.device)
    if step == 12 and accelerator.is_local_main_process:
        labels[:] = -100  # every label masked: the mean of nothing is NaN
    loss = nn.functional.cross_entropy(model(x), labels)
    accelerator.backward(loss)
    guard.step()  # with DeepSpeed the engine has stepped in backward, and this does nothing
    optimizer.zero_grad()

if accelerator.is_main_process:
    print([(incident.step, incident.finding.kind) for incident in guard.incidents])
guard.close()
