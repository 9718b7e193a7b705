"""The engine on CUDA: each program multiplies one tile and folds it where it is made.

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
from steadygrad.losses.multiway.precision import Precision, add_product, get_dtype, multiply

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
    # Four operands a step in place of two, so half the depth
    "fp16x3": (Tiles(128, 128, 32, 4, 3), Tiles(128, 256, 32, 8, 3)),
    "tf32": (Tiles(256, 128, 32, 8, 3), Tiles(128, 256, 32, 8, 3)),
    "fp32": (Tiles(64, 64, 32, 4, 2), Tiles(64, 64, 32, 4, 2)),
}


@triton.jit
def _multiply_tile(
    p, q, unit, row, column, num_rows, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
    HAS_UNIT: tl.constexpr, PRECISION: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """unit * sum_z p[row, z] q[column, z], in fp32; rows and columns beyond the end repeat earlier ones.

    The first LOW columns are low parts of the next: they are multiplied by the other half's high parts only.
    """
    z = tl.arange(0, DEPTH)
    # int64: row * depth passes 2^31 for a large half
    left = p + (row % num_rows).to(tl.int64)[:, None] * depth + z[None, :] + LOW
    right = q + (column % num_columns).to(tl.int64)[None, :] * depth + z[:, None] + LOW
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if LOW > 0:  # the small products first
        low_left = left - LOW
        low_right = right - LOW
        for start in range(0, LOW, DEPTH):
            if LOW % DEPTH == 0:
                a_high = tl.load(low_left + LOW)
                b_high = tl.load(low_right + LOW)
                a_low = tl.load(low_left)
                b_low = tl.load(low_right)
            else:
                a_high = tl.load(low_left + LOW, mask=(start + z)[None, :] < LOW, other=0.0)
                b_high = tl.load(low_right + LOW, mask=(start + z)[:, None] < LOW, other=0.0)
                a_low = tl.load(low_left, mask=(start + z)[None, :] < LOW, other=0.0)
                b_low = tl.load(low_right, mask=(start + z)[:, None] < LOW, other=0.0)
            if WIDEN:
                a_high = a_high.to(tl.float32)
                b_high = b_high.to(tl.float32)
                a_low = a_low.to(tl.float32)
                b_low = b_low.to(tl.float32)
            total = tl.dot(a_low, b_high, total, input_precision=PRECISION)
            total = tl.dot(a_high, b_low, total, input_precision=PRECISION)
            low_left += DEPTH
            low_right += DEPTH
    for start in range(LOW, depth, DEPTH):
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
def _bend(x, CURVE: tl.constexpr):
    """Return the logit of a product, as `similarity.CURVES` has it; 2.5e-13 is its LEAST_ROOT squared."""
    if CURVE != "line":
        # Otherwise the larger of a number and NaN is the number, and a broken feature would go unseen
        root = tl.sqrt(tl.maximum(x, 2.5e-13, propagate_nan=tl.PropagateNan.ALL))
        if CURVE == "root":
            x = root + tl.minimum(x, 0.0)
        else:
            x = -root
    return x


@triton.jit
def _weigh_slope(w, x, CURVE: tl.constexpr):
    """Return w times the curve's slope where the logit is x."""
    if CURVE == "root":
        w *= 0.5 / tl.maximum(x, 5e-7)
    if CURVE == "minus root":
        w *= -0.5 / tl.maximum(-x, 5e-7)
    return w


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
    p, q, unit, row_sums, column_sums, tops, num_rows, num_columns, depth, row_tiles, column_tiles,
    first_row, row_step, first_column, column_step, num_positives,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    WIDEN: tl.constexpr, HAS_UNIT: tl.constexpr, PRECISION: tl.constexpr, LOW: tl.constexpr, CURVE: tl.constexpr,
    HAS_TOPS: tl.constexpr,
):  # fmt: skip
    """row_sums[i, t] = log sum of exp L[i, :] over the columns of tile t; column_sums[t, k] likewise over its rows."""
    tile = tl.program_id(0)
    row_tile = tile % row_tiles  # neighbours share columns: the panel's rows stay in the cache
    column_tile = tile // row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    x = _multiply_tile(
        p, q, unit, row, column, num_rows, num_columns, depth, ROWS, COLUMNS, DEPTH, EVEN, WIDEN, HAS_UNIT, PRECISION,
        LOW,
    )  # fmt: skip
    x = _bend(x, CURVE)
    if not WHOLE:
        x = tl.where((row < num_rows)[:, None] & (column < num_columns)[None, :], x, -1e30)
    x = _drop_positives(x, row, column, first_row, row_step, first_column, column_step, num_positives)
    row_top = tl.max(x, 1)
    column_top = tl.max(x, 0)
    top = tl.max(row_top, 0)
    if HAS_TOPS:
        tl.store(tops + tile, top)
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
    p, q, unit, gain, row_peak, row_weight, column_peak, column_weight, weights, num_rows, num_columns, depth,
    row_tiles, first_row, row_step, first_column, column_step, num_positives,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    WIDEN: tl.constexpr, HAS_UNIT: tl.constexpr, HAS_GAIN: tl.constexpr, PRECISION: tl.constexpr,
    LOW: tl.constexpr, CURVE: tl.constexpr,
):  # fmt: skip
    """weights[i, k] = gain * slope(L) * (exp(L - row_peak[i]) row_weight[i] + the same of column k)."""
    tile = tl.program_id(0)
    row_tile = tile % row_tiles
    column_tile = tile // row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    x = _multiply_tile(
        p, q, unit, row, column, num_rows, num_columns, depth, ROWS, COLUMNS, DEPTH, EVEN, WIDEN, HAS_UNIT, PRECISION,
        LOW,
    )  # fmt: skip
    x = _bend(x, CURVE)
    if not WHOLE:  # rows beyond the end repeat earlier ones, and there a positive would be beyond what fp16 holds
        x = tl.where((row < num_rows)[:, None] & (column < num_columns)[None, :], x, -1e30)
    x = _drop_positives(x, row, column, first_row, row_step, first_column, column_step, num_positives)
    u_peak = tl.load(row_peak + row % num_rows)
    v_peak = tl.load(column_peak + column % num_columns)
    u = tl.load(row_weight + row % num_rows)
    v = tl.load(column_weight + column % num_columns)
    if HAS_GAIN:
        u *= tl.load(gain)
        v *= tl.load(gain)
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
    w = _weigh_slope(w, x, CURVE)
    at = weights + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    rounded = w.to(weights.dtype.element_ty)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    if WHOLE:
        tl.store(at, rounded)
    else:
        tl.store(at, rounded, mask=inside)
    if LOW > 0:  # what rounding took from them, in a second panel
        low = (w - rounded.to(tl.float32)).to(weights.dtype.element_ty)
        tl.store(at + num_rows.to(tl.int64) * num_columns, low, mask=inside)


