"""Several processes -> one training: who this rank is, a model spread over the ranks, each rank's part of the data.

torchrun starts the processes. A step takes as many batches as there are ranks, one for each: what is trained equals one
process on the joined batch. Every rank has the same order of the data, from one shared generator, and random numbers
of its own for everything else. A single process is left as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from steadygrad.checkpoint.workers import copy_loader
from steadygrad.state.shards import is_dtensor
from steadygrad.state.tree import map_tensors

T = TypeVar("T")
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets."""


# --- who is there -------------------------------------------------------------------------------------------------


def join_ranks() -> None:
    """Join the processes that torchrun has started with this one; do nothing in a single process."""
    if not dist.is_available() or dist.is_initialized():
        return
    if any(name not in os.environ for name in LAUNCHED) or int(os.environ["WORLD_SIZE"]) < 2:
        return
    if torch.cuda.is_available():
        # Before the process group: NCCL uses the current device, and all ranks would meet on GPU 0
        torch.cuda.set_device(find_local_rank() % torch.cuda.device_count())
    # gloo beside NCCL: Python objects are gathered through the CPU, without waiting for the GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(leave_ranks)


def leave_ranks() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):  # another rank may be gone, and this one is ending
            dist.destroy_process_group()


def count_ranks() -> int:
    """Return the number of processes that train together; 1 for a single one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def find_rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def find_local_rank() -> int:
    """Return its number on this machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", find_rank()))


def is_first() -> bool:
    """Whether this is the process that prints, and writes what belongs to the whole run."""
    return find_rank() == 0


def share_from_first(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank; an exception there is raised everywhere."""
    if count_ranks() == 1:
        return make()
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = make()
        # Sent instead of raised: the other ranks are already waiting in the broadcast
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def gather_from_ranks(value: T) -> list[T]:
    """Return what every rank has, by rank, on every rank."""
    if count_ranks() == 1:
        return [value]
    found: list[Any] = [None] * count_ranks()
    dist.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def first_rank_first() -> Iterator[None]:
    """Run the block on rank 0, then on all others: for files that one writes and all read."""
    if count_ranks() > 1 and not is_first():
        dist.barrier()
    try:
        yield
    finally:
        if count_ranks() > 1 and is_first():
            # Also after an error, or the other ranks would wait for this one forever
            dist.barrier()


def sum_over_ranks(numbers: Tensor) -> Tensor:
    """Return the sum over ranks of a tensor without gradient."""
    if count_ranks() == 1:
        return numbers
    total = numbers.detach().clone()  # all_reduce writes in place, and the numbers are the caller's
    dist.all_reduce(total)
    return total


# --- the model ----------------------------------------------------------------------------------------------------


class Replica(DistributedDataParallel):
    """DistributedDataParallel through which the attributes and methods of the model inside can be reached."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While it is constructed or unpickled there is no `module`, and asking for it would recurse without end
            if name == "module" or "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self.module, name)


def strip_replica(model: nn.Module) -> nn.Module:
    """Return the model inside a Replica, or the model itself."""
    return model.module if isinstance(model, Replica) else model


def share_weights(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)  # detached it shares memory: the parameter itself is written


def replicate_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with a copy on each rank, whose gradients are averaged."""
    return Replica(model, device_ids=[device] if device.type == "cuda" else None)


def shard_model(model: nn.Module, device: torch.device) -> None:
    """Give each rank a part of every parameter, by FSDP2; repeated blocks are gathered one after the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (count_ranks(),))
    for owner in list(model.modules()):
        if isinstance(owner, nn.ModuleList | nn.Sequential):
            # Inner blocks first: the outer call takes the parameters that no inner one has taken
            for block in owner:
                if len(list(block.children())) > 1 and any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def release_shards(model: nn.Module) -> None:
    """Drop what a forward without backward has gathered: FSDP2 keeps the weights of the outermost module whole."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def join_batch_norms(model: nn.Module) -> nn.Module:
    """Let batch norms on GPUs use the statistics of all ranks' batches; torch has no such layer for the CPU."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


@contextlib.contextmanager
def hold_gradients(model: nn.Module, *, hold: bool) -> Iterator[None]:
    """Do not exchange the gradients of this microbatch yet: those of the last one take them along."""
    with model.no_sync() if hold and isinstance(model, Replica) else contextlib.nullcontext():
        yield


def gather_shards(tree: Any) -> Any:
    """Return nested containers with every sharded tensor whole; all ranks must call it."""

    def gather(tensor: Tensor) -> Tensor:
        whole: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        return whole

    return map_tensors(tree, gather)


# --- the data -----------------------------------------------------------------------------------------------------


