"""Calls of the user's code, one by one -> broadcasts and double softmaxes that are probably mistakes.

Shapes show that (N, 1) met (N,); marks show what the program intended: an axis added on purpose (unsqueeze, None,
keepdim, a reshape to a trailing 1) makes pairs on purpose, and so do weights, buffers and ranges. A softmax is
recognised through views, casts and dropout. Marks hold tensors weakly. Nothing is changed or read from a device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts import Broadcast
from steadygrad.measure import exchanged_arguments
from steadygrad.measure.loss_targets import CALLS, LossTarget, read_loss_call
from steadygrad.measure.marks import Marks


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_SHOWN = 16
"""Most calls of one kind to keep."""
ELEMENTWISE = _words(
    "add __radd__ sub subtract __rsub__ rsub mul multiply __rmul__ div divide true_divide __rdiv__ __rtruediv__ "
    "mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss gaussian_nll_loss kl_div"
)
"""Ops that losses are made of: two operands of the same meaning, element by element."""
PRODUCTS = _words("linear bilinear matmul __matmul__ __rmatmul__ mm bmm addmm mv einsum conv1d conv2d conv3d")
"""Ops that make new features: an axis of the result is not one that the program added before."""
AXIS_MAKERS = _words(
    "unsqueeze unsqueeze_ expand expand_as broadcast_to meshgrid cartesian_prod column_stack arange linspace logspace "
    "range"
)
RESHAPES = _words("view reshape view_as reshape_as unflatten")
REDUCTIONS = _words("sum mean nansum nanmean prod norm vector_norm amax amin max min logsumexp std var any all")
SOFTMAXES = frozenset(("softmax", "log_softmax"))
LOG_SOFTMAXES = frozenset(("log_softmax", "cross_entropy"))
"""Those that leave log-probabilities as they are."""
VIEWS = _words(
    "view reshape view_as reshape_as flatten unflatten transpose transpose_ swapaxes swapdims permute movedim t "
    "squeeze squeeze_ unsqueeze unsqueeze_ select narrow __getitem__ index_select masked_select __get__"
)
SAME = _words(
    "contiguous clone to type type_as float half double bfloat16 dropout dropout1d dropout2d dropout3d alpha_dropout "
    "dropout_ requires_grad_ retain_grad"
)
CLASS_LOSSES = _words("cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits")
OUR_FOLDERS = tuple(
    # With a separator at the end: torchvision is not torch.
    os.path.join(os.path.dirname(os.path.abspath(path)), "")
    for path in (torch.__file__, sys.modules["steadygrad"].__file__ or "")
)


@dataclass(frozen=True, slots=True)
class _Softmaxed:
    """A tensor that came out of a softmax over `dim`, which had `size` classes."""

    dim: int
    size: int
    viewed: bool = False
    is_log: bool = False

    def fits(self, tensor: Tensor, dim: int) -> bool:
        """Return whether a softmax over `dim` of `tensor` is over the same classes."""
        return tensor.shape[dim] == self.size and (self.viewed or dim == self.dim)


class SuspiciousOps:
    """Sees each call before and after it is made. `constants` are ids of tensors that are not data (buffers)."""

    def __init__(self, constants: Collection[int] = ()) -> None:
        self._broadcasts: dict[Broadcast, tuple[int, int]] = {}  # with the numbers of the two tensors
        self._numbers, self._next = Marks(), 0
        self._paired: set[int] = set()
        self.double_softmaxes: list[str] = []
        self.loss_places: dict[str, str] = {}
        self.loss_targets: list[LossTarget] = []
        self.exchanged: list[exchanged_arguments.Suspect] = []
        self._constants = frozenset(constants)
        self._meant = Marks()  # tensors with an axis that the program asked for
        self._softmaxed = Marks()

    @property
    def broadcasts(self) -> list[Broadcast]:
        """Pairs that were probably not meant: of tensors that are not paired with themselves as well."""
        return [found for found, numbers in self._broadcasts.items() if self._paired.isdisjoint(numbers)]

    def before(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the operands before the call, which may change them in place."""
        name = getattr(func, "__name__", "")
        if name in ELEMENTWISE and len(self._broadcasts) < MAX_SHOWN:
            self._compare(name, *_first_two(args, kwargs))
        elif name in SOFTMAXES or name == "cross_entropy":
            self._look_for_softmax(name, args, kwargs)
        if name in CLASS_LOSSES:
            self.loss_places[name] = find_caller()
        if name in exchanged_arguments.CALLS and len(self.exchanged) < MAX_SHOWN:
            suspect = exchanged_arguments.read_call(name, args, kwargs, find_caller)
            self.exchanged += [] if suspect is None else [suspect]
        if name in CALLS and len(self.loss_targets) < MAX_SHOWN:
            found = read_loss_call(name, args, kwargs, find_caller)
            self.loss_targets += [] if found is None else [found]

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Mark the results."""
        name = getattr(func, "__name__", "")
        for tensor in _tensors(result):
            if self._is_meant(name, args, kwargs, tensor):
                self._meant[tensor] = True
            self._mark_softmax(name, args, kwargs, tensor)

    def _compare(self, name: str, left: Any, right: Any) -> None:
        if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.shape == right.shape:
            return
        if _find_base(left) is _find_base(right):  # one tensor with itself: pairs are what is wanted
            if _makes_pairs(left, right):
                self._paired.add(self._number(left))
            return
        if not _meet_by_accident(left, right):
            return
        if not (left.requires_grad or right.requires_grad) or self._is_given(left) or self._is_given(right):
            return
        found = Broadcast(op=name.strip("_"), left=tuple(left.shape), right=tuple(right.shape), where=find_caller())
        self._broadcasts.setdefault(found, (self._number(left), self._number(right)))

    def _number(self, tensor: Tensor) -> int:
        """Return the number of the tensor that this one is, or is a view of."""
        base = _find_base(tensor)
        if base not in self._numbers:
            self._numbers[base] = self._next = self._next + 1
        number: int = self._numbers[base]
        return number

    def _is_given(self, tensor: Tensor) -> bool:
        """Return whether its shape is intended, or it is a weight or buffer, whose length may equal the batch's."""
        is_weight = tensor.requires_grad and tensor.is_leaf
        return is_weight or id(tensor) in self._constants or tensor in self._meant

    def _is_meant(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> bool:
        if name in AXIS_MAKERS or (name in RESHAPES and result.dim() and result.shape[-1] == 1):
            return True
        if name == "__getitem__" and len(args) > 1:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(item is None for item in index):
                return True
        if kwargs.get("keepdim") or (name in REDUCTIONS and any(item is True for item in args[1:])):
            return True
        if name in PRODUCTS:
            return False
        return any(t in self._meant and t.shape == result.shape for t in _tensors(args))

    def _look_for_softmax(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = _first_two(args, kwargs)[0]
        if not isinstance(tensor, Tensor) or not tensor.requires_grad or not tensor.dim():
            return
        mark = self._softmaxed.get(tensor)
        if mark is not None and mark.is_log and name in LOG_SOFTMAXES:
            return  # the logarithms of probabilities stay as they are
        if mark is not None and mark.fits(tensor, _class_dim(name, tensor, args, kwargs)):
            where = find_caller()
            if where not in self.double_softmaxes and len(self.double_softmaxes) < MAX_SHOWN:
                self.double_softmaxes.append(where)

    def _mark_softmax(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        source = _first_two(args, kwargs)[0]
        mark = None
        if not isinstance(source, Tensor):
            return
        if name in SOFTMAXES and source.dim():
            dim = _class_dim(name, source, args, kwargs)
            mark = _Softmaxed(dim, source.shape[dim], is_log=name == "log_softmax")
        elif name in VIEWS and source in self._softmaxed:
            mark = replace(self._softmaxed[source], viewed=True)
        elif name in SAME and source in self._softmaxed:
            mark = self._softmaxed[source]
        if mark is not None:
            self._softmaxed[result] = mark
        elif result is source and name.endswith("_") and result in self._softmaxed:
            del self._softmaxed[result]  # changed in place


def _find_base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def find_caller() -> str:
    """Return file:line of the innermost frame that is neither torch's nor ours; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*OUR_FOLDERS, "<frozen")):
            return f"{path}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def _makes_pairs(left: Tensor, right: Tensor) -> bool:
    """Return whether the result is larger than both."""
    try:
        return bool(torch.broadcast_shapes(left.shape, right.shape).numel() > max(left.numel(), right.numel()))
    except RuntimeError:
        return False


def _meet_by_accident(left: Tensor, right: Tensor) -> bool:
    """Return whether (N, 1) meets (N,), or (B, N, 1) meets (B, N): same size, other rank, result larger than both."""
    long, short = (left.shape, right.shape) if left.dim() > right.dim() else (right.shape, left.shape)
    if len(long) == len(short) or not len(short) or long[-1] != 1 or left.numel() != right.numel():
        return False
    return _makes_pairs(left, right)


def _first_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the operands, by position or by torch's keywords."""
    named = [kwargs[key] for key in ("input", "other", "target") if key in kwargs]
    found = [*args[:2], *named, None, None]
    return found[0], found[1]


def _class_dim(name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the dimension of a softmax, from 0; for cross entropy that of the classes."""
    if name == "cross_entropy":
        return 1 if tensor.dim() > 1 else 0
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(dim, int):
        dim = 0 if tensor.dim() in (0, 1, 3) else 1  # torch's default if none is passed
    return dim % tensor.dim()


def _tensors(value: Any) -> Iterator[Tensor]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, Tensor):
            yield item
