"""Meter: the gradients of a list of parameters -> one packed vector of numbers on the device.

The vector is a header (loss, global norm, counts, bad-step flag, clip coefficient, loss scale) and a row of
`GradientStats` for each parameter that has a gradient. Nothing is read back here: on CUDA two kernel launches fill
it, and `found` can go straight into a fused optimizer. Reads only.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.config import Implementation
from steadygrad.errors import ConfigError, UsageError
from steadygrad.facts import NUM_COLUMNS
from steadygrad.measure import gradients as _gradients
from steadygrad.measure.kernels import foreach, reference
from steadygrad.measure.measurement import (
    COEFFICIENT,
    FOUND,
    KIND,
    LOSS,
    LOSS_SCALE,
    NORM,
    NUM_NAN,
    NUM_NONFINITE,
    Measurement,
    Plan,
)
from steadygrad.measure.ranks import NO_GRADIENTS, FromRanks, Ranks
from steadygrad.state.shards import Fragment

MAX_PLANS = 64
"""Most patterns of present gradients whose tables are kept."""
MIN_TRITON = (3, 6)
"""Oldest Triton version that the kernels were run with; with older ones the foreach implementation is used."""
_gradient = operator.attrgetter("grad")
_address = Tensor.data_ptr
_size = Tensor.numel
_kind = operator.attrgetter("__class__", "dtype", "device", "layout")


class Meter:
    """Measures the gradients of `named` parameters with the requested implementation.

    With `max_norm`, the coefficient for clipping at that constant norm is computed along the way. With `ranks`, the
    numbers are those of all ranks together, the same on each; every rank must then measure at the same point.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        implementation: Implementation = Implementation.AUTO,
        *,
        max_norm: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._implementation = _choose(implementation, self._parameters)
        self.max_norm = max_norm
        self._ranks, self._shards_allowed = ranks or Ranks(), ranks is not None
        self._plans: dict[bytes, Plan] = {}
        self._last: Plan | None = None
        self._memory: Tensor | None = None

    @property
    def implementation(self) -> Implementation:
        """The implementation in use."""
        return self._implementation

    @torch.no_grad()
    def compile(self) -> None:
        """Compile or load the kernels now, which takes 0.1 to 3 s, so that the first step does not wait for them.

        The parameters stand in for their gradients: kernels depend on sizes and dtypes.
        """
        if self._implementation is not Implementation.TRITON or any(map(_gradients.is_dtensor, self._parameters)):
            return
        from steadygrad.measure.kernels import triton

        values = [p.detach() for p in self._parameters]
        # All or nothing, as in _prepare_triton: a single odd gradient sends all of them the general way.
        if all(v.dtype in triton.TRITON_DTYPES and v.is_contiguous() and v.device == values[0].device for v in values):
            triton.compile_for(values)

    def measure(
        self, loss: Tensor | None = None, *, scale: Tensor | None = None, told_scale: Tensor | None = None
    ) -> Measurement | None:
        """Measure all gradients; return None if no parameter has one.

        `scale` is the loss scale that they still carry, `told_scale` the one to record. Where ranks exchange tables,
        one without gradients takes part with a measurement without rows: see `check_gradients`.
        """
        last = self._last
        may_be_short = scale is None and not self._ranks.many and self._implementation is Implementation.FOREACH
        # Not where one was absent: it may have a gradient by now, which the last plan would not show.
        if may_be_short and told_scale is None and last is not None and last.is_short and not last.absent:
            m = self._measure_on_host(last, loss)
            if m is not None:
                return m
        return self._measure_any_size(loss, scale, told_scale, may_be_short=may_be_short)

    @torch.no_grad()
    def _measure_any_size(
        self, loss: Tensor | None, scale: Tensor | None, told_scale: Tensor | None, *, may_be_short: bool
    ) -> Measurement | None:
        plan, addresses = self._find_plan()
        if plan is None and not self._ranks.shares_tables:
            return None
        if plan is None:
            m = self._measure_nothing(has_loss=loss is not None)
        else:
            short = self._measure_on_host(plan, loss) if may_be_short and plan.is_short else None
            m = short or self._measure(plan, addresses, self._ranks.spread(loss), scale, has_loss=loss is not None)
        if self._ranks.many:
            self._join_ranks(m, loss)
        if told_scale is not None:
            m.packed[LOSS_SCALE] = told_scale.to(m.packed.device)
        return m

    def _measure_on_host(self, plan: Plan, loss: Tensor | None) -> Measurement | None:
        """Measure gradients in host memory the short way; return None for those that need the long one.

        What came before must not matter: the long way differs in the last bit, and a resumed run has no step before.
        """
        grads = _take_plain(plan)
        if grads is None:
            return None
        cells = self._measure_together(plan, [grads[i] for i in plan.together] if plan.apart else grads)
        if cells is None:
            return None
        if plan.apart:
            cells = _measure_apart(plan, grads, cells)
        # 1.0 stands for no loss: finite, so that it never makes a step bad. `has_loss` keeps it out of the Reading.
        header = _make_header(cells, 1.0 if loss is None else loss.item(), self.max_norm)
        return Measurement(plan=plan, has_loss=loss is not None, numbers=[*header, *cells])

    def _measure_together(self, plan: Plan, grads: Sequence[Tensor]) -> list[float] | None:
        """Return the cells of the small gradients; None if some number is not ordinary."""
        layout = plan.end_to_end
        if layout is None:
            if not grads:
                return []
            memory = self._take_memory(sum(plan.numels[i] for i in plan.together))
            layout = plan.end_to_end = foreach.EndToEnd([plan.shapes[i] for i in plan.together], memory)
        return foreach.measure_together(grads, layout)

    def _take_memory(self, numel: int) -> Tensor:
        """Return fp32 memory that the plans share: only one is in use at a time."""
        if self._memory is None or self._memory.numel() < numel:
            self._memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._memory[:numel]

    def _measure(
        self, plan: Plan, addresses: list[int], loss: Tensor | None, scale: Tensor | None, *, has_loss: bool
    ) -> Measurement:
        m = Measurement(
            # Not zeroed: every implementation writes every cell, except for the one that pads the header.
            packed=torch.empty(plan.length, dtype=torch.float64, device=plan.device),
            flags=torch.empty(2, device=plan.device),
            plan=plan,
            has_loss=has_loss,
        )
        loss = None if loss is None else loss.detach().to(plan.device)
        inverse = None if scale is None else scale.to(plan.device).double().reciprocal()
        if plan.triton is not None:
            limit = self.max_norm or 0.0
            plan.triton.measure(
                addresses, loss=loss, inverse_scale=inverse, packed=m.packed, flags=m.flags, max_norm=limit
            )
        else:
            self._measure_any(m, loss, inverse)
        return m

    def _measure_nothing(self, *, has_loss: bool) -> Measurement:
        """Return a measurement without rows, for the exchange with ranks that have some."""
        plan = Plan((), (), self._parameters[0].device)
        packed = torch.zeros(plan.length, dtype=torch.float64, device=plan.device)
        return Measurement(packed=packed, flags=torch.zeros(2, device=plan.device), plan=plan, has_loss=has_loss)

    def _join_ranks(self, m: Measurement, own_loss: Tensor | None) -> None:
        """Make this the measurement of all ranks, and append the values that they exchanged."""
        # share() is a collective: every rank must come here at the same point.
        if self._ranks.shares_tables:
            cut = [p if isinstance(p, Fragment) else p.grad for p in m.parameters if p.grad is not None]
            table, loss = self._ranks.share(m.table, m.names, cut, own_loss)
            _summarise(m, table, loss, self.max_norm)
        said = self._ranks.take_said()
        assert said is not None
        m.packed = torch.cat([m.packed, said.to(m.packed.device)])

    def read_from_ranks(self, m: Measurement, numbers: Sequence[float]) -> FromRanks:
        """Return the values that the ranks exchanged, from the numbers of `m` on the host."""
        return self._ranks.read(numbers[m.plan.length :], has_loss=m.has_loss)

    def lacks_gradients(self, numbers: Sequence[float]) -> bool:
        """Return whether a rank had no gradients; the same on all ranks that exchange tables."""
        return numbers[NUM_NONFINITE] >= NO_GRADIENTS

    def check_gradients(self, m: Measurement, numbers: Sequence[float]) -> None:
        """Raise an error on every rank if one had no gradients; `numbers` are those of `m` on the host.

        Not when the gradients are measured: only the rank itself knows then, and the others would wait for it later.
        """
        if self.lacks_gradients(numbers):
            bare = [self._ranks.name(rank) for rank, has in enumerate(self._ranks.gather(bool(m.names))) if not has]
            raise UsageError(
                f"no parameter of the optimizer has a gradient on {', '.join(bare)}. Run backward before guard.step() "
                "on every rank, clear gradients after the step and not before it, and check that the loss depends on "
                "the model's parameters there."
            )

    def _find_plan(self) -> tuple[Plan | None, list[int]]:
        """Return the plan for the present gradients and, on the fast path, their addresses."""
        last = self._last
        # Only while all have gradients: one that gets its first gradient now would not show among these addresses.
        if last is not None and last.triton is not None and len(last.parameters) == len(self._parameters):
            try:  # most likely the same gradients at the same addresses as before: two quick passes over the list
                grads = list(map(_gradient, last.parameters))
                addresses = list(map(_address, grads))
                # Sizes too: the allocator gives a gradient that shrank (`p.data = ...`) the same memory again, and the
                # kernels would write beyond its end.
                if list(map(_size, grads)) == last.sizes and (
                    addresses == last.addresses or _are_alike(grads, last.kinds)
                ):
                    last.addresses = addresses
                    return last, addresses
            except (TypeError, RuntimeError, NotImplementedError):
                pass  # one is missing, or sparse
        return self._look_again()

    def _look_again(self) -> tuple[Plan | None, list[int]]:
        grads = [p.grad for p in self._parameters]
        present = bytes([g is not None for g in grads])
        there = [g for g in grads if g is not None]
        if not there:
            return None, []
        plan = self._plans.get(present)
        sizes = list(map(_size, there))
        if plan is None or plan.device != there[0].device or plan.sizes != sizes:
            if len(self._plans) >= MAX_PLANS:  # experts that come and go make ever new patterns
                self._plans.clear()
            names = [name for name, yes in zip(self._names, present) if yes]
            plan = Plan(names, [p for p, yes in zip(self._parameters, present) if yes], there[0].device)
            plan.absent = [(n, p) for n, p, yes in zip(self._names, self._parameters, present) if not yes]
            plan.sizes = sizes
            self._plans[present] = plan
        self._last = plan
        if self._implementation is Implementation.TRITON:
            _prepare_triton(plan, there)
        return plan, plan.addresses

    def _measure_any(self, m: Measurement, loss: Tensor | None, inverse: Tensor | None) -> None:
        """Measure any mix of devices, dtypes and layouts: a table for each device, gathered on the first one."""
        grads, table = [p.grad for p in m.parameters if p.grad is not None], m.table
        dense = [_gradients.as_dense(g, name, sharded=self._shards_allowed) for g, name in zip(grads, m.names)]
        # Numbers in host memory are read with `.item()`; on a device that would wait for each of them.
        if self._implementation is Implementation.FOREACH and all(values.device.type == "cpu" for values in dense):
            _measure_one_by_one(m, grads, dense, loss, inverse, self.max_norm)
            return
        by_device: dict[torch.device, list[int]] = {}
        for i, values in enumerate(dense):
            by_device.setdefault(values.device, []).append(i)
        kernel = reference if self._implementation is Implementation.REFERENCE else foreach
        for device, rows in by_device.items():
            part = torch.empty(len(rows), NUM_COLUMNS, dtype=torch.float64, device=device)
            kernel.measure_table([dense[i] for i in rows], part)
            if len(by_device) == 1:
                table.copy_(part)
            else:
                for row, numbers in zip(rows, part.to(table.device)):
                    table[row] = numbers
        for i, (gradient, values) in enumerate(zip(grads, dense)):
            implicit = _gradients.count_implicit_zeros(gradient, values)
            if implicit:
                table[i, NUM_COLUMNS - 1] += implicit
        if inverse is not None:
            table[:, :2] *= inverse  # norm and max_abs; the others are counts
        _summarise(m, table, loss, self.max_norm)


