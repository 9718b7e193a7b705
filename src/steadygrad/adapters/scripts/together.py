"""Together: the ranks that train one optimizer's parameters -> one decision about a step, and one cause of a bad one.

With DistributedDataParallel all gradients are equal. Where each rank holds a part of them (FSDP2, tensor parallelism)
the ranks exchange their numbers as those of a Guard do, once the store by which they met has shown that every rank is
guarded: a collective that one of them does not enter would hold up all the others. In every other case they agree
through the store at each step. A bad step that no rank can replay alone is replayed by all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from steadygrad.adapters.scripts.agreement import Agreement, count_ranks, is_averaged, list_trained
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.investigator import Investigator
from steadygrad.diagnose.joint_replay import replay_jointly
from steadygrad.errors import UnsupportedError
from steadygrad.facts import Cause, Reading
from steadygrad.measure.ranks import Ranks, find_ranks
from steadygrad.state.shards import is_sharded


class Together:
    """One optimizer's ranks; a process that trains alone decides alone."""

    def __init__(self, name: str, optimizer: Optimizer, *, report: Callable[[str], None]) -> None:
        """`name` is the same on every rank."""
        self._name, self._optimizer, self._report = name, optimizer, report
        self._agreement: Agreement | None = None
        self.ranks: Ranks | None = None
        """The ranks that exchange their numbers, because each holds a part of the gradients; None if none does."""

    def meet(self, owner: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
        """Find out who trains these parameters. Raise an error where parts of them are on a rank without a guard."""
        if not any(is_sharded(p) for _, p in named):
            self.ranks = None
            return
        if self.ranks is None and count_ranks() > 1:
            self._agreement = Agreement(self._name, same_everywhere=True, report=self._report)
            # Not about a step: a first word through the store, to learn whether every rank is there to answer.
            self._agreement.decide(False)
            if self._agreement.is_apart:
                raise UnsupportedError("its gradients are in shards, which only all ranks together can measure")
        self.ranks = find_ranks(owner, named)
        # A collective. Every rank is known to be guarded here, so none waits for one that never comes.
        self.ranks.check_alike("")

    @property
    def shares_numbers(self) -> bool:
        """Whether a Reading is of all ranks, the same on each."""
        return self.ranks is not None and self.ranks.many

    def decide(self, is_bad: bool) -> bool:
        """Return whether all ranks skip this step."""
        # The numbers were exchanged, so `is_bad` is the same on every rank, and asking again would cost a wait.
        if self.shares_numbers or count_ranks() == 1:
            return is_bad
        if self._agreement is None:
            is_equal = is_averaged(list_trained(self._optimizer))
            self._agreement = Agreement(self._name, same_everywhere=is_equal, report=self._report)
        return self._agreement.decide(is_bad)

    def replay(
        self, investigator: Investigator, captures: Sequence[Capture], reading: Reading, began_on: Sequence[int]
    ) -> Cause | None:
        """Have all ranks replay the step at once; return the cause that one of them found, the same on each."""
        assert self.ranks is not None
        return replay_jointly(
            investigator,
            captures,
            lambda meeting, is_suspect: investigator.investigate(
                captures, reading, (), meeting=meeting, is_suspect=is_suspect
            ),
            ranks=self.ranks,
            began_on=began_on,
            device=self._optimizer.param_groups[0]["params"][0].device,
        )