class SharedOrder(Sampler[int]):
    """A random order that all ranks have alike: that of `DataLoader(shuffle=True)`, from its own generator."""

    def __init__(self, num: int, generator: torch.Generator) -> None:
        self._num, self.generator = num, generator

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator).item())
        yield from torch.randperm(self._num, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()


class RankBatches(Sampler[list[int]]):
    """This rank's batch of every group of batches, one for each rank; the last, short group is divided evenly."""

    def __init__(self, batches: Sampler[list[int]], rank: int, num_ranks: int) -> None:
        self.batches, self._rank, self._num = batches, rank, num_ranks
        self.sampler = getattr(batches, "sampler", None)
        drops = bool(getattr(batches, "drop_last", False))
        # With fewer batches than ranks, dropping the last group would leave no data at all
        self._drops = drops and len(batches) >= num_ranks  # type: ignore[arg-type]

    def __len__(self) -> int:
        num: int = len(self.batches)  # type: ignore[arg-type]
        return num // self._num if self._drops else -(-num // self._num)

    def __iter__(self) -> Iterator[list[int]]:
        iterator = iter(self.batches)
        while group := list(itertools.islice(iterator, self._num)):
            if len(group) == self._num or not self._drops:
                yield self._take(group)

    def _take(self, group: list[list[int]]) -> list[int]:
        if len(group) == self._num and len({len(batch) for batch in group}) == 1:
            return group[self._rank]
        rows = [index for batch in group for index in batch]
        rows = list(itertools.islice(itertools.cycle(rows), max(len(rows), self._num)))  # every rank needs one
        return rows[len(rows) * self._rank // self._num : len(rows) * (self._rank + 1) // self._num]


@dataclass
class RankInit:
    """Seeds a worker for its rank, and then runs the user's worker_init_fn.

    A loader draws the seed of its workers from the generator that orders the data, which is the same on all ranks.
    """

    init: Callable[[int], Any] | None
    rank: int

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed = info.seed + self.rank * info.num_workers  # worker n of a rank has the loader's seed + n
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:  # torch imports it in a worker, where it is installed
            numpy = sys.modules["numpy"]
            # Not the seed itself, with which numpy draws the same numbers as `random`
            numpy.random.seed(numpy.random.SeedSequence(seed).generate_state(4))
        object.__setattr__(info, "seed", seed)  # frozen; the user's function may seed other libraries with it
        if self.init is not None:
            self.init(worker)


def share_loader(loader: Iterable[T], seed: int | None) -> Iterable[T]:
    """Return this rank's part of a DataLoader; in a single process, the loader itself.

    One whose sampler divides the data already is left alone; of anything else it is unknown whether it does.
    """
    num = count_ranks()
    if num == 1 or _is_divided(loader):
        return loader
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        warnings.warn(
            f"a {type(loader).__name__} of this kind is not divided among the {num} ranks: each uses all of it, unless "
            "it takes its own part itself. Give a DataLoader over a dataset with a length.",
            stacklevel=3,
        )
        return loader
    generator = torch.Generator().manual_seed(agree_on_seed(seed))
    batches = _share_order(cast(Sampler[list[int]], loader.batch_sampler), generator)
    divided = RankBatches(batches, find_rank(), num)
    changes = {
        "batch_sampler": divided,
        "sampler": divided.sampler,
        "generator": loader.generator or generator,
        "worker_init_fn": RankInit(loader.worker_init_fn, find_rank()),
    }
    shared: DataLoader[T] = copy_loader(loader, **changes)
    return shared


def agree_on_seed(seed: int | None) -> int:
    """Return the seed that all ranks use; without one, a random one of rank 0."""
    return share_from_first(lambda: int(torch.randint(2**62, (), device="cpu").item()) if seed is None else seed)


def _is_divided(loader: Any) -> bool:
    owners = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return any(isinstance(one, DistributedSampler | RankBatches) for one in owners)


def _share_order(batches: Sampler[list[int]], generator: torch.Generator) -> Sampler[list[int]]:
    """Return batches whose random order comes from `generator`, unless their sampler brings one of its own."""
    sampler = getattr(batches, "sampler", None)
    if not isinstance(batches, BatchSampler) or sampler is None or getattr(sampler, "generator", 0) is not None:
        return batches
    order: Sampler[int]
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        order = SharedOrder(sampler.num_samples, generator)
    else:
        order = copy.copy(sampler)  # the user's own sampler keeps its generator
        order.generator = generator  # type: ignore[attr-defined]
    return BatchSampler(order, batches.batch_size, batches.drop_last)


def begin_epoch(loader: Any, epoch: int) -> None:
    """Tell a sampler that shuffles by epoch which one begins."""
    for owner in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
