"""The graph of a loss -> MixedAxes: samples that see each other, by the gradient of one sample's output.

The output of one sample is differentiated with respect to every place where data enters the graph: behind the first
layers, since inputs themselves have no gradient. Rows of other samples must get none. Where they get one and the
sample's own row gets none, samples were exchanged. Where both do, samples may be meant to see each other (nodes of a
graph, words of a sentence), so that is reported only for images and sequences that have a label each.

Once, in the second backward; what looks wrong is tested again with two other samples of the next. Cost: one backward
without gradients of weights. Left out with norms over the batch, with functions of the program's own in the graph
(DistributedDataParallel and torch.compile have some), for labels that only number or pair the samples, and where the
program would notice: hooks on its tensors, checkpoints that compute again. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from steadygrad.facts.program import MixedAxes
from steadygrad.measure.loss_graph import VIEWS, Labels, find_shape, shorten, walk
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.random_state import unchanged_random

FEWEST_ROWS = 8
MOST_ENTRIES = 16


class RowGradientWatch:
    """Tests one sample, and two more if that looks wrong; `take` returns the result."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._pending: list[tuple[int, int, int, PendingRows]] = []
        self._is_suspicious = False
        self.wants_more = False
        """Whether the next backward is to be looked at as well."""

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return bool(self._pending)

    def note(self, step: int, loss: Tensor, labels: Labels, inputs: Sequence[Tensor]) -> None:
        """Differentiate some samples' outputs; `inputs` are the tensors that the model was called with."""
        self.wants_more = False
        num_rows = len(inputs[0]) if inputs else 0
        if labels.target.shape != (num_rows,) or num_rows < FEWEST_ROWS or labels.num_classes == num_rows:
            return
        entries = _find_entries(loss.grad_fn, num_rows)
        if entries:
            is_set = any(tensor.dim() < 3 or not tensor.is_floating_point() for tensor in inputs)
            is_set = is_set or any(num_rows in tensor.shape[1:] or len(tensor) != num_rows for tensor in inputs)
            samples = (2, num_rows - 2) if self._is_suspicious else (1,)
            for sample in samples:
                rows = _differentiate(labels, entries, sample, num_rows, may_share=is_set, transfer=self._transfer)
                self._pending.append((step, sample, num_rows, rows))

    def take(self, step: int) -> list[MixedAxes]:
        """Return what three samples agree on."""
        if self._pending[0][0] > step:
            return []
        pending, self._pending = self._pending, []
        found = [(sample, num_rows, rows.read()["rows"]) for _, sample, num_rows, rows in pending]
        if not all(is_mixed for _, _, (is_mixed, _, _) in found):
            return []
        if not self._is_suspicious:
            self._is_suspicious = self.wants_more = True
            return []
        sample, num_rows, (_, is_exchanged, num_others) = found[0]
        what = f"the output of sample {sample} has a gradient with respect to {num_others:.0f} other samples of its "
        what += f"batch of {num_rows}" + (", and none with respect to itself" if is_exchanged else "")
        return [MixedAxes(step=step, kind="gradient", what=what)]


def _find_entries(root: Any, num_rows: int) -> list[GradientEdge]:
    """Return the first results with `num_rows` rows that depend on data; none if samples may see each other."""
    users: dict[Any, Any] = {}
    sources = []
    for node in walk(root):
        if isinstance(node, BackwardCFunction) or "BatchNorm" in node.name():
            return []
        following = [one for one, _ in node.next_functions]
        users.update((one, node) for one in following if one is not None)
        if following and (None in following or shorten(node).startswith("Embedding")):
            sources.append(node)
    entries = dict.fromkeys(one for node in sources for one in _find_rows(node, users, num_rows))
    return [GradientEdge(node, 0) for node in entries][-MOST_ENTRIES:]  # the last ones are the furthest from the loss


def _find_rows(node: Any, users: dict[Any, Any], num_rows: int) -> Iterator[Any]:
    """Yield a node's result once it has been brought to `num_rows` rows by the views that follow."""
    while find_shape(node)[:1] != (num_rows,):
        node = users.get(node)
        if node is None or shorten(node) not in VIEWS:
            return
    # With as many time steps as samples, the rows may be time steps: torch's recurrent layers keep time first inside.
    if num_rows not in find_shape(node)[1:-1]:
        yield node


def _differentiate(
    labels: Labels,
    entries: Sequence[GradientEdge],
    sample: int,
    num_rows: int,
    *,
    may_share: bool,
    transfer: Transfer | None,
) -> PendingRows:
    """Return, once copied: whether the sample depends wrongly on others, whether not on itself, on how many others."""
    target = labels.target
    metadata = labels.outputs._input_metadata[0]
    seed = torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)  # [samples, classes]
    # Not all equal: behind a softmax equal weights have a gradient of 0.
    seed[sample] = torch.linspace(0.5, 1.5, labels.num_classes, device=metadata.device)
    with unchanged_random([target.device]):  # recomputed layers may draw
        found = torch.autograd.grad(
            [GradientEdge(labels.outputs, 0)],
            list(entries),
            [seed],
            retain_graph=True,  # the program's own backward follows
            allow_unused=True,
            materialize_grads=False,
        )
    with torch.no_grad():
        tensors = [one for one in found if one is not None and is_readable(one)]
        reached = torch.stack([one.reshape(num_rows, -1).ne(0).any(1) for one in tensors])  # [entries, samples]
        own = reached[:, sample].clone()
        reached[:, sample] = False
        others = reached.any(1)
        exchanged = (others & ~own).any()
        numbers = torch.arange(num_rows, device=target.device)
        is_class = (target != target[0]).any() & (target != numbers).any()
        is_mixed = is_class & (exchanged if may_share else others.any())
        row = torch.stack([is_mixed, exchanged, reached.any(0).sum()]).double()
    return send_rows({"rows": row}, transfer)
