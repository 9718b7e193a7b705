"""Effects: everything that a step function can reach -> may it be run again, and how to undo what that does?

A replay undoes what ops do to tensors and what is drawn from the generators. A function may also append to a list,
count its calls, push to its own buffer: such objects are copied shallowly before a replay and put back after it.
What cannot be put back (an iterator it draws from, a file, another process) is an obstacle, and the function must then
not be run again: it would use up data. Nothing here calls the function; the walk reads and copies references only.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import logging
import pathlib
import random
import re
import site
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from steadygrad.state.tree import is_a

MAX_OBJECTS = 20_000
"""Objects that are looked at; a function that reaches more is not run again."""
MAX_ITEMS = 100_000
"""Items of one container that are copied."""
MAX_ARRAY_BYTES = 64 << 20
"""Bytes of all numpy arrays that are copied."""

_ATOMS = (
    *(int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, type, enum.Enum, re.Pattern),
    *(pathlib.PurePath, types.BuiltinFunctionType, types.CodeType, property, weakref.ref, logging.Logger),
    *(torch.dtype, torch.device, torch.layout, torch.Size, Tensor, DataLoader, Dataset),
    *(type(threading.Lock()), type(threading.RLock()), threading.local, types.MappingProxyType),
)
"""Types that hold nothing a call could change, or nothing that matters. Tensors are the replay's own business."""
_OPAQUE_PACKAGES = (
    "steadygrad",
    "steadygrad_recipes",
    "torch",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "trl",
    "peft",
)
"""Objects of these packages, modules apart, are not looked into: their adapters answer for them."""
_SAFE_EXTENSIONS = ("numpy", "builtins", "datetime", "decimal", "fractions", "functools", "operator", "_operator")
"""Where types written in C come from that hold no state of their own."""
_OUTSIDE = (
    "multiprocessing",
    "subprocess",
    "socket",
    "concurrent",
    "asyncio",
    "queue",
    "_queue",
    "sqlite3",
    "http",
    "ray",
)
"""Packages whose objects talk to other processes or threads: what was sent cannot be called back."""
_TRACKERS = ("wandb", "mlflow", "comet_ml", "neptune", "tensorboardX", "trackio", "aim", "clearml", "swanlab")
"""Packages that send what they are given to a tracker; so does torch.utils.tensorboard."""
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_SYNC_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")
"""Attributes of DistributedDataParallel that a replay itself switches, and puts back."""


