"""The graph of a language model's loss -> a VisibleLabel: an output that depends on the very token it is to predict.

The labels show whether it is such a model: they are the tokens of an embedding, one place on. Then the output of one
place is differentiated with respect to the embedding of the next: where that is not 0, no mask hides the label. It is
the last place that counts, since a prefix may be seen whole. Nothing is tested where the graph cannot tell: places that
were moved on the way, or a sentence that was summed up in a vector, which a decoder may be meant to see.

Cost: a comparison of labels with tokens in one backward. If they fit, a later one is preceded by one without gradients
of weights. Left out where the program would notice, as in `row_gradients.py`. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from steadygrad.facts.program import VisibleLabel
from steadygrad.measure.loss_graph import Labels, find_shape, read_dim, shorten, walk
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.saved import read_saved
from steadygrad.measure.transfer import Transfer
from steadygrad.state.random_state import unchanged_random

FEWEST_TOKENS, FEWEST_LABELS = 4, 16
LATER = 10
"""First step in which this is done: the host is ahead of a GPU by then, which hides the 25 ms that GPT-2 124M takes."""
ALIGNED, UNALIGNED = 0.99, 0.5
"""Share of labels that must equal the next token, and that may equal the token itself."""
VISIBLE = 1e-6
"""Share of the largest gradient among other places from which a place is seen: sharp attention leaves little."""
OPAQUE = ("BatchNorm", "Fft")
"""Ops whose rounding, or whose batch, brings every place a gradient."""
MOST_EMBEDDINGS = 8


@dataclass(frozen=True, slots=True)
class Text:
    """An embedding of tokens that may be what the labels were made from."""

    node: Any
    tokens: Tensor
    """[rows, places]"""
    rows: Tensor
    """The labels: [rows, places], maybe one place less than the tokens."""
    is_time_first: bool


class NextTokenWatch:
    """Looks whether labels are the next tokens, and if so differentiates some outputs; `take` returns the result."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._pending: tuple[int, PendingRows] | None = None
        self._layouts: frozenset[bool] = frozenset()  # whether time is first where labels are the next tokens
        self._is_open = True  # whether there is still something to compare, or an output to differentiate

    def wants(self, step: int, number: int, *, may_wait: bool) -> bool:
        """Whether this backward, `number` of all, is to be looked at; `may_wait`: later ones are heard as well."""
        return self._is_open and (step >= LATER if may_wait else number > 0)

    def end_look(self) -> None:
        """A backward was looked at: there is nothing more to do, unless `take` says so."""
        self._is_open = False

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return self._pending is not None

    def note(self, step: int, loss: Tensor, labels: Labels) -> None:
        """Look at the labels of a loss that is about to be differentiated; once they are known to fit, at its graph."""
        texts = list(_find_texts(loss.grad_fn, labels))[:MOST_EMBEDDINGS]
        if self._layouts:
            texts = [text for text in texts if text.is_time_first in self._layouts]
            found = {
                f"{i} {k}": seen for i, one in enumerate(texts) for k, seen in enumerate(_differentiate(labels, one))
            }
        else:
            compared = [_compare(text, labels.ignore_index)[None].double() for text in texts]
            found = {f"{i} {texts[i].is_time_first}": one for i, one in enumerate(compared)}
        if found:
            self._pending = step, send_rows(found, self._transfer)

    def take(self, step: int) -> list[VisibleLabel]:
        """Return a label that the model sees, if it sees those of every embedding that they were made from."""
        if self._pending is None or self._pending[0] > step:
            return []
        found, self._pending = self._pending[1].read(), None
        if not self._layouts:
            self._layouts = frozenset(name.endswith("True") for name, row in found.items() if row[0])
            self._is_open = bool(self._layouts)
            return []
        fitting = [row for row in found.values() if row[0]]
        if not fitting or not all(row[1] for row in fitting):
            return []
        _, _, place, share = fitting[0]
        return [VisibleLabel(step=step, place=int(place), share=share)]


def _find_texts(root: Any, labels: Labels) -> Iterator[Text]:
    """Yield the embeddings whose tokens fit the labels in number, and whose places can be followed to the outputs."""
    nodes = list(walk(root))
    if any(isinstance(node, BackwardCFunction) or any(name in node.name() for name in OPAQUE) for node in nodes):
        return
    target = labels.target.detach()
    for node in nodes:
        tokens = read_saved(node, "indices") if shorten(node) == "Embedding" else None
        if tokens is None or tokens.dim() != 2 or tokens.device != target.device or not is_readable(tokens):
            continue
        for is_time_first in (False, True):
            by_row = tokens.T if is_time_first else tokens
            num_rows, length = by_row.shape
            num_labels = target.numel() // max(1, num_rows)
            if num_labels * num_rows != target.numel() or num_labels not in (length, length - 1):
                continue
            rows = target.reshape(num_labels, num_rows).T if is_time_first else target.reshape(num_rows, num_labels)
            if length >= FEWEST_TOKENS and _keeps_places(labels.outputs, node, num_rows, (length, num_labels)):
                yield Text(node, by_row, rows, is_time_first)


