"""The pickle of a file of `torch.save` -> the tensors that it describes, each with its place in the file.

Objects of classes that are not known, a program's own settings mostly, are left out and named. A pickle that calls
functions, or asks the standard library for more than plain data, is refused, and the refusal says what it wanted to
run. Numbers that are not finite come along. Every shape, stride and place is checked against the storage that it lies
in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from steadygrad.errors import DamagedCheckpoint, UnsafePickleError
from steadygrad.scan.inert import BrokenPickle, Call, Name, Pickle, Storage, Use, read_pickle
from steadygrad.scan.readers.checks import are_sizes, check_overlap
from steadygrad.scan.stored import Contents, StoredTensor, contiguous_stride, count_extent

MAX_NAMES = 8
"""Shown in a refusal."""
KINDS = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "QInt8": torch.int8,
    "QUInt8": torch.uint8,
    "QInt32": torch.int32,
}
"""torch.FloatStorage and its like; quantized elements are looked at as the integers they are."""
PLAIN = {
    *("collections.OrderedDict", "collections.defaultdict", "collections.Counter", "_codecs.encode"),
    *(f"builtins.{name}" for name in ("set", "frozenset", "list", "tuple", "dict", "int", "float", "str", "bool")),
    *(f"builtins.{name}" for name in ("bytes", "bytearray", "complex", "slice", "range")),
    *(f"__builtin__.{name}" for name in ("set", "frozenset", "list", "tuple", "dict", "bytearray", "complex")),
    *(f"torch.{name}" for name in ("Size", "device", "Tensor", "storage.TypedStorage", "storage.UntypedStorage")),
    *("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.serialization._get_layout"),
    *("torch.Generator", "torch.strided", "argparse.Namespace", "pathlib.PosixPath", "pathlib.WindowsPath"),
    *("pathlib.Path", "pathlib.PurePosixPath", "pathlib.PureWindowsPath", "datetime.datetime", "datetime.timedelta"),
    *(f"torch.per_{name}" for name in ("tensor_affine", "channel_affine", "tensor_symmetric", "channel_symmetric")),
    "torch.per_channel_affine_float_qparams",
    *("numpy.ndarray", "numpy.dtype", "torch.torch_version.TorchVersion"),
    *(f"{package}.utilities.data.AttributeDict" for package in ("lightning.fabric", "lightning_fabric")),
    "pytorch_lightning.utilities.parsing.AttributeDict",
    *(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray._reconstruct", "multiarray.scalar")
    ),
    *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
    *("copyreg._reconstructor", "copy_reg._reconstructor", "builtins.object", "__builtin__.object", "typing.Any"),
    *(
        "types.SimpleNamespace",
        "collections.deque",
        "datetime.date",
        "datetime.timezone",
        "decimal.Decimal",
        "uuid.UUID",
    ),
}
"""Names that stand for data: none of them does anything but hold what it was given."""
REBUILDERS = {f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor")}
"""Each takes a storage, where in it the tensor begins, its shape and its stride."""
PLAIN_PREFIXES = ("torch._utils._rebuild_", "torch._tensor._rebuild_from_type_v2", "numpy.dtypes.")

FOREIGN_ROOTS = ("torch", "numpy", "__builtin__", "copy_reg", "torch_xla")
"""Packages whose plain names are all known: what else is asked of them is done by code."""

Place = Callable[[Storage], tuple[int, int]]
"""Where in the file a storage begins, and how many bytes it has."""
Persist = Callable[[Any], Any]


def is_plain_name(name: str) -> bool:
    """Whether a pickle may use this name: it rebuilds a tensor, or is a dtype, storage or plain container."""
    if name in PLAIN or name.startswith(PLAIN_PREFIXES):
        return True
    module, _, last = name.rpartition(".")
    if module in {"torch", "torch.cuda"} and last.endswith("Storage"):
        return last.removesuffix("Storage") in KINDS
    # Only read, never called; anything but a dtype or a layout is unknown
    return module == "torch" and isinstance(getattr(torch, last, None), torch.dtype | torch.layout)


def may_leave_out(name: str, use: Use) -> bool:
    """Whether an unknown name is a class of the user's whose objects can be left out.

    The name of one is written with a capital, and so are enums, which a pickle calls with their value. Nothing is
    looked up: what only looks like a class is left out as well, and never run.
    """
    root, last = name.partition(".")[0], name.rpartition(".")[2]
    if root in FOREIGN_ROOTS or root in sys.stdlib_module_names:
        return False
    return use is not Use.CALLED or last[:1].isupper()


def interpret(path: Path, stream: BinaryIO, persist: Persist | None = None) -> Pickle:
    """Return the next pickle, read inertly, or a refusal that says what it wanted to run."""
    try:
        pickle = read_pickle(stream, is_plain_name, persist or make_storage, may_leave_out)
    except BrokenPickle as error:
        raise DamagedCheckpoint(path, str(error)) from None
    if pickle.wanted:
        raise UnsafePickleError(path, pickle.wanted[:MAX_NAMES])
    if isinstance(pickle.value, Call) and pickle.value.name in pickle.left_out:  # nothing would be left
        raise UnsafePickleError(path, pickle.left_out[:MAX_NAMES])
    return pickle


def describe_left_out(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note about what was left out, if anything was."""
    if not names:
        return ()
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    return (f"left out: objects of {shown}; only their own code could make them",)