@triton.jit(do_not_specialize=["num_parts"])
def _fold_parts(
    parts, into, num, num_parts, item_step, part_step,
    ADD: tl.constexpr, ITEMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """into[i] = log sum_t exp parts[i, t], in fixed order; with ADD its earlier value is one more part."""
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    # -1e30 is `similarity.MASKED`
    top = tl.full([ITEMS], -1e30, tl.float32)
    total = tl.zeros([ITEMS], tl.float32)
    if ADD:
        top = tl.load(into + item, mask=item < num, other=-1e30)
        total += 1.0
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (item < num)[:, None] & (part < num_parts)[None, :]
        at = item[:, None] * item_step + part.to(tl.int64)[None, :] * part_step
        x = tl.load(parts + at, mask=inside, other=-1e30)
        new = tl.maximum(top, tl.max(x, 1))
        e = tl.where((part < num_parts)[None, :], tl.exp2((x - new[:, None]) * 1.4426950408889634), 0.0)
        total = total * tl.exp2((top - new) * 1.4426950408889634) + tl.sum(e, 1)
        top = new
    tl.store(into + item, top + tl.log2(total) * 0.6931471805599453, mask=item < num)


def fold_parts(parts: Tensor, dim: int, into: Tensor, *, add: bool = False) -> Tensor:
    """Return `into`, with the log-sum-exp of a matrix along `dim`; with `add` of its earlier values too.

    One launch where torch.logsumexp takes nine.
    """
    num, num_parts = len(into), parts.shape[dim]
    items = 32 if num < 1 << 14 else 128  # enough programs at small batches, few at large
    _fold_parts[(triton.cdiv(num, items),)](
        parts, into, num, num_parts, parts.stride(1 - dim), parts.stride(dim),
        ADD=add, ITEMS=items, PARTS=min(32, triton.next_power_of_2(num_parts)),
    )  # fmt: skip
    return into


class TritonEngine:
    """See `engine.Engine`; `tiles` other than the defaults are for measuring and for tests."""

    fuses = True

    def __init__(self, precision: Precision, tiles: Tiles | None = None, *, curve: str = "line") -> None:
        self.precision = precision
        self._curve = curve
        self._sum_tiles, self._weigh_tiles = (tiles, tiles) if tiles else DEFAULT_TILES[precision]
        self._input_precision = "tf32" if precision == "tf32" else "ieee"

    def count_rows(self, num_columns: int, depth: int, *, pull: bool) -> int:
        """As many as keep the panel of weights within PANEL_BYTES, in whole tiles; without weights PANEL_ROWS."""
        if not pull:
            return PANEL_ROWS
        least, most = PANEL_BYTES
        size = 4 if self.precision == "fp16x3" else get_dtype(self.precision).itemsize  # two panels of 2 bytes
        allowed = min(most, max(least, 8 * num_columns * depth))
        rows = self._weigh_tiles.rows
        return max(1, allowed // (num_columns * size) // rows) * rows

    def sum_rows(self, panel: Panel) -> Tensor:
        """See `Engine.sum_rows`; the columns' sums cost next to nothing here, and are not folded."""
        row_sums, _ = self.sum_by_tile(panel)
        return fold_parts(row_sums, 1, row_sums.new_empty(len(panel.p)))

    def sum_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        """See `Engine.sum_panel`."""
        row_sums, column_sums = self.sum_by_tile(panel)
        rows, columns = row_sums.new_empty(len(panel.p)), row_sums.new_empty(len(panel.q))
        return fold_parts(row_sums, 1, rows), fold_parts(column_sums, 0, columns)

    def sum_by_tile(self, panel: Panel) -> tuple[Tensor, Tensor]:
        """Return [rows, column tiles] and [row tiles, columns]."""
        p, q = panel.p, panel.q
        row_tiles, column_tiles = _count_tiles(self._sum_tiles, panel)
        row_sums = torch.empty(len(p), column_tiles, dtype=torch.float32, device=p.device)
        column_sums = torch.empty(row_tiles, len(q), dtype=torch.float32, device=p.device)
        tops = None if panel.highest is None else row_sums.new_empty(row_tiles * column_tiles)
        _sum_tiles[(row_tiles * column_tiles,)](
            p, q, panel.unit, row_sums, column_sums, tops, len(p), len(q), p.shape[1], row_tiles, column_tiles,
            *astuple(panel.positives), HAS_TOPS=tops is not None, **self._options(self._sum_tiles, panel),
        )  # fmt: skip
        if tops is not None and panel.highest is not None:
            torch.maximum(panel.highest, tops.amax(), out=panel.highest)
        return row_sums, column_sums

    def pull_panel(self, panel: Panel, rows: Side, columns: Side | None, grad_q: Tensor) -> Tensor:
        """See `Engine.pull_panel`."""
        q = panel.q
        if columns is None:  # any bound of the logits will do as a peak that has no weight
            columns = Side(rows.peak.max().expand(len(q)).contiguous(), torch.zeros_like(q[:, 0], dtype=torch.float32))
        return self.pull_both(panel, rows, columns, grad_q)[0]

    def pull_both(
        self, panel: Panel, rows: Side, columns: Side, grad_q: Tensor | None, *, gain: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return grad_p, and grad_q with what it held before, if anything; `gain` multiplies the weights."""
        p, q = panel.p, panel.q
        num_parts = 2 if panel.num_low else 1
        weights = torch.empty(num_parts, len(p), len(q), dtype=p.dtype, device=p.device)  # about PANEL_BYTES
        self.weigh_panel(panel, rows, columns, weights, gain=gain)
        if grad_q is None:
            grad_q = multiply(weights[0].t(), p)
        else:
            add_product(grad_q, weights[0].t(), p)
        grad_p = multiply(weights[0], q)
        # Of the low weights the halves' low parts are not needed, but a product into part of a row is not faster
        for low in weights[1:]:
            add_product(grad_q, low.t(), p)
            add_product(grad_p, low, q)
        return grad_p, grad_q

    def weigh_panel(
        self, panel: Panel, rows: Side, columns: Side, weights: Tensor, *, gain: Tensor | None = None
    ) -> None:
        """Write dLoss/dL of the panel, times `gain`, into `weights` [1, rows, columns]; with low parts [2, ...]."""
        p, q = panel.p, panel.q
        row_tiles, column_tiles = _count_tiles(self._weigh_tiles, panel)
        _weigh_tiles[(row_tiles * column_tiles,)](
            p, q, panel.unit, gain, rows.peak, rows.weight, columns.peak, columns.weight, weights, len(p), len(q),
            p.shape[1], row_tiles, *astuple(panel.positives), HAS_GAIN=gain is not None,
            **self._options(self._weigh_tiles, panel),
        )  # fmt: skip

    def _options(self, tiles: Tiles, panel: Panel) -> dict[str, int | bool | str]:
        p, q = panel.p, panel.q
        return {
            "ROWS": tiles.rows,
            "COLUMNS": tiles.columns,
            "DEPTH": tiles.depth,
            "EVEN": (p.shape[1] - panel.num_low) % tiles.depth == 0,
            "WHOLE": len(p) % tiles.rows == 0 and len(q) % tiles.columns == 0,
            "WIDEN": not p.is_cuda,
            "HAS_UNIT": panel.unit is not None,
            "PRECISION": self._input_precision,
            "LOW": panel.num_low,
            "CURVE": self._curve,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def _count_tiles(tiles: Tiles, panel: Panel) -> tuple[int, int]:
    return triton.cdiv(len(panel.p), tiles.rows), triton.cdiv(len(panel.q), tiles.columns)