class Effects:
    """What one function can reach, copied when this is made.

    >>> seen = []
    >>> effects = Effects(lambda x: seen.append(x), (1,), {})
    >>> seen.append(2)
    >>> effects.undo(), seen
    (True, [])
    >>> it = iter([1, 2])
    >>> Effects(lambda: next(it), (), {}).obstacle
    'it draws from a list_iterator (it)'
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.obstacle: str | None = None
        """Why the function must not be run again; None when it may."""
        self.unread = ""
        """Name of an object that could not be looked at; a run may change it, unnoticed."""
        self._undo: list[Callable[[], Any]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # an id identifies an object only while it is alive
        self._array_bytes = 0
        self._todo: list[tuple[Any, str]] = [(fn, "the function"), (args, "an argument"), (dict(kwargs), "an argument")]
        while self._todo and self.obstacle is None:
            thing, name = self._todo.pop()
            try:
                self._look(thing, name)
            except MemoryError:  # of a copy of ours: the original could not be put back
                raise
            except Exception:  # the code of an object of the program's; that one is left as the replay leaves it
                self.unread = self.unread or name
        # Stopped at an obstacle, it may still refer to the program's objects.
        self._todo.clear()

    def undo(self) -> bool:
        """Restore every container, attribute and generator; return whether a container had changed."""
        changed = [_try(put_back) for put_back in self._undo]  # a list: any() alone would stop at the first
        return any(changed)

    # --- the walk ---------------------------------------------------------------------------------------------------

    def _look(self, thing: Any, name: str) -> None:
        if is_a(thing, _ATOMS) or id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        self._alive.append(thing)
        if len(self._seen) > MAX_OBJECTS:
            self.obstacle = f"it reaches more than {MAX_OBJECTS} objects, too many to put back"
        # Before the packages below: a module of torch's own may hold the program's objects.
        elif is_a(thing, nn.Module):
            self._look_at_module(thing, name)
        elif is_a(thing, types.FunctionType):
            self._look_at_function(thing)
        elif is_a(thing, types.MethodType):
            self._todo += [(thing.__self__, name), (thing.__func__, name)]
        elif is_a(thing, functools.partial):
            self._todo += [(thing.func, name), (thing.args, name), (thing.keywords, name)]
        elif is_a(thing, types.ModuleType):
            pass  # the names that a function takes from a module are looked up where the function is
        elif is_a(thing, (list, dict, set, deque, tuple, frozenset, bytearray)):
            self._look_at_container(thing, name)
        elif not self._look_at_generator(thing):
            self._look_at_object(thing, name)

    def _look_at_container(self, thing: Any, name: str) -> None:
        if len(thing) > MAX_ITEMS:
            self.obstacle = f"{name} holds {len(thing)} items, too many to put back"
            return
        if not is_a(thing, (tuple, frozenset)):
            self._undo.append(functools.partial(_put_back, thing, _copy(thing)))
        items = thing.values() if is_a(thing, dict) else () if is_a(thing, bytearray) else thing
        self._todo += [(item, name) for item in items if not is_a(item, _ATOMS)]

    def _look_at_function(self, fn: types.FunctionType) -> None:
        names = fn.__code__.co_freevars
        for name, cell in zip(names, fn.__closure__ or ()):
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                value = cell.cell_contents
                self._undo.append(functools.partial(_put_back_cell, cell, value))
                self._todo.append((value, name))
        self._todo += [
            (value, fn.__name__) for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
        ]
        if fn.__dict__:
            self._look_at_container(fn.__dict__, fn.__name__)
        if is_library(fn.__code__.co_filename) or (fn.__module__ or "").partition(".")[0] in _OPAQUE_PACKAGES:
            return  # wherever it is installed: `is_replaying` reads a counter of ours, which is not to be put back
        used = _list_names(fn.__code__)
        for name in used:
            if name in fn.__globals__:
                value = fn.__globals__[name]
                if is_a(value, types.ModuleType) and not is_library(getattr(value, "__file__", None) or ""):
                    # The code does not say which names are attributes of this module: all of them are looked up.
                    self._todo += [(vars(value)[n], f"{name}.{n}") for n in used if n in vars(value)]
                elif is_a(value, types.ModuleType) and value.__name__.partition(".")[0] in _TRACKERS:
                    self.obstacle = f"it writes to a tracker ({name})"
                elif not is_a(value, types.ModuleType):
                    self._undo.append(functools.partial(_put_back_name, fn.__globals__, name, value))
                    self._todo.append((value, name))

    def _look_at_module(self, module: nn.Module, name: str) -> None:
        held = {key: value for key, value in vars(module).items() if key != "training"}
        self._undo.append(functools.partial(_put_back_attributes, module, dict(vars(module))))
        for key in _MODULE_DICTS:
            inner = held.pop(key, {})
            self._undo.append(functools.partial(_put_back, inner, dict(inner)))
            self._todo += [(value, name) for value in inner.values() if is_a(value, nn.Module)]
        self._todo += [(value, f"{name}.{key}") for key, value in held.items() if not is_a(value, _ATOMS)]

    def _look_at_generator(self, thing: Any) -> bool:
        """Handle the user's own random generators, and numpy arrays."""
        if is_a(thing, torch.Generator):
            self._undo.append(functools.partial(thing.set_state, thing.get_state()))
        elif is_a(thing, random.Random):
            self._undo.append(functools.partial(thing.setstate, thing.getstate()))
        elif type(thing).__module__.partition(".")[0] != "numpy":
            return False
        else:
            self._look_at_numpy(thing)
        return True

    def _look_at_numpy(self, thing: Any) -> None:
        numpy = sys.modules["numpy"]  # not imported here: it is not a dependency, and the object shows that it is there
        if is_a(thing, numpy.random.Generator):
            thing = thing.bit_generator
        if is_a(thing, numpy.random.BitGenerator):
            self._undo.append(functools.partial(setattr, thing, "state", thing.state))
        elif is_a(thing, numpy.random.RandomState):
            self._undo.append(functools.partial(thing.set_state, thing.get_state()))
        elif is_a(thing, numpy.ndarray) and thing.flags.writeable:
            self._array_bytes += thing.nbytes
            if self._array_bytes > MAX_ARRAY_BYTES:
                self.obstacle = (
                    f"it reaches more than {MAX_ARRAY_BYTES >> 20} MiB of numpy arrays, too many to put back"
                )
            else:
                self._undo.append(functools.partial(numpy.copyto, thing, thing.copy()))

    def _look_at_object(self, thing: Any, name: str) -> None:
        kind = type(thing)
        package = kind.__module__.partition(".")[0]
        # Before the packages that are not looked into: torch's iterators over a DataLoader draw from it as well.
        if is_a(thing, (Iterator, io.IOBase)):
            self.obstacle = f"it draws from a {kind.__name__} ({name})"
        elif package in _OUTSIDE or is_a(thing, threading.Thread):
            self.obstacle = f"it talks to another process or thread ({name}, a {kind.__qualname__})"
        elif package in _TRACKERS or kind.__module__.startswith("torch.utils.tensorboard"):
            self.obstacle = f"it writes to a tracker ({name})"
        elif package in _OPAQUE_PACKAGES:
            return
        elif (held_in_dict := read_dict(thing)) is not None:
            self._look_at_container(held_in_dict, name)
        elif slots := _list_slots(kind):
            held = _read_slots(thing, slots)
            self._undo.append(functools.partial(_put_back_slots, thing, held))
            self._todo += [(value, f"{name}.{slot}") for slot, value in held.items()]
        # Written in C, with a state that Python cannot see: nothing could be put back.
        elif package not in _SAFE_EXTENSIONS and package not in sys.stdlib_module_names:
            self.obstacle = f"{name} is a {kind.__module__}.{kind.__qualname__}, whose state cannot be read"