def _keeps_places(outputs: Any, embedding: Any, num_rows: int, lengths: Sequence[int]) -> bool:
    """Return whether every way between the two goes through results that have an axis of places, never moved."""
    users: dict[Any, list[Any]] = {}
    for node in walk(outputs):
        for following, _ in node.next_functions:
            users.setdefault(following, []).append(node)
    waiting, seen = [embedding], {embedding}
    while waiting:
        node = waiting.pop()
        has_places = shorten(node) == "ConstantPadNd" or _has_places(find_shape(node), num_rows, lengths)
        if not has_places or _moves_places(node, lengths):
            return False
        new = [user for user in users.get(node, ()) if user not in seen]
        seen.update(new)
        waiting += new
    return outputs in seen


def _has_places(shape: tuple[int, ...], num_rows: int, lengths: Sequence[int]) -> bool:
    """Return whether a result may have one entry for each place; of two axes, one must be that of all places.

    >>> _has_places((8, 12, 32), 8, (12, 11)), _has_places((96, 32), 8, (12, 11)), _has_places((8, 12), 8, (12, 11))
    (True, True, False)
    """
    flat = [num_rows * length for length in lengths]
    return any(size in flat or (len(shape) > 2 and size in lengths) for size in shape)


def _moves_places(node: Any, lengths: Sequence[int]) -> bool:
    """Return whether a node takes other places than the first ones: `outputs[:, 1:]` are those of the labels."""
    kind = shorten(node)
    source = node.next_functions[0][0] if node.next_functions else None
    if source is None or kind not in ("Slice", "Split", "SplitWithSizes"):
        return kind in ("Index", "IndexSelect", "Gather", "Roll", "Flip")
    shape = find_shape(source)
    is_place = bool(shape) and shape[read_dim(node) % len(shape)] in (*lengths, max(lengths) + 1)
    return is_place and (kind != "Slice" or node._saved_start != 0)


def _compare(text: Text, ignore_index: int) -> Tensor:
    """Return, on the device, whether the labels are the next tokens."""
    num = min(text.rows.shape[1], text.tokens.shape[1] - 1)
    rows, tokens = text.rows[:, :num], text.tokens
    counted = rows != ignore_index
    following, same = (((rows == tokens[:, i : i + num]) & counted).sum() for i in (1, 0))
    total = counted.sum()
    return (total >= FEWEST_LABELS) & (following >= ALIGNED * total) & (same <= UNALIGNED * total)


def _differentiate(labels: Labels, text: Text) -> Sequence[Tensor]:
    """Return, on the device and for two rows: whether labels are the next tokens, whether one is seen, where, how much.

    One backward serves both. Where a row sees the other's places, its next one is at most that of one of the two.
    """
    num_rows, length = text.tokens.shape
    num = min(text.rows.shape[1], length - 1)
    places = torch.arange(length, device=text.tokens.device)
    chosen = [0, num_rows - 1]
    last = [torch.where(text.rows[row, :num] != labels.ignore_index, places[:num], -1).amax() for row in chosen]
    seed = _make_seed(labels, text, dict(zip(chosen, last)))
    if seed is None:
        return []
    with unchanged_random([places.device]):  # recomputed layers may draw
        (found,) = torch.autograd.grad(
            [GradientEdge(labels.outputs, 0)],
            [GradientEdge(text.node, 0)],
            [seed],
            retain_graph=True,  # the program's own backward follows
            allow_unused=True,
        )
    if found is None:
        return []
    with torch.no_grad():
        is_next = _compare(text, labels.ignore_index)
        by_row = found.detach().transpose(0, 1) if text.is_time_first else found.detach()
        return [_judge(by_row[row], places, place, is_next) for row, place in zip(chosen, last)]


def _judge(gradient: Tensor, places: Tensor, place: Tensor, is_next: Tensor) -> Tensor:
    """Return the four numbers of one row from the gradient of its output at `place` by its embeddings [places, C]."""
    sizes = gradient.abs().amax(-1).double()
    largest = torch.where(places == place, 0.0, sizes).amax()
    share = torch.where(places == place + 1, sizes, 0.0).amax() / largest.clamp(min=1e-30)
    is_seen = (place >= 0) & (largest > 0) & (share > VISIBLE)
    return torch.stack([one.double() for one in (is_next, is_seen, place, share)])


def _make_seed(labels: Labels, text: Text, chosen: Mapping[int, Tensor]) -> Tensor | None:
    """Return weights of the outputs that are 0 but at one place of each chosen row; None for another layout."""
    metadata = labels.outputs._input_metadata[0]
    shape = [int(size) for size in metadata.shape]
    axis = 1 if len(shape) == 2 else read_dim(labels.outputs) % len(shape) if len(shape) == 3 else -1
    if axis < 0 or shape[axis] != labels.num_classes:
        return None
    others = [size for i, size in enumerate(shape) if i != axis]
    num_rows, num_labels = text.rows.shape
    width = num_labels if len(others) == 1 else others[1 - text.is_time_first]
    if others not in ([num_rows * num_labels], [width, num_rows] if text.is_time_first else [num_rows, width]):
        return None
    numbers = torch.arange(width, device=text.tokens.device)
    is_there = torch.zeros(num_rows, width, dtype=torch.bool, device=numbers.device)
    for row, place in chosen.items():
        is_there[row] = numbers == place
    is_there = (is_there.T if text.is_time_first else is_there).reshape(others).unsqueeze(axis)
    # Not all equal: behind a softmax equal weights have a gradient of 0.
    weights = torch.linspace(0.5, 1.5, labels.num_classes, dtype=metadata.dtype, device=numbers.device)
    return is_there * weights.view([-1 if i == axis else 1 for i in range(len(shape))])
