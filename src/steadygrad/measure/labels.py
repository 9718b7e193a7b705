"""The labels of a loss, the tokens and the mask of the model's call -> a LabelScan.

Tokens at the places of the labels tell how far the labels were shifted; a mask whose hidden places all hold one token
is a padding mask, and shows labels that count at padding. Everything is reduced on the device and sent with one
asynchronous copy. Cost: a few passes over the labels, in the first steps and with the periodic scans. Reads only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.facts.program import LabelScan
from steadygrad.measure.loss_graph import Labels
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.tree import find_tensors

OFFSETS = (0, 1, 2)
"""Places by which labels may be ahead of the tokens."""
FEWEST_TOKENS = 4
"""Tokens in a row below which alignment says nothing."""
NOT_TOKENS = ("label", "target", "position", "type", "mask")
"""Words in the names of integer arguments that are not tokens."""
KEEPING = ("attention_mask", "keep", "valid")
"""Words in the names of masks that are 1 where there is something to read; torch's `attn_mask` is not one of them."""
# Beyond any token or label, and exact in float64.
BIG = 1 << 52


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The tokens and the mask among the arguments of a call of the model."""

    tokens: Tensor | None = None
    mask: Tensor | None = None


def read_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelCall:
    """Find tokens (integers, two dimensions) and a mask of the same shape among the arguments of a call."""
    named = list(_name_arguments(model, args, kwargs))
    tokens = next((t for name, t in named if _may_be_tokens(name, t)), None)
    if tokens is None:
        return ModelCall()
    masks = [t for name, t in named if t is not tokens and t.shape == tokens.shape and _may_be_mask(name, t)]
    return ModelCall(tokens, masks[0] if masks else None)


def list_texts(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return all arguments of a call that may be tokens."""
    return [tensor for name, tensor in _name_arguments(model, args, kwargs) if _may_be_tokens(name, tensor)]


