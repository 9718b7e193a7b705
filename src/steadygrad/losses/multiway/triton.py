"""The engine on CUDA for the product of vectors: each program multiplies one tile and folds it where it is made.

Forward: a tile's row and column log-sum-exps leave the chip, 1/64 of the tile or less; they are folded afterwards in
fixed order. Backward: the tile's weights dLoss/dL leave it once, as a panel of a few hundred MiB, and two cuBLAS
products turn the panel into the gradients of both halves. No atomics: the result is the same in every run.

One exponential an element serves rows and columns, relative to the tile's largest logit. In a tile where a row or
column is too far below that (e^-40), each has its own maximum. Floor: 4 x 2 D B^M operations.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.losses.multiway.engine import Panel, Side
from steadygrad.losses.multiway.precision import Precision, add_product, multiply

PANEL_BYTES = (512 << 20, 1 << 30)  # of weights; least, most; between them as much as the columns' half takes twice
PANEL_ROWS = 32768  # where no weights are kept
# They change from panel to panel, and a kernel for each kind of number would be compiled.
UNSPECIALIZED = [
    "num_rows", "row_tiles", "column_tiles", "first_row", "row_step", "first_column", "column_step", "num_positives",
]  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """How one program's share is cut: rows x columns of logits, `depth` of the features at a time."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3


# The fastest of those that `benchmarks/multiway.py --tune` tries, on an H200: of the sums, and of the weights.
DEFAULT_TILES: dict[Precision, tuple[Tiles, Tiles]] = {
    "bf16": (Tiles(128, 128, 64, 4, 3), Tiles(128, 256, 64, 8, 3)),
    "fp16": (Tiles(128, 128, 64, 4, 3), Tiles(128, 256, 64, 8, 3)),
    "tf32": (Tiles(256, 128, 32, 8, 3), Tiles(128, 256, 32, 8, 3)),
    "fp32": (Tiles(64, 64, 32, 4, 2), Tiles(64, 64, 32, 4, 2)),
}