def _measure_apart(plan: Plan, grads: Sequence[Tensor], cells: Sequence[float]) -> list[float]:
    """Measure the large gradients one by one; return their cells and those of the small ones, in order."""
    rows: list[Sequence[float]] = [()] * len(grads)
    for at, i in enumerate(plan.together):
        rows[i] = cells[at * NUM_COLUMNS : (at + 1) * NUM_COLUMNS]
    # What backward wrote last, the first layers', is read last: the optimizer begins there, and finds it in the cache.
    for i in reversed(plan.apart):
        rows[i] = foreach.measure_on_host(grads[i])
    return list(itertools.chain.from_iterable(rows))


def _take_plain(plan: Plan) -> list[Tensor] | None:
    """Return the gradients as the short way needs them; None if it cannot measure them."""
    grads = [gradient for parameter in plan.parameters if (gradient := parameter.grad) is not None]
    kinds = list(map(KIND, grads))
    if kinds == plan.host_kinds:
        return grads
    if len(grads) != len(plan.parameters):
        return None
    for gradient, kind, wanted in zip(grads, kinds, plan.host_kinds):
        # Of another size, the plan is out of date.
        if kind[:4] != wanted[:4] or gradient.numel() != wanted[-1].numel():
            return None
    return [gradient.detach().reshape(shape) for gradient, shape in zip(grads, plan.shapes)]


