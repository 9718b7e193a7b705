"""ShardedStrategy: Lightning trains the encoders with a part of every weight on each rank (FSDP2).

Lightning's own strategy for FSDP2 saves and loads by itself; this one leaves that to the store, as with one process: a
checkpoint holds whole tensors, and goes on with any number of ranks. The scale of the logits is one number and cannot
be cut: it is whole on each rank, and its gradient is averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygrad.extras import import_extra
from steadygrad.state.shards import is_dtensor
from steadygrad.trainer.ranks import gather_shards, release_shards, shard_model

DDPStrategy: Any = import_extra(
    "lightning", "lightning.pytorch.strategies", "pytorch_lightning.strategies", what="the recipe clip6d"
).DDPStrategy


class ShardedStrategy(DDPStrategy):  # type: ignore[misc]
    """`Trainer(strategy=ShardedStrategy())`, under torchrun."""

    def configure_ddp(self) -> None:
        """Shard the encoders, in place of a wrapper around the whole module."""
        shard_encoders(self.lightning_module, self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole weights. All ranks must call it, as Lightning does."""
        # An evaluation may have left weights gathered
        release_encoders(self.lightning_module)
        whole: dict[str, Any] = gather_shards(super().lightning_module_state_dict())
        return whole

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return whole moments."""
        whole: dict[str, Any] = gather_shards(super().optimizer_state(optimizer))
        return whole

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole moments; each rank takes its part. Weights were loaded before they were sharded."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(cut_moments(state, optimizer))

    def teardown(self) -> None:
        """Leave the shards on their device: they cannot be moved while they have gradients."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def shard_encoders(module: nn.Module, device: torch.device) -> None:
    """Shard what has matrices among a module's children; average the gradients of the rest."""
    for child in module.children():
        parameters = list(child.parameters())
        if any(parameter.dim() > 1 for parameter in parameters):
            shard_model(child, device)
        else:
            for parameter in parameters:
                # Every rank must reach this hook in each backward; its all_reduce waits for all
                parameter.register_hook(average_over_ranks)


def release_encoders(module: nn.Module) -> None:
    """Drop what an evaluation has gathered."""
    for child in module.children():
        release_shards(child)


def average_over_ranks(gradient: Tensor) -> Tensor:
    """Return the mean of all ranks' gradients, as FSDP2 and DistributedDataParallel take it."""
    total = gradient.clone()  # all_reduce writes in place; the gradient is autograd's
    dist.all_reduce(total)
    return total / dist.get_world_size()


def cut_moments(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with each moment cut as its parameter is."""
    from torch.distributed.tensor import distribute_tensor

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def cut(value: Any, parameter: Any) -> Any:
        if not isinstance(value, Tensor) or not is_dtensor(parameter) or value.shape != parameter.shape:
            return value
        # A collective: all ranks load the same moments in the same order
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)

    moments = {
        index: {name: cut(value, parameters[int(index)]) for name, value in held.items()}
        for index, held in state["state"].items()
    }
    return {**state, "state": moments}