@triton.jit
def _multiply_tile(
    p, q, unit, row, column, num_rows, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
    HAS_UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """unit * sum_z p[row, z] q[column, z], in fp32; rows and columns beyond the end repeat earlier ones."""
    z = tl.arange(0, DEPTH)
    # int64: row * depth passes 2^31 for a large half
    left = p + (row % num_rows).to(tl.int64)[:, None] * depth + z[None, :]
    right = q + (column % num_columns).to(tl.int64)[None, :] * depth + z[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        if EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=(start + z)[None, :] < depth, other=0.0)
            b = tl.load(right, mask=(start + z)[:, None] < depth, other=0.0)
        if WIDEN:  # the interpreter multiplies bf16 as if it were integers
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += DEPTH
        right += DEPTH
    if HAS_UNIT:
        total *= tl.load(unit)
    return total


@triton.jit
def _drop_positives(x, row, column, first_row, row_step, first_column, column_step, num):
    """x with -1e30 where row and column are those of one and the same positive; most tiles have none."""
    row_number = (row - first_row) // row_step
    ours = (row >= first_row) & (row_number < num) & (row_number * row_step == row - first_row)
    row_number = tl.where(ours, row_number, -1)
    column_number = (column - first_column) // column_step
    theirs = (column >= first_column) & (column_number < num) & (column_number * column_step == column - first_column)
    # -1 and -2 differ, so that a row and a column without a positive do not match below
    column_number = tl.where(theirs, column_number, -2)
    if (tl.max(row_number, 0) >= 0) & (tl.max(column_number, 0) >= 0):
        # -1e30 is `similarity.MASKED`: a kernel reads no Python global
        x = tl.where(row_number[:, None] == column_number[None, :], -1e30, x)
    return x


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _sum_tiles(
    p, q, unit, row_sums, column_sums, num_rows, num_columns, depth, row_tiles, column_tiles,
    first_row, row_step, first_column, column_step, num_positives,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    WIDEN: tl.constexpr, HAS_UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """row_sums[i, t] = log sum of exp L[i, :] over the columns of tile t; column_sums[t, k] likewise over its rows."""
    tile = tl.program_id(0)
    row_tile = tile % row_tiles  # neighbours share columns: the panel's rows stay in the cache
    column_tile = tile // row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    x = _multiply_tile(
        p, q, unit, row, column, num_rows, num_columns, depth, ROWS, COLUMNS, DEPTH, EVEN, WIDEN, HAS_UNIT, PRECISION
    )  # fmt: skip
    if not WHOLE:
        x = tl.where((row < num_rows)[:, None] & (column < num_columns)[None, :], x, -1e30)
    x = _drop_positives(x, row, column, first_row, row_step, first_column, column_step, num_positives)
    row_top = tl.max(x, 1)
    column_top = tl.max(x, 0)
    top = tl.max(row_top, 0)
    # Without rows and columns beyond the end: at -1e30 they would always force the slower branch
    low = tl.minimum(
        tl.min(tl.where(row < num_rows, row_top, top), 0), tl.min(tl.where(column < num_columns, column_top, top), 0)
    )  # fmt: skip
    # Decided before the exponentials, so that the logits need not be kept beside them: registers are full.
    if top - low < 40.0:
        # log2(e), and ln(2) below: exp2 and log2 are what the hardware has
        e = tl.exp2(x * 1.4426950408889634 - top * 1.4426950408889634)
        row_log = top + tl.log2(tl.maximum(tl.sum(e, 1), 1e-37)) * 0.6931471805599453
        column_log = top + tl.log2(tl.maximum(tl.sum(e, 0), 1e-37)) * 0.6931471805599453
    else:
        row_log = (
            row_top + tl.log2(tl.sum(tl.exp2((x - row_top[:, None]) * 1.4426950408889634), 1)) * 0.6931471805599453
        )
        by_column = tl.sum(tl.exp2((x - column_top[None, :]) * 1.4426950408889634), 0)
        column_log = column_top + tl.log2(by_column) * 0.6931471805599453
    tl.store(row_sums + row.to(tl.int64) * column_tiles + column_tile, row_log, mask=row < num_rows)
    at = row_tile.to(tl.int64) * num_columns + column
    tl.store(column_sums + at, column_log, mask=column < num_columns)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _weigh_tiles(
    p, q, unit, row_peak, row_weight, column_peak, column_weight, weights, num_rows, num_columns, depth,
    row_tiles, first_row, row_step, first_column, column_step, num_positives,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    WIDEN: tl.constexpr, HAS_UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """weights[i, k] = exp(L - row_peak[i]) row_weight[i] + exp(L - column_peak[k]) column_weight[k]."""
    tile = tl.program_id(0)
    row_tile = tile % row_tiles
    column_tile = tile // row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    x = _multiply_tile(
        p, q, unit, row, column, num_rows, num_columns, depth, ROWS, COLUMNS, DEPTH, EVEN, WIDEN, HAS_UNIT, PRECISION
    )  # fmt: skip
    x = _drop_positives(x, row, column, first_row, row_step, first_column, column_step, num_positives)
    u_peak = tl.load(row_peak + row % num_rows)
    v_peak = tl.load(column_peak + column % num_columns)
    u = tl.load(row_weight + row % num_rows)
    v = tl.load(column_weight + column % num_columns)
    low = tl.minimum(tl.min(u_peak, 0), tl.min(v_peak, 0))
    high = tl.maximum(tl.max(u_peak, 0), tl.max(v_peak, 0))
    middle = (low + high) * 0.5
    # Peaks within e^40 of each other: one exponential around their middle does for both sides. Beyond 1e6 rounding may
    # put a logit well above its peak, and each side is clamped.
    if (high - low < 40.0) & (tl.abs(middle) < 1e6):
        left = u * tl.exp2((middle - u_peak) * 1.4426950408889634)
        right = v * tl.exp2((middle - v_peak) * 1.4426950408889634)
        w = tl.exp2(x * 1.4426950408889634 - middle * 1.4426950408889634) * (left[:, None] + right[None, :])
    else:
        w = tl.exp2(tl.minimum(x - u_peak[:, None], 0.0) * 1.4426950408889634) * u[:, None]
        w += tl.exp2(tl.minimum(x - v_peak[None, :], 0.0) * 1.4426950408889634) * v[None, :]
    at = weights + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    if WHOLE:
        tl.store(at, w.to(weights.dtype.element_ty))
    else:
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        tl.store(at, w.to(weights.dtype.element_ty), mask=inside)


class TritonEngine:
    """See `engine.Engine`; `tiles` other than the defaults are for measuring and for tests."""

    def __init__(self, precision: Precision, tiles: Tiles | None = None) -> None:
        self.precision = precision
        self._sum_tiles, self._weigh_tiles = (tiles, tiles) if tiles else DEFAULT_TILES[precision]
        self._input_precision = "tf32" if precision == "tf32" else "ieee"

    def count_rows(self, num_columns: int, depth: int, *, pull: bool) -> int:
        """As many as keep the panel of weights within PANEL_BYTES, in whole tiles; without weights PANEL_ROWS."""
        if not pull:
            return PANEL_ROWS
        least, most = PANEL_BYTES
        size = 2 if self.precision in ("fp16", "bf16") else 4
        allowed = min(most, max(least, 8 * num_columns * depth))
        rows = self._weigh_tiles.rows
        return max(1, allowed // (num_columns * size) // rows) * rows

    def sum_rows(self, panel: Panel) -> Tensor:
        """See `Engine.sum_rows`; the columns' sums cost next to nothing here, and are not folded."""
        return self._sum_by_tile(panel)[0].logsumexp(1)

    def sum_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        """See `Engine.sum_panel`."""
        row_sums, column_sums = self._sum_by_tile(panel)
        return row_sums.logsumexp(1), column_sums.logsumexp(0)

    def _sum_by_tile(self, panel: Panel) -> tuple[Tensor, Tensor]:
        """Return [rows, column tiles] and [row tiles, columns]."""
        p, q = panel.p, panel.q
        row_tiles, column_tiles = _count_tiles(self._sum_tiles, panel)
        row_sums = torch.empty(len(p), column_tiles, dtype=torch.float32, device=p.device)
        column_sums = torch.empty(row_tiles, len(q), dtype=torch.float32, device=p.device)
        _sum_tiles[(row_tiles * column_tiles,)](
            p, q, panel.unit, row_sums, column_sums, len(p), len(q), p.shape[1], row_tiles, column_tiles,
            *astuple(panel.positives), **self._options(self._sum_tiles, panel),
        )  # fmt: skip
        return row_sums, column_sums

    def pull_panel(self, panel: Panel, rows: Side, columns: Side | None, grad_q: Tensor) -> Tensor:
        """See `Engine.pull_panel`."""
        p, q = panel.p, panel.q
        if columns is None:  # any bound of the logits will do as a peak that has no weight
            columns = Side(rows.peak.max().expand(len(q)).contiguous(), torch.zeros_like(q[:, 0], dtype=torch.float32))
        weights = torch.empty(len(p), len(q), dtype=p.dtype, device=p.device)  # about PANEL_BYTES
        self.weigh_panel(panel, rows, columns, weights)
        add_product(grad_q, weights.t(), p)
        return multiply(weights, q)

    def weigh_panel(self, panel: Panel, rows: Side, columns: Side, weights: Tensor) -> None:
        """Write dLoss/dL of the panel into `weights`."""
        p, q = panel.p, panel.q
        row_tiles, column_tiles = _count_tiles(self._weigh_tiles, panel)
        _weigh_tiles[(row_tiles * column_tiles,)](
            p, q, panel.unit, rows.peak, rows.weight, columns.peak, columns.weight, weights, len(p), len(q), p.shape[1],
            row_tiles, *astuple(panel.positives), **self._options(self._weigh_tiles, panel),
        )  # fmt: skip

    def _options(self, tiles: Tiles, panel: Panel) -> dict[str, int | bool | str]:
        p, q = panel.p, panel.q
        return {
            "ROWS": tiles.rows,
            "COLUMNS": tiles.columns,
            "DEPTH": tiles.depth,
            "EVEN": p.shape[1] % tiles.depth == 0,
            "WHOLE": len(p) % tiles.rows == 0 and len(q) % tiles.columns == 0,
            "WIDEN": not p.is_cuda,
            "HAS_UNIT": panel.unit is not None,
            "PRECISION": self._input_precision,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def _count_tiles(tiles: Tiles, panel: Panel) -> tuple[int, int]:
    return triton.cdiv(len(panel.p), tiles.rows), triton.cdiv(len(panel.q), tiles.columns)