def _measure_one_by_one(
    m: Measurement,
    grads: Sequence[Tensor],
    dense: Sequence[Tensor],
    loss: Tensor | None,
    inverse: Tensor | None,
    max_norm: float | None,
) -> None:
    """Measure gradients in host memory: plain arithmetic and one tensor at the end save fifteen tiny tensor ops."""
    unscale = 1.0 if inverse is None else float(inverse)
    cells: list[float] = []
    for gradient, values in zip(grads, dense):
        norm, max_abs, num_nonfinite, num_nan, num_zeros = foreach.measure_on_host(values)
        implicit = _gradients.count_implicit_zeros(gradient, values)
        cells += (norm * unscale, max_abs * unscale, num_nonfinite, num_nan, num_zeros + implicit)
    header = _make_header(cells, 1.0 if loss is None else float(loss), max_norm)
    m.packed = torch.tensor([*header, *cells], dtype=torch.float64, device="cpu")
    # An infinite divisor where the coefficient is 0, as in Measurement.flags.
    m.flags[0], m.flags[1] = header[FOUND], 1.0 / header[COEFFICIENT] if header[COEFFICIENT] else math.inf


def _make_header(cells: Sequence[float], loss: float, max_norm: float | None) -> tuple[float, ...]:
    """Return the numbers before the rows."""
    # hypot scales its arguments: squares of large norms do not overflow.
    norm = math.hypot(*cells[::NUM_COLUMNS])
    num_nonfinite, num_nan = sum(cells[2::NUM_COLUMNS]), sum(cells[3::NUM_COLUMNS])
    bad = float(num_nonfinite > 0 or not math.isfinite(loss))
    # 1e-6 as in torch's clip_grad_norm_, so that both clip alike.
    coefficient = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return loss, norm, num_nonfinite, num_nan, bad, coefficient, 0.0, 0.0


