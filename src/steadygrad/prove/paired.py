"""PairedTest: batches that were trained on, and a snapshot -> their losses under the present and the earlier weights.

With the random numbers, autocast and modes of the step itself; forwards only, except where the slope of a loss is
measured by its gradient. The earlier weights are copied over the present ones in place, through host memory, and the
present ones are put back bit for bit: the device never holds a second copy of the model. All ranks take part, each
with its own batches, and all get the same means; an error on one is raised on all after every single step, so that none
waits for a forward that another does not make.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from steadygrad.act.snapshot import Snapshot
from steadygrad.diagnose.calls import find_tensors, read_signature
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.effects import Effects
from steadygrad.diagnose.lineage import find_storages
from steadygrad.diagnose.meeting import Meeting
from steadygrad.diagnose.replay import Step
from steadygrad.measure.ranks import Ranks
from steadygrad.prove.outside import OutsideWeights, is_outside_candidate
from steadygrad.state.collect import settle_shards
from steadygrad.state.shards import is_dtensor, take_local

T = TypeVar("T")
logger = logging.getLogger("steadygrad")
CHOOSING = ("multinomial", "bernoulli", "normal", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
"""Ops that draw from a distribution that may depend on the weights, as a policy that chooses its own data does."""
PASS_FUNCTION = "To get a proof, pass the step as a function that gets its batch as an argument: guard.step(fn, batch)."

GRADIENT_SCALE = 1024.0
"""Loss scale of a repeated backward: float16 gradients do not vanish, and a power of two changes no other."""


class CannotTestError(Exception):
    """The test has no answer; the message says why, and what to change to get one."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