def make_storage(identity: Any) -> Storage:
    """Return the storage that a persistent id stands for: ('storage', type, key, device, size, ...)."""
    if not (isinstance(identity, tuple) and len(identity) >= 5 and identity[0] == "storage"):
        raise BrokenPickle("a persistent id that is not a storage")
    _, kind, key, _, size, *view = identity
    if any(part is not None for part in view):
        raise BrokenPickle("a view of a storage, which torch has not written since 0.4")
    if not isinstance(kind, Name) or not isinstance(key, str | int) or not isinstance(size, int) or size < 0:
        raise BrokenPickle("a storage whose type, key or size makes no sense")
    short = kind.name.removesuffix("Storage")
    if short in KINDS:
        return Storage(str(key), short, size)
    if short in {"Untyped", "Typed"}:
        return Storage(str(key), None, size)
    raise BrokenPickle(f"a storage of type {kind}")


def describe_tensors(path: Path, format: str, value: Any, place: Place, size: int, name: str = "") -> Contents:
    tensors: list[StoredTensor] = []
    numbers: list[tuple[str, float]] = []
    for where, found in _walk(value, name):
        if isinstance(found, float):
            if not math.isfinite(found):
                numbers.append((where, found))
        elif (tensor := describe_tensor(path, where, found, place)) is not None:
            tensors.append(tensor)
    # A thousand tensors over the same bytes are a small file and hours of reading
    check_overlap(tensors, path, size)
    return Contents(path, format, tuple(tensors), tuple(numbers))


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every float and every Call below `value`, named by its path; each container once, however often it is held."""
    waiting, seen = [(name, value)], set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, float):
            yield name, value
        elif isinstance(value, dict | list | tuple | Call):
            is_leaf = isinstance(value, Call) and is_tensor(value)
            if id(value) in seen and not is_leaf:  # a tensor is named at each of its places, since weights may be tied
                continue
            seen.add(id(value))
            if isinstance(value, Call):
                yield name, value
            if not is_leaf:
                waiting.extend(reversed(list(_name_children(value, name))))


def _name_children(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Call):
        yield from ((name, part) for part in (*value.arguments, value.state, *value.items))
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in pairs:
        yield f"{name}.{key}" if name else str(key), child


def is_tensor(call: Call) -> bool:
    """Whether a call rebuilds a tensor."""
    return call.name in REBUILDERS


def describe_tensor(path: Path, name: str, call: Call, place: Place) -> StoredTensor | None:
    """Return the tensor that a call rebuilds; None for a call of something else."""
    if not is_tensor(call):
        return None
    storage, first, shape, stride = (*call.arguments[:4], None, None, None, None)[:4]
    if not isinstance(storage, Storage) or not (are_sizes(shape) and are_sizes(stride) and are_sizes((first,))):
        raise DamagedCheckpoint(path, f"tensor {name!r} has a shape, stride or storage that makes no sense")
    dtype = KINDS[storage.kind] if storage.kind else _find_dtype(call)
    if len(shape) != len(stride) or dtype is None:
        raise DamagedCheckpoint(
            path, f"tensor {name!r} has {len(shape)} sizes, {len(stride)} strides and the dtype {dtype}"
        )
    begin, available = place(storage)
    num_bytes = count_extent(shape, stride) * dtype.itemsize
    # Or a shape could read on into the bytes of the next storage
    if num_bytes and first * dtype.itemsize + num_bytes > available:
        raise DamagedCheckpoint(
            path, f"tensor {name!r} of shape {list(shape)} reaches past its storage of {available} bytes"
        )
    kind = str(dtype).removeprefix("torch.")
    stride = contiguous_stride(shape) if num_bytes == 0 else stride
    return StoredTensor(name, path, dtype, kind, shape, stride, begin + first * dtype.itemsize, num_bytes)


def _find_dtype(call: Call) -> torch.dtype | None:
    """Return the dtype of a tensor on an untyped storage, which names it among its arguments."""
    names = [one.name for one in call.arguments[4:] if isinstance(one, Name) and one.module == "torch"]
    dtype = getattr(torch, names[0], None) if names else None
    return dtype if isinstance(dtype, torch.dtype) else None