def list_keeping(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the masks among the arguments of a call that are to be 1 at tokens, by their names.

    Not those of bools: torch's own are True where something is hidden.
    """
    named = [
        one for one in _name_arguments(model, args, kwargs) if one[1].dtype is not torch.bool and one[1].dim() == 2
    ]
    return [t for name, t in named if _may_be_mask(name, t) and any(word in name for word in KEEPING)]


class PendingLabels:
    """A scan of labels whose numbers are still being copied."""

    def __init__(self, rows: PendingRows, *, labels: Labels, is_causal: bool, is_given: bool, where: str) -> None:
        self._rows, self._num_classes, self._is_reduced = rows, labels.num_classes, labels.is_reduced
        self._is_causal, self._is_given, self._where = is_causal, is_given, where

    def read(self, step: int) -> LabelScan:
        """Return the numbers as a scan of `step`."""
        row = [*self._rows.read()["labels"], *[0.0] * 16]  # without tokens, the row ends early
        counted, lowest, highest, rows, causal = (int(number) for number in row[:5])
        pairs = zip(OFFSETS, row[5:11:2], row[6:11:2])
        padded, at_padding, ends, at_end = (int(number) for number in row[11:15])
        return LabelScan(
            step=step,
            num_counted=counted,
            num_classes=self._num_classes,
            lowest=lowest,
            highest=highest,
            num_rows=rows,
            is_given=self._is_given,
            is_reduced=self._is_reduced,
            matches={offset: same / total for offset, same, total in pairs if total >= 16},
            is_causal=self._is_causal or bool(causal),
            num_at_end=at_end,
            num_at_padding=at_padding,
            num_lost_ends=ends,
            num_padded_rows=padded,
            where=self._where,
        )


@torch.no_grad()
def scan_labels(
    labels: Labels,
    call: ModelCall,
    *,
    masks: Sequence[Tensor | bool] = (),
    is_recurrent: bool = False,
    is_given: bool = False,
    where: str = "",
    transfer: Transfer | None = None,
) -> PendingLabels:
    """Queue a scan of `labels`; `masks` are those of attention scores, see `find_masks`."""
    target = labels.target.detach().to(torch.int64)
    counted = target != labels.ignore_index
    numbers = [
        counted.sum(),
        torch.where(counted, target, BIG).amin(),
        torch.where(counted, target, -BIG).amax(),
        _number(target, target.shape[0] if target.dim() else 1),
        _is_any_causal(masks, target),
    ]
    tokens = call.tokens
    fits = tokens is not None and tokens.device == target.device and is_readable(tokens)
    length = target.numel() // len(tokens) if tokens is not None and fits and target.numel() % len(tokens) == 0 else 0
    if tokens is not None and length and tokens.shape[1] - len(OFFSETS) <= length <= tokens.shape[1]:
        numbers[3] = _number(target, len(tokens))
        rows, counted = target.reshape(-1, length), counted.reshape(-1, length)  # [B, T]
        numbers += _match(rows, counted, tokens.to(torch.int64))
        numbers += _look_at_padding(counted, tokens.to(torch.int64), call.mask)
        numbers.append(counted[:, -1].sum() if length == tokens.shape[1] else _number(target, 0))
    row = torch.stack([number.to(torch.int64) for number in numbers]).double()
    is_causal = is_recurrent or any(mask is True for mask in masks)
    sent = send_rows({"labels": row}, transfer)
    return PendingLabels(sent, labels=labels, is_causal=is_causal, is_given=is_given, where=where)


def _match(rows: Tensor, counted: Tensor, tokens: Tensor) -> list[Tensor]:
    """For each offset: counted labels that equal the token so many places on, and counted labels that have one."""
    numbers = []
    for offset in OFFSETS:
        length = min(rows.shape[1], tokens.shape[1] - offset)
        there = counted[:, :length]
        same = (rows[:, :length] == tokens[:, offset : offset + length]) & there
        numbers += [same.sum(), there.sum()]
    return numbers


def _look_at_padding(counted: Tensor, tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Padded rows; counted labels at padding; padded rows that lost their end.

    Which value of the mask is padding is decided by the tokens: all places of that value hold the same one.
    """
    if mask is None or mask.device != tokens.device or not is_readable(mask):
        return [_number(tokens, 0)] * 3
    ones = mask != 0  # [B, T]
    zeros_are_padding = is_one_token(tokens, ~ones) & ~is_one_token(tokens, ones)
    ones_are_padding = is_one_token(tokens, ones) & ~is_one_token(tokens, ~ones)
    keep = torch.where(ones_are_padding, ~ones, ones)
    is_clear = zeros_are_padding | ones_are_padding
    padded = (~keep).any(1) & keep.any(1) & is_clear  # [B]
    shift = 1 if counted.shape[1] < tokens.shape[1] else 0
    placed = torch.zeros_like(keep)
    placed[:, shift : shift + counted.shape[1]] = counted
    at_padding = (placed & ~keep & padded[:, None]).sum()
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    last = torch.where(keep, places, -1).amax(1, keepdim=True).clamp(min=0)  # [B, 1]
    padding = torch.where(keep, -BIG, tokens).amax()
    ends = (tokens.gather(1, last).squeeze(1) == padding) & ~placed.gather(1, last).squeeze(1) & placed.any(1) & padded
    lost = ends.sum() if shift else _number(tokens, 0)
    return [padded.sum(), at_padding, lost]


def is_one_token(tokens: Tensor, where: Tensor) -> Tensor:
    """Whether there are tokens at these places, all the same: a bool on the device."""
    return torch.where(where, tokens, -BIG).amax() == torch.where(where, tokens, BIG).amin()


def _is_any_causal(masks: Sequence[Tensor | bool], like: Tensor) -> Tensor:
    """Whether some mask treats the pair (first, last) unlike (last, first)."""
    square = [m for m in masks[:8] if isinstance(m, Tensor) and m.dim() > 1 and m.shape[-1] == m.shape[-2] > 1]
    found = [m[..., 0, -1].ne(m[..., -1, 0]).any() for m in square if is_readable(m)]
    found = [one.to(like.device, non_blocking=True) for one in found]
    return torch.stack(found).any() if found else _number(like, 0)


def _name_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a call under the names of the parameters of `forward`."""
    try:
        names = [p.name for p in inspect.signature(model.forward).parameters.values()]
    except (TypeError, ValueError):
        names = []
    for i, value in enumerate(args):
        name = names[i] if i < len(names) else str(i)
        yield from ((f"{name}.{path}", tensor) for path, tensor in find_tensors([value], {}))
    for name, value in kwargs.items():
        yield from ((f"{name}.{path}", tensor) for path, tensor in find_tensors([value], {}))


def _may_be_tokens(name: str, tensor: Tensor) -> bool:
    is_whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    has_rows = tensor.dim() == 2 and len(tensor) > 0 and tensor.shape[1] >= FEWEST_TOKENS
    return is_whole and has_rows and not any(word in name for word in NOT_TOKENS)


def _may_be_mask(name: str, tensor: Tensor) -> bool:
    return not tensor.is_complex() and (tensor.dtype is torch.bool or "mask" in name)


def _number(like: Tensor, value: int) -> Tensor:
    return torch.full((), value, dtype=torch.int64, device=like.device)