class PairedTest:
    """Repeats steps under different weights, and counts the cost."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, ranks: Ranks) -> None:
        self.model, self._optimizers, self._ranks = model, tuple(optimizers), ranks
        self._ddp = ranks.ddp if isinstance(ranks.ddp, nn.parallel.DistributedDataParallel) else None
        self._draws: dict[int, list[float]] = {}
        self._outside = OutsideWeights()
        self.cost = 0.0
        """Approximate cost of the tests so far, in training steps."""

    def prepare(self, captures: Sequence[Capture]) -> list[Step]:
        """Return the steps that can be repeated; raise an error if that would do harm. Call it on every rank."""
        self._draws.clear()
        return self._agree(lambda: self._prepare(captures), lambda _: None)[0]

    def _agree(self, make: Callable[[], T], summarise: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """Return what `make` returned and what `summarise` gives for it on each rank; raise one rank's error on all."""
        made, answer, refused = None, None, None
        try:
            made = make()
            answer = summarise(made)
        except CannotTestError as error:
            refused = error.reason, error.remedy
        except Exception as error:  # raised on this rank alone, it would leave the others waiting in the exchange
            logger.error("the paired test failed, training continues: %r", error)
            refused = f"the test failed with {error!r:.120}", ""
        answers = self._ranks.gather((answer, refused))
        refusal = next((one for _, one in answers if one is not None), None)
        if refusal is not None:
            raise CannotTestError(*refusal)
        assert made is not None
        return made, [one for one, _ in answers]

    def _prepare(self, captures: Sequence[Capture]) -> list[Step]:
        settle_shards(self.model)  # otherwise gathered weights would be taken for what the modules hold
        if any(capture.is_model_call for capture in captures):
            raise CannotTestError("only the model's call is known, not how its loss is computed", PASS_FUNCTION)
        changed = next((names for capture in captures if (names := capture.find_changes())), ())
        if changed:
            raise CannotTestError(f"the batch was changed in place after its step ({', '.join(changed)})")
        effects = Effects(captures[-1].fn, captures[-1].args, captures[-1].kwargs)
        if effects.obstacle is not None:
            raise CannotTestError(
                f"the step function cannot be run again: {effects.obstacle}",
                "To get a proof, draw the batch outside the function and pass it as an argument.",
            )
        if effects.unread:
            raise CannotTestError(f"{effects.unread} cannot be read, so what a test does to it could not be undone")
        return [
            dataclasses.replace(
                Step.of(capture),
                forward_only=True,
                sharded=any(is_dtensor(p) for p in self.model.parameters()),
                together=self._ddp,
                meeting=Meeting(self._ranks.gather) if self._ranks.many else None,
                optimizers=self._optimizers,
                effects=effects,
                is_model_call=False,
            )
            for capture in captures
        ]

    def measure(self, steps: Sequence[Step], first: int = 0) -> list[float]:
        """Return each step's loss under the current weights, averaged over ranks; `first`: number of the first step."""
        means = []
        for number, step in enumerate(steps, first):
            _, losses = self._agree(functools.partial(self._run, step, number), float)
            means.append(sum(losses) / len(losses))
        return means

    def _run(self, step: Step, number: int) -> float:
        self.cost += 1  # a forward with every op watched takes about as long as a training step
        listener = _Listener()
        with step.replay(listener) as run:
            if run.error is not None:
                raise CannotTestError(f"the step raised {run.error!r:.120} when it was run again")
            if run.loss is None:
                raise CannotTestError("the step function returned no loss when it was run again")
            loss = float(run.loss.detach())
            known = _find_storages(self.model)
            changed = run.keeper.changed_beside(known) or (step.effects is not None and step.effects.undo())
        if changed:
            # A queue, a teacher, a target network: shaped by the present weights, it would be unfair to earlier ones.
            raise CannotTestError("the step function keeps its own state from call to call")
        # Weights that the forward gathered from shards look like another model's until they are freed.
        settle_shards(self.model)
        if self._outside.have_moved(listener.parameters.values(), self._list_own()):
            raise CannotTestError("the loss depends on weights that are trained elsewhere (a critic, a teacher)")
        earlier = self._draws.setdefault(number, listener.draws)
        if earlier != listener.draws:
            raise CannotTestError(
                "the step draws its own data with the model (a policy's actions), so no two weights see the same batch"
            )
        return loss

    def _list_own(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def measure_slope(self, step: Step, snapshot: Snapshot) -> float:
        """Return the slope of a step's loss on the way to the snapshot's parameters, by its gradient.

        With a backward, under the current weights. NaN if the gradient is not finite or backward fails.
        """
        whole = dataclasses.replace(step, forward_only=False, scale=GRADIENT_SCALE)
        _, slopes = self._agree(functools.partial(self._run_backward, whole, snapshot), float)
        # Shards hold parts of one gradient; otherwise each rank has the gradient of its own loss.
        total = float(sum(slopes))
        return total if step.sharded else total / len(slopes)

    def _run_backward(self, step: Step, snapshot: Snapshot) -> float:
        self.cost += 3
        snapshot.wait()
        with step.replay() as run:
            if run.error is not None:
                return math.nan
            gradients = {id(leaf): run.grads[name] for name, leaf in step.named_leaves if name in run.grads}
            slope = 0.0
            for parameter, slot in snapshot.state.parameters:
                if (gradient := gradients.get(id(parameter))) is not None:
                    way = snapshot.hosts[slot.index].double() - take_local(parameter).detach().cpu().double()
                    slope += float((gradient.to_dense().detach().cpu().double() * way).sum())
        return slope / GRADIENT_SCALE

    @contextlib.contextmanager
    def under(self, snapshot: Snapshot, share: float | None = None) -> Iterator[None]:
        """Give the model the snapshot's parameters and buffers inside this context.

        `share`: go only this share of the way, with the parameters alone.
        """
        self.cost += 2  # moving the weights out and in
        # A rank without memory makes all ranks refuse here, before the first weight is replaced.
        pairs, _ = self._agree(lambda: self._make_room(snapshot, share), lambda _: None)
        try:
            for live, host, kept in pairs:
                kept.copy_(live, non_blocking=True)  # ordered by the stream, like the two copies back
                live.copy_(host, non_blocking=True)
            yield
        finally:
            settle_shards(self.model)
            for live, _, kept in pairs:
                live.copy_(kept, non_blocking=True)
            if any(live.is_cuda for live, _, _ in pairs):
                torch.cuda.synchronize()  # the host blocks may be freed once this returns

    def _make_room(self, snapshot: Snapshot, share: float | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return live tensors, what takes their place, and host memory to keep them in meanwhile."""
        snapshot.wait()
        settle_shards(self.model)
        pairs = _pair(snapshot) if share is None else _pair_on_the_way(snapshot, share)
        # Pinned where that is faster: torch caches such blocks, so only the first test waits for their allocation.
        return [(live, host, torch.empty_like(live, device="cpu", pin_memory=live.is_cuda)) for live, host in pairs]


def _find_storages(model: nn.Module) -> set[int]:
    tensors = [take_local(t) for t in (*model.parameters(), *model.buffers())]
    return {storage._cdata for tensor in tensors for storage in find_storages(tensor)}


def _pair(snapshot: Snapshot) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield live tensors with their copies; through `.data`, so that no graph or version counter notices."""
    for parameter, slot in snapshot.state.parameters:
        yield take_local(parameter).data, snapshot.hosts[slot.index]
    for module, name, kept in snapshot.state.buffers:
        live = module._buffers.get(name)
        if kept is None or live is None or is_dtensor(live):
            continue
        host = snapshot.hosts[kept.index]
        # A buffer that no longer fits keeps its present values; both sides are measured with it.
        alike = (live.shape, live.dtype) == (host.shape, host.dtype)
        if alike and live.layout is torch.strided and torch._debug_has_internal_overlap(live) != 1:
            yield live.data, host


def _pair_on_the_way(snapshot: Snapshot, share: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield live parameters with values that lie `share` of the way to their copies."""
    for parameter, slot in snapshot.state.parameters:
        live, host = take_local(parameter).data, snapshot.hosts[slot.index]
        here = live.cpu()
        wide = torch.promote_types(here.dtype, torch.float64)  # a small share of a half's way rounds to nothing
        yield live, torch.lerp(here.to(wide), host.to(wide), share).to(here.dtype)


class _Listener:
    """Makes each call, and records what was drawn from a distribution, and which parameters were read."""

    def __init__(self) -> None:
        self.draws: list[float] = []
        self.parameters: dict[int, Tensor] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the call and return its result."""
        result = func(*args, **kwargs)
        self.parameters |= {id(t): t for t in find_tensors((*args, *kwargs.values())) if is_outside_candidate(t)}
        name = read_signature(func).name.rpartition(".")[2]
        if name in CHOOSING and args and isinstance(args[0], Tensor):
            # A sum tells draws apart as well as the whole tensor does, and needs no memory.
            self.draws += [float(tensor.detach().double().sum()) for tensor in find_tensors(result)]
        return result