def _try(put_back: Callable[[], Any]) -> bool:
    try:
        return put_back() is True
    except Exception:  # the program's own code; what comes after it must be put back all the same
        return False


def _copy(thing: Any) -> Any:
    return dict(thing) if isinstance(thing, dict) else thing.copy()


def read_dict(thing: Any) -> dict[str, Any] | None:
    """Return the attributes of an object past its own `__getattribute__`, which may raise; None if it has no dict."""
    try:
        found: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return found


def _read_slots(thing: Any, slots: Iterable[str]) -> dict[str, Any]:
    held = {}
    for slot in slots:
        with contextlib.suppress(AttributeError):  # nothing was assigned to it yet
            held[slot] = object.__getattribute__(thing, slot)
    return held


def _put_back(thing: Any, before: Any) -> bool:
    """Write only if something changed: other code may be using the object's own dict."""
    if isinstance(thing, dict):
        # By identity: == would run the program's own code, and compare tensors element by element.
        same = len(thing) == len(before) and all(k in thing and thing[k] is v for k, v in before.items())
    elif isinstance(thing, set):
        same = thing == before
    else:
        same = len(thing) == len(before) and all(a is b for a, b in zip(thing, before))
    if same:
        return False
    if isinstance(thing, bytearray | list):
        thing[:] = before
    else:
        thing.clear()
        (thing.extend if isinstance(thing, deque) else thing.update)(before)
    return True


def _put_back_attributes(module: nn.Module, before: dict[str, Any]) -> bool:
    # Switched off by `on_one_rank`, which is still active here and puts them back itself.
    present = {name: vars(module)[name] for name in _SYNC_FLAGS if name in vars(module)}
    return _put_back(vars(module), {**before, **present})


def _put_back_cell(cell: types.CellType, value: Any) -> bool:
    changed = cell.cell_contents is not value
    cell.cell_contents = value
    return changed


def _put_back_name(namespace: dict[str, Any], name: str, value: Any) -> bool:
    changed = namespace.get(name) is not value
    if changed:
        namespace[name] = value
    return changed


def _put_back_slots(thing: Any, held: Mapping[str, Any]) -> bool:
    now = _read_slots(thing, held)
    changed = [slot for slot, value in held.items() if now.get(slot) is not value]
    for slot in changed:
        # Past the class: a frozen dataclass refuses setattr.
        object.__setattr__(thing, slot, held[slot])
    return bool(changed)


def _list_slots(kind: type) -> list[str]:
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    return [name for some in slots for name in ((some,) if isinstance(some, str) else some) if name[:2] != "__"]


def _list_names(code: types.CodeType) -> set[str]:
    """Return names that the code, and functions defined inside it, take from globals or as attributes."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _list_names(constant)
    return names


@functools.cache
def _find_library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({*(path for path in paths if path), *site.getsitepackages()})


def is_library(file: str) -> bool:
    """Whether code is of an installed package: its globals are not the user's."""
    return not file or file.startswith(("<frozen", *_find_library_folders()))
