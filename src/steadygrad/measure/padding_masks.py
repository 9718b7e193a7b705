"""The masks of attention and the tokens of the model's call -> a MaskScan: attention that sees nothing but padding.

torch's `key_padding_mask` is True at padding, most other masks are True at tokens, so one is easily passed for the
other. The tokens show it: what such a mask leaves is one repeated token at one end of each row, and what it hides is
all the rest, exactly. Said only if every mask of the forward agrees and no attention goes without one: layers for some
of the tokens (separators, a prefix, one modality) stand beside others. Reduced on the device and sent with one
asynchronous copy, in the first backwards. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad.facts.program import MaskScan
from steadygrad.measure.labels import is_one_token
from steadygrad.measure.loss_graph import HIDDEN
from steadygrad.measure.quiet_hook import QuietHook, remove_hooks
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.suspicious_ops import find_caller
from steadygrad.measure.transfer import Transfer
from steadygrad.state.hidden_hooks import hide_hooks

MOST_MASKS = 64
PLACE_OF_MASK = 3
"""Of `key_padding_mask`, among the positional arguments of `nn.MultiheadAttention`."""


class AttentionWatch:
    """Listens to torch's attention layers between `begin` and `close`, in the first steps only.

    A layer that needs its weights adds the mask in an op that saves none of it, so the graph does not show all masks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.masks: list[Tensor] = []
        """As given to the layers: bool, True where hidden, or added to the scores."""
        self.has_unmasked = False
        """Whether a layer got no mask at all."""
        self.where = ""
        self.is_on = False

    def begin(self) -> None:
        """Listen to what is called from now on."""
        if not self.is_on:
            self.masks, self.has_unmasked, self.where, self.is_on = [], False, "", True
            hear = QuietHook(self._hear, num_arguments=3)
            # A subclass with a forward of its own may take masks of another meaning.
            for layer in self._model.modules():
                if type(layer).forward is nn.MultiheadAttention.forward:
                    hide_hooks(layer)
                    self._handles.append(nn.Module.register_forward_pre_hook(layer, hear, with_kwargs=True))

    def close(self) -> None:
        """Stop listening, and keep no tensor of the step."""
        remove_hooks(self._handles)
        self.masks, self.is_on = [], False

    def _hear(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        mask = args[PLACE_OF_MASK] if len(args) > PLACE_OF_MASK else kwargs.get("key_padding_mask")
        if isinstance(mask, Tensor) and len(self.masks) < MOST_MASKS:
            self.masks.append(mask)
            self.where = self.where or find_caller()
        elif mask is None and kwargs.get("attn_mask") is None and len(args) <= PLACE_OF_MASK + 2:
            self.has_unmasked = True


class PendingMasks:
    """A scan of masks whose number is still being copied."""

    def __init__(self, rows: PendingRows, where: str) -> None:
        self._rows, self._where = rows, where

    def read(self, step: int) -> MaskScan:
        """Return the number as a scan of `step`."""
        (num,) = self._rows.read()["masks"]
        return MaskScan(step=step, num_swapped_rows=int(num), where=self._where)


@torch.no_grad()
def scan_masks(
    texts: Sequence[Tensor], masks: Sequence[Tensor], where: str = "", transfer: Transfer | None = None
) -> PendingMasks | None:
    """Queue a scan of masks, True or very low where something is hidden, and of the tokens that each of them fits.

    None if no mask fits, or one fits the tokens of two texts.
    """
    counts = []
    for mask in masks:
        fits = [one for tokens in texts if (one := _fit(tokens, mask)) is not None]
        if len(fits) > 1:
            return None
        counts += [_count_swapped(*one) for one in fits]
    if not counts:
        return None
    return PendingMasks(send_rows({"masks": torch.stack(counts).amin().double()[None]}, transfer), where)


def find_hidden(mask: Tensor) -> Tensor:
    """Return what a mask that is 1 at tokens hides; one with negative numbers is added to the scores."""
    return torch.where((mask < 0).any(), mask < HIDDEN, mask == 0)


def _fit(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return tokens and what is hidden from every other token, both [rows, tokens]; None if the sizes do not fit."""
    if not (is_readable(mask) and is_readable(tokens)) or mask.is_complex() or mask.dim() < 2:
        return None
    if mask.device != tokens.device:
        return None
    for by_row in (tokens, tokens.T):  # time may come first, but never in a mask
        rows, length = by_row.shape
        if len(mask) == rows and mask.shape[-1] == length and (mask.dim() > 2 or rows != length):
            hidden = mask if mask.dtype is torch.bool else mask < HIDDEN
            return by_row, hidden.reshape(rows, -1, length).all(1)
    return None


def _count_swapped(tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return, on the device, how many rows see their padding only; 0 unless that is what the mask does everywhere."""
    visible = ~hidden
    padding = torch.where(visible, tokens, tokens.amin()).amax()
    num_visible = visible.sum(1)
    is_end = (visible[:, 1:] >= visible[:, :-1]).all() | (visible[:, 1:] <= visible[:, :-1]).all()
    # One token of a row may be hidden and yet equal the padding: the end of the text.
    is_exact = ((hidden & (tokens == padding)).sum(1) <= 1).all()
    is_swapped = is_one_token(tokens, visible) & ~is_one_token(tokens, hidden) & is_end & is_exact
    # Lengths that are all equal may be a prefix or a suffix by design.
    is_padding = is_swapped & (num_visible.amin() < num_visible.amax())
    return torch.where(is_padding, ((num_visible > 0) & (num_visible < tokens.shape[1])).sum(), 0)
