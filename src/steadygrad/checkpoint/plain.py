"""A nested state <-> plain containers, with its tensors taken out and named by their paths.

`pack` copies every container, so that further training cannot affect what is being written, and leaves the tensors as
they are. What is neither a tensor nor plain is refused at once, by path and type: otherwise a file that only the
program's own code can read would be discovered at the worst moment. Tensors that share memory are stored once.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from steadygrad.disk.manifest import MODEL, STATE
from steadygrad.disk.staging import fits_safetensors
from steadygrad.errors import UnsupportedError

TENSOR, ARRAY = "$tensor", "$array"
"""Keys of the dicts that replace a tensor or a numpy array."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class Packed:
    """A state taken apart."""

    tree: Any = None
    """Plain containers, with a mark where each tensor was."""
    files: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {MODEL: {}, STATE: {}})
    """The tensors of each file, by name."""
    odd: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that safetensors cannot store (sparse, quantized, complex): they stay in the tree, as copies."""
    aliases: dict[str, str] = field(default_factory=dict)
    """For tied weights of the model: name -> the name under which the tensor is stored."""
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def named(self) -> dict[str, Tensor]:
        """Return every tensor by the name used in reports: its path in the state."""
        named = {f"{MODEL}.{name}": tensor for name, tensor in self.files[MODEL].items()}
        return named | self.files[STATE] | self.odd

    def replace(self, name: str, tensor: Tensor) -> None:
        """Replace the tensor that `named()` calls `name`."""
        for place in (self.files[STATE], self.odd):
            if name in place:
                place[name] = tensor
                return
        self.files[MODEL][name.removeprefix(f"{MODEL}.")] = tensor


def pack(state: Mapping[str, Any]) -> Packed:
    """Take a state apart. Weights are what is stored under "model"."""
    packed = Packed()
    packed.tree = pack_plain(state, lambda tensor, path: _pack_tensor(tensor, path, packed))
    return packed


def pack_plain(state: Mapping[str, Any], take: Callable[[Tensor, str], Any]) -> dict[str, Any]:
    """Return the state in plain containers, with each tensor replaced by `take(tensor, path)`."""
    return {str(key): _pack(value, str(key), take) for key, value in state.items()}


def _pack(value: Any, path: str, take: Callable[[Tensor, str], Any]) -> Any:
    if isinstance(value, Tensor):
        return take(value, path)
    if isinstance(value, Mapping):
        if TENSOR in value or ARRAY in value:
            raise UnsupportedError(f"the state has a key {TENSOR!r} or {ARRAY!r} at {path}; these are reserved.")
        made = {_pack_key(key, path): _pack(item, f"{path}.{key}", take) for key, item in value.items()}
        return _remake(value, made)
    # Exact types from here on: a subclass would be pickled as its own class, which `weights_only` refuses to load
    if type(value) in (list, tuple):
        return type(value)(_pack(item, f"{path}.{i}", take) for i, item in enumerate(value))
    if type(value) is set:
        return _pack_set(value, path, take)
    if type(value) in PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return _pack(value.value, path, take)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        # Not long doubles: neither Python nor torch has a number for them
        if isinstance(value, numpy.generic) and value.dtype.char not in "gG":
            return _pack(value.item(), path, take)
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf" and value.dtype.char != "g":
            native = value.astype(value.dtype.newbyteorder("="), order="C")  # a copy; torch has no other byte order
            return {ARRAY: take(torch.from_numpy(native), path), "dtype": value.dtype.str}
    raise UnsupportedError(
        f"the state holds a {type(value).__module__}.{type(value).__qualname__} at {path}, and only numbers, text, "
        "tensors and dicts, lists and tuples of them are saved. Leave it out of the state, or save what it is made of."
    )


def _pack_set(value: set[Any], path: str, take: Callable[[Tensor, str], Any]) -> set[Any]:
    items = [_pack(item, f"{path}.{i}", take) for i, item in enumerate(value)]
    try:
        return set(items)
    except TypeError:  # a tensor was replaced by a dict
        names = ", ".join(sorted({type(item).__name__ for item in value}))
        raise UnsupportedError(
            f"the state holds a set of {names} at {path}, and a set can hold only numbers and text. Make it a list."
        ) from None


def _remake(like: Any, items: dict[Any, Any]) -> Any:
    """Rebuild the kinds of dict that a code-free reader knows; any other becomes a plain dict."""
    return type(like)(items) if type(like) in (OrderedDict, Counter) else items


def _pack_key(key: Any, path: str) -> Any:
    """Allow only key types that a code-free reader knows: a subclass would save but fail to load."""
    if type(key) is tuple:
        return tuple(_pack_key(part, path) for part in key)
    if type(key) in (str, int, float, bool, NoneType):
        return key
    if hasattr(key, "item") and type(key).__module__ == "numpy":  # numpy's own number or string type
        return _pack_key(key.item(), path)
    raise UnsupportedError(f"the state has a key of type {type(key).__name__} at {path}. Use text or a number.")


def _pack_tensor(tensor: Tensor, path: str, packed: Packed) -> Any:
    if not fits_safetensors(tensor):
        return _keep_odd(tensor, path, packed)
    file = MODEL if path.startswith(f"{MODEL}.") else STATE
    name = path.removeprefix(f"{MODEL}.") if file is MODEL else path
    # The layout is part of the key: a view that begins at the same address is another tensor
    key = (file, tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    # All empty tensors have address 0 and would count as tied
    kept = packed._seen.get(key) if tensor.numel() else None
    if kept is None:
        kept = _unused(name, packed.files[file])
        packed.files[file][kept] = tensor.detach()
        packed._seen[key] = kept
        packed._alive.append(tensor)  # an address identifies a tensor only while it is alive
    elif file is MODEL:
        packed.aliases[name] = kept
    mark: dict[str, Any] = {TENSOR: f"{file}:{kept}"}
    if tensor.device.type != "cpu":
        mark["device"] = str(tensor.device)
    # 0 means no overlap: an expanded tensor is loaded contiguous, since its strides name one element many times
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 0:
        mark["stride"] = tuple(tensor.stride())
    return mark


def _unused(name: str, names: Mapping[str, Any]) -> str:
    """Return `name`, with a number appended if a dotted key and a nested one collide."""
    made, number = name, 2
    while made in names or made == "__metadata__":  # a key that safetensors reserves
        made, number = f"{name}#{number}", number + 1
    return made


def _keep_odd(tensor: Tensor, path: str, packed: Packed) -> Any:
    if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter | torch.nn.Buffer):
        raise UnsupportedError(
            f"the state holds a {type(tensor).__module__}.{type(tensor).__qualname__} at {path}; tensors of such "
            "classes are not saved. Give a plain tensor, as full_tensor() or dequantize() makes it."
        )
    packed.odd[path] = tensor.detach().to("cpu", copy=True)
    return {TENSOR: f"odd:{path}"}


def unpack(tree: Any, find: Callable[[str], Tensor], devices: dict[int, str]) -> Any:
    """Rebuild the state on the CPU; `devices` receives, by id, the device each tensor was on."""
    if isinstance(tree, dict):
        if TENSOR in tree:
            return _unpack_tensor(tree, find, devices)
        if ARRAY in tree:
            array = unpack(tree[ARRAY], find, devices).numpy()
            return array.astype(tree["dtype"]) if array.dtype.str != tree["dtype"] else array
        made = {key: unpack(value, find, devices) for key, value in tree.items()}
        return _remake(tree, made)
    if isinstance(tree, list | tuple) and type(tree) is not torch.Size:
        return type(tree)(unpack(item, find, devices) for item in tree)
    return tree


def _unpack_tensor(mark: dict[str, Any], find: Callable[[str], Tensor], devices: dict[int, str]) -> Tensor:
    tensor = find(mark[TENSOR])
    if "stride" in mark:
        made = torch.empty_strided(tensor.shape, mark["stride"], dtype=tensor.dtype, device="cpu")
        tensor = made.copy_(tensor)
    if "device" in mark:
        # An id lasts only as long as its tensor: the state and this dict belong together, in one Checkpoint
        devices[id(tensor)] = mark["device"]
    return tensor
