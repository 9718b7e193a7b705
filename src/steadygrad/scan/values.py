"""A file of `torch.save` -> its tensors and plain values, without running any of it; the rest named and left out.

The inert reader gives the shape of the pickle; here containers, numbers, text, tensors and numpy's values are made of
it. An object of a class that is not known is dropped from the dict that holds it, and None in a list. Reading costs one
copy of each tensor.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path, PurePath
from typing import Any

import torch

from steadygrad.errors import CheckpointError, DamagedCheckpoint
from steadygrad.scan.inert import Call, Name
from steadygrad.scan.readers.chunks import read_tensor
from steadygrad.scan.readers.pickle import Place, describe_tensor, is_tensor
from steadygrad.scan.readers.torch import open_pickle, read_torch

LEFT_OUT: Any = object()
NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}
NUMBERS |= {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
"""numpy's name of a dtype -> struct's."""
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


def load_values(path: Path) -> tuple[Any, list[str]]:
    """Return what the file holds, and the names of what was left out; a CheckpointError when it cannot be read."""
    try:
        with path.open("rb") as file:
            read_torch(path, file)  # every shape and place is checked before a tensor is made
            opened = open_pickle(path, file)
            maker = _Maker(path, opened.place)
            value = maker.make(opened.value, "")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. Check the path.") from None
    except RecursionError:
        raise DamagedCheckpoint(path, "its values are nested without end") from None
    return (None if value is LEFT_OUT else value), [*opened.left_out, *maker.left_out]


class _Maker:
    """Makes the values of one file."""

    def __init__(self, path: Path, place: Place) -> None:
        self._path, self._place = path, place
        self._made: dict[int, Any] = {}
        self.left_out: list[str] = []

    def make(self, value: Any, name: str) -> Any:
        """Return the value itself; LEFT_OUT where only code could make it. Held twice, it is made once."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        # The ids last: `load_values` holds the whole pickle until everything is made
        if id(value) not in self._made:
            self._made[id(value)] = LEFT_OUT  # a container in itself
            self._made[id(value)] = self._make(value, name)
        return self._made[id(value)]

    def _make(self, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            made = {key: self.make(item, f"{name}.{key}") for key, item in value.items() if not isinstance(key, Call)}
            return {key: item for key, item in made.items() if item is not LEFT_OUT}
        if isinstance(value, list | tuple):
            items = [self.make(item, f"{name}.{i}") for i, item in enumerate(value)]
            return type(value)(None if item is LEFT_OUT else item for item in items)
        if isinstance(value, Name):
            # An attribute of torch is read and not called, and only a dtype is taken
            found = getattr(torch, value.name, None) if value.module == "torch" else None
            return found if isinstance(found, torch.dtype) else LEFT_OUT
        return self._make_object(value, name) if isinstance(value, Call) else LEFT_OUT

    def _make_object(self, call: Call, name: str) -> Any:
        if is_tensor(call):
            stored = describe_tensor(self._path, name, call, self._place)
            return LEFT_OUT if stored is None or stored.dtype is None else read_tensor(stored)
        if call.name.startswith("torch._utils._rebuild_parameter"):
            return self.make(call.arguments[0], name)
        if call.name == "torch.device":
            return torch.device(*call.arguments)
        if call.name in NAMESPACES and isinstance(call.state, dict):
            return argparse.Namespace(**{str(k): v for k, v in self.make(call.state, name).items()})
        if call.name.startswith("pathlib."):
            return PurePath(*map(str, call.arguments))  # pure: it cannot touch the disk
        if call.name == "_codecs.encode":
            return str(call.arguments[0]).encode("latin1")
        if call.name.startswith("numpy."):
            return self._make_numpy(call, name)
        return LEFT_OUT

    def _make_numpy(self, call: Call, name: str) -> Any:
        """Return a number, or an array as a tensor: numpy itself may be missing here."""
        last = call.name.rpartition(".")[2]
        if last == "scalar":
            kind, data = call.arguments[0], self.make(call.arguments[1], name)
            numbers = _unpack(kind, data)
            return numbers[0] if numbers else LEFT_OUT
        if last == "_reconstruct" and isinstance(call.state, tuple) and len(call.state) == 5:
            _, shape, kind, is_fortran, data = call.state
            numbers = _unpack(kind, self.make(data, name))
            if numbers is None or not isinstance(shape, tuple):
                return LEFT_OUT
            array = torch.tensor(numbers, device="cpu").reshape(shape[::-1] if is_fortran else shape)
            return array.permute(*reversed(range(array.dim()))) if is_fortran else array
        return LEFT_OUT


def _unpack(kind: Any, data: Any) -> list[Any] | None:
    """Return the numbers in numpy's bytes; None for a dtype that is not one of plain numbers."""
    if not isinstance(kind, Call) or not isinstance(data, bytes) or not kind.arguments:
        return None
    code = NUMBERS.get(str(kind.arguments[0]).lstrip("<>|="))
    order = kind.state[1] if isinstance(kind.state, tuple) and len(kind.state) > 1 else "<"
    if code is None or len(data) % struct.calcsize(code):
        return None
    return list(struct.unpack(f"{'>' if order == '>' else '<'}{len(data) // struct.calcsize(code)}{code}", data))
