"""The engine in plain torch, for every device, dtype and similarity: panels of logits, column tile by column tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from steadygrad.losses.multiway.engine import Panel, Side
from steadygrad.losses.multiway.precision import Precision, add_product, multiply
from steadygrad.losses.multiway.similarity import MASKED, Curve

# About the last-level cache on a CPU; on a GPU enough for full-speed matmuls, a few such tiles live at a time.
TILE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class TiledEngine:
    """See `engine.Engine`."""

    fuses = False

    def __init__(self, precision: Precision, curve: Curve, *, tile_bytes: int | None = None) -> None:
        self.precision = precision
        self._curve = curve
        self._tile_bytes = tile_bytes

    def count_rows(self, num_columns: int, depth: int, *, pull: bool) -> int:
        """Return the rows of a tile: columns are cut, whatever their number."""
        del num_columns, depth, pull
        return 4096 if self._tile_bytes is None else max(1, int((self._tile_bytes / 8) ** 0.5))

    def sum_rows(self, panel: Panel) -> Tensor:
        """See `Engine.sum_rows`."""
        parts = [self._score(panel, tile).logsumexp(1) for tile in self._cut(panel)]
        return torch.stack(parts).logsumexp(0) if len(parts) > 1 else parts[0]

    def sum_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        """See `Engine.sum_panel`."""
        sums, device = _sum_dtype(panel.p), panel.p.device
        row_sums = torch.full((len(panel.p),), MASKED, dtype=sums, device=device)
        column_sums = torch.empty(len(panel.q), dtype=sums, device=device)
        for tile in self._cut(panel):
            logits = self._score(panel, tile)
            row_sums = torch.logaddexp(row_sums, logits.logsumexp(1))
            column_sums[tile] = logits.logsumexp(0)
        return row_sums, column_sums

    def pull_panel(self, panel: Panel, rows: Side, columns: Side | None, grad_q: Tensor) -> Tensor:
        """See `Engine.pull_panel`."""
        p, q = panel.p, panel.q
        grad_p = torch.zeros(p.shape, dtype=_sum_dtype(p), device=p.device)
        for tile in self._cut(panel):
            logits = self._score(panel, tile)
            # No logit is above its peak but by rounding: the clamp keeps that rounding from overflowing.
            weights = (logits - rows.peak[:, None]).clamp_(max=0).exp_().mul_(rows.weight[:, None])
            # `logits` is read twice more: only differences from it are changed in place
            if columns is not None:
                weights += (logits - columns.peak[tile]).clamp_(max=0).exp_().mul_(columns.weight[tile])
            if self._curve.slope is not None:
                weights *= self._curve.slope(logits)
            for part in _split_weights(weights, panel):
                add_product(grad_p, part, q[tile])
                add_product(grad_q[tile], part.t(), p)
        return grad_p

    def _score(self, panel: Panel, tile: slice) -> Tensor:
        """Return logits of all rows with the tile's columns, MASKED at the positives."""
        product = _multiply_halves(panel, tile)
        logits = self._curve.value(product if panel.unit is None else product.mul_(panel.unit))
        positives = panel.positives
        width, step = logits.shape[1], positives.column_step
        first = max(0, -((positives.column - tile.start) // step))  # the first j whose column is in the tile
        last = min(positives.num, -((positives.column - tile.start - width) // step))
        if first < last:
            row, column = positives.row + first * positives.row_step, positives.column + first * step - tile.start
            stride = positives.row_step * width + step  # from one positive to the next, in memory
            logits.view(-1)[row * width + column :: stride][: last - first] = MASKED
        if panel.highest is not None:
            torch.maximum(panel.highest, logits.amax(), out=panel.highest)
        return logits

    def _cut(self, panel: Panel) -> Iterator[slice]:
        """Yield slices of q's rows."""
        p = panel.p
        tile_bytes = self._tile_bytes or TILE_BYTES.get(p.device.type, TILE_BYTES["cpu"])
        width = max(1, tile_bytes // (len(p) * _sum_dtype(p).itemsize))
        yield from (slice(start, start + width) for start in range(0, len(panel.q), width))


def _split_weights(weights: Tensor, panel: Panel) -> list[Tensor]:
    """Return them rounded as the halves are, and what that took from them if the halves keep it too."""
    rounded = weights.to(panel.p.dtype)  # in fp16 their gain has put them in range
    return [rounded, (weights - rounded).to(panel.p.dtype)] if panel.num_low else [rounded]


def _multiply_halves(panel: Panel, tile: slice) -> Tensor:
    p, q, low = panel.p, panel.q[tile], panel.num_low
    product = multiply(p[:, low:], q[:, low:].t())
    if low:
        product += multiply(p[:, :low], q[:, low : 2 * low].t())
        product += multiply(p[:, low : 2 * low], q[:, :low].t())
    return product


def _sum_dtype(half: Tensor) -> torch.dtype:
    return torch.float64 if half.dtype == torch.float64 else torch.float32