def _prepare_triton(plan: Plan, grads: list[Tensor]) -> None:
    """Check dtypes and layouts again after a gradient moved. Plain ones get a plan, others the general path."""
    from steadygrad.measure.kernels import triton

    plain = all(
        not _gradients.is_dtensor(g)
        and g.layout is torch.strided
        and g.device == plan.device
        and g.dtype in triton.TRITON_DTYPES
        and g.is_contiguous()
        for g in grads
    )
    plan.addresses = [g.data_ptr() for g in grads] if plain else []
    plan.kinds = list(map(_kind, grads)) if plain else []
    dtypes = [g.dtype for g in grads] if plain else []
    # Not for new addresses, which are sent at each step: building a plan sends several tables to the device.
    if dtypes != plan.dtypes:
        plan.dtypes, plan.is_single_precision = dtypes, all(dtype is torch.float32 for dtype in dtypes)
        plan.triton = triton.Plan(grads) if plain else None


def _are_alike(grads: list[Tensor], kinds: list[object]) -> bool:
    """Whether gradients at new addresses, as in most eager steps, are what the kernels were made for."""
    return list(map(_kind, grads)) == kinds and all(map(Tensor.is_contiguous, grads))


def _summarise(m: Measurement, table: Tensor, loss: Tensor | None, max_norm: float | None) -> None:
    """Fill the header and the flags from the rows of all parameters and the loss."""
    packed = m.packed
    counts = table[:, 2:4].sum(0)
    value = packed.new_ones(()) if loss is None else loss.double()
    bad = (counts[0] > 0) | ~value.isfinite()
    norm = torch.linalg.vector_norm(table[:, 0])
    packed[LOSS], packed[NORM] = value, norm
    packed[NUM_NONFINITE : NUM_NAN + 1] = counts
    packed[FOUND] = bad
    packed[LOSS_SCALE] = 0.0  # until the caller writes it
    m.flags[0] = bad
    # 1e-6 as in torch's clip_grad_norm_.
    m.set_coefficient(norm.new_ones(()) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _choose(wanted: Implementation, parameters: Sequence[Tensor]) -> Implementation:
    if wanted is not Implementation.AUTO and wanted is not Implementation.TRITON:
        return wanted
    on_cuda = bool(parameters) and all(p.is_cuda for p in parameters)
    available = triton_is_usable()
    if wanted is Implementation.TRITON and not (on_cuda and available):
        raise ConfigError(
            "MeasureConfig.implementation is 'triton', but "
            + (
                "the parameters are not on CUDA. "
                if available
                else f"Triton {MIN_TRITON[0]}.{MIN_TRITON[1]} or later is not installed. "
            )
            + "Use 'auto', which takes Triton where it can be used."
        )
    return Implementation.TRITON if on_cuda and available else Implementation.FOREACH


@functools.cache  # finding a package's version reads files: 1.5 ms
def triton_is_usable() -> bool:
    """Return whether a Triton version that our kernels support is installed."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
        return (int(major), int(minor)) >= MIN_TRITON
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
