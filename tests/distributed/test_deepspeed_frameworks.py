"""DeepSpeed inside accelerate and transformers' Trainer: the usual calls guard them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_trainings import BAD_RANK, BAD_STEP, DEEPSPEED, NUM_STEPS, load_deepspeed, make_model
from ranked_trainings import assert_same, make_batches
from torch import Tensor, nn

from steadygrad import Guard
from steadygrad.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (pip install deepspeed)"
)
PRELOADED = (*DEEPSPEED, "transformers.trainer", "transformers.integrations.deepspeed")


def start_accelerate() -> None:
    """Let accelerate use DeepSpeed on a CPU, for which it has no default backend."""
    load_deepspeed()
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_DEEPSPEED": "true"}
    PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_CPU)


def read_weights(model: nn.Module) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}


# --- accelerate -------------------------------------------------------------------------------------------------------


def train_accelerated(*, stage: int, guarded: bool, bad: bool = False, without: int | None = None) -> dict[str, Any]:
    start_accelerate()
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0)
    plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True}
    accelerator = Accelerator(deepspeed_plugin=plugin)
    plain = make_model(half=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, scheduler)
    guard = Guard.from_accelerator(accelerator, model, optimizer) if guarded else None
    batches = make_batches(2 * NUM_STEPS)
    if bad and dist.get_rank() == BAD_RANK:
        batches[2 * BAD_STEP][0][0] = torch.nan
    for number, (x, y) in enumerate(batches):
        if number // 2 == without:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if guard is not None:
                guard.step()  # as in a loop without DeepSpeed; the engine has already called the guard
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    state = read_weights(model.module) | {"rate": torch.tensor(optimizer.param_groups[0]["lr"])}
    result = None if guard is None else (guard.num_steps, guard.stats()["num_skipped"], guard.incidents[-1:])
    return {"state": state, "result": result}


def train_accelerated_beside_plain(stage: int) -> list[dict[str, Any]]:
    return [
        train_accelerated(stage=stage, guarded=False),
        train_accelerated(stage=stage, guarded=True),
        train_accelerated(stage=stage, guarded=False, without=BAD_STEP),
        train_accelerated(stage=stage, guarded=True, bad=True),
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerates_deepspeed_is_guarded_by_from_accelerator(stage: int) -> None:
    for plain, quiet, shorter, faulty in run_ranks(train_accelerated_beside_plain, 2, stage):
        assert_same(quiet["state"], plain["state"])
        assert quiet["result"] == (NUM_STEPS, 0, [])
        assert_same(faulty["state"], shorter["state"])
        num_steps, num_skipped, (incident,) = faulty["result"]
        assert (num_steps, num_skipped, incident.step) == (NUM_STEPS, 1, BAD_STEP)


# --- transformers -----------------------------------------------------------------------------------------------------


class Regression(nn.Module):
    """Any model whose forward returns a loss; its batches are rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.net(x).squeeze(-1)
        return {"loss": (output - labels).square().mean(), "logits": output}


def train_trainer(folder: str, callback: Any, *, bad: bool = False) -> dict[str, Tensor]:
    start_accelerate()
    import transformers

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(6, generator=generator), "labels": torch.zeros(())} for _ in range(4 * NUM_STEPS)]
    if bad:  # the second half of a global batch of 2 x 2 rows belongs to rank 1
        rows[4 * BAD_STEP + 2]["x"] = torch.full((6,), torch.nan)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        save_steps=NUM_STEPS,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        logging_steps=1,
        deepspeed={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )
    trainer = InOrder(
        model=Regression(),
        args=arguments,
        train_dataset=rows,
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    return read_weights(trainer.model_wrapped.module)


def train_trainers(folder: str) -> dict[str, Any]:
    from steadygrad.adapters.transformers import GradientMonitoringCallback

    plain = train_trainer(f"{folder}/plain", None)
    quiet, faulty = GradientMonitoringCallback(), GradientMonitoringCallback()
    states = train_trainer(f"{folder}/quiet", quiet), train_trainer(f"{folder}/faulty", faulty, bad=True)
    return {
        "plain": plain,
        "states": states,
        "quiet": (quiet.guard.num_steps, len(quiet.guard.incidents)),
        "faulty": (faulty.guard.stats()["num_skipped"], sorted({i.step for i in faulty.guard.incidents})),
    }


def test_the_trainers_deepspeed_is_guarded_by_its_callback(tmp_path: Path) -> None:
    for result in run_ranks(train_trainers, 2, str(tmp_path)):
        quiet, faulty = result["states"]
        assert_same(quiet, result["plain"])
        assert result["quiet"] == (NUM_STEPS, 0)
        assert result["faulty"] == (1, [BAD_STEP])
        assert all(weight.isfinite().all() for weight in faulty.values())
