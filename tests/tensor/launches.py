"""Counts what a program would launch on a device, on a machine without one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty")
COMPOSITE = {"logsumexp": 9}
"""Kernels of operations that the dispatcher sees as one: amax, abs, eq, masked_fill, sub, exp, sum, log, add."""


class CountLaunches(TorchDispatchMode):
    """Counts tensor operations that are neither views nor allocations, and Triton kernels run by the interpreter.

    `names` has the count of each. cuBLAS may use two kernels for one product, which this does not see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._inside = False

    @property
    def total(self) -> int:
        """All launches."""
        return sum(num * COMPOSITE.get(name, 1) for name, num in self.names.items())

    def __enter__(self) -> CountLaunches:
        from triton.runtime.interpreter import GridExecutor

        self._executor, self._call = GridExecutor, GridExecutor.__call__
        GridExecutor.__call__ = lambda executor, *args, **kwargs: self._launch(executor, *args, **kwargs)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._executor.__call__ = self._call

    def _launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        self.names[executor.fn.__name__] += 1
        self._inside = True  # tensors of the interpreter
        try:
            self._call(executor, *args, **kwargs)
        finally:
            self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        views = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if not self._inside and not views and name not in ALLOCATIONS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))
