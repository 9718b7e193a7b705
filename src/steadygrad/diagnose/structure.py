"""Nested arguments -> tensors by name and a JSON tree, and back. No code is stored and none is run when reading.

Dicts, lists and tuples come back as they were; named tuples and dataclasses as objects with the same attributes; other
mappings (Hugging Face's BatchEncoding) as dicts. Modules are left out: the replaying code supplies the model. What
cannot be stored comes back as None, and `missing` says what it was.
"""

from __future__ import annotations

import collections
import dataclasses
import keyword
import math
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.errors import UnsupportedError

MAX_DEPTH = 16
PLAIN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool),
)
"""Dtypes that every reader of safetensors knows."""


class Packed:
    """Tensors by name, a tree for JSON, and what could not be stored."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.missing: list[str] = []

    def pack(self, value: Any, path: str, depth: int = MAX_DEPTH) -> Any:
        """Return the tree of `value`; its tensors go to `tensors` under names that begin with `path`."""
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path)
        if isinstance(value, float) and not math.isfinite(value):
            return {"kind": "float", "value": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return {"kind": "plain", "value": value}
        if isinstance(value, nn.Module):
            return {"kind": "module"}
        if depth:
            tree = self._pack_container(value, path, depth - 1)
            if tree is not None:
                return tree
        self.missing.append(f"{path}: {type(value).__qualname__}")
        return {"kind": "missing", "type": type(value).__qualname__}

    def _pack_tensor(self, tensor: Tensor, path: str) -> Any:
        dense = tensor.detach()
        if dense.layout is not torch.strided or dense.is_quantized or dense.is_nested:
            self.missing.append(f"{path}: a tensor of layout {dense.layout}")
            return {"kind": "missing", "type": "Tensor"}
        tree = {"kind": "tensor", "name": path, "requires_grad": tensor.requires_grad and tensor.is_leaf}
        if dense.is_complex():
            tree["complex"] = True
            # Not every reader of safetensors knows complex dtypes; conj() is a flag that the bytes do not show.
            dense = torch.view_as_real(dense.resolve_conj())
        if dense.dtype not in PLAIN:
            self.missing.append(f"{path}: {dense.dtype}")
            return {"kind": "missing", "type": str(dense.dtype)}
        self.tensors[path] = dense.cpu().contiguous().clone()  # safetensors refuses tensors that share memory
        return tree

    def _pack_container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            # Pairs, not a JSON object, which would turn integer keys into strings.
            items = [[self._pack_key(key), self.pack(item, f"{path}.{key}", depth)] for key, item in value.items()]
            return {"kind": "dict", "items": items}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = {name: self.pack(getattr(value, name), f"{path}.{name}", depth) for name in value._fields}
            return {"kind": "namedtuple", "type": type(value).__name__, "fields": fields}
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{path}.{place}", depth) for place, item in enumerate(value)]
            return {"kind": "list" if isinstance(value, list) else "tuple", "items": items}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [one.name for one in dataclasses.fields(value)]
            fields = {name: self.pack(getattr(value, name), f"{path}.{name}", depth) for name in names}
            return {"kind": "object", "fields": fields}
        return None

    @staticmethod
    def _pack_key(key: Any) -> Any:
        return key if isinstance(key, str | int) else str(key)


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `Packed.pack` was given, as far as it could be stored."""
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if kind == "tensor":
        return _unpack_tensor(tree, tensors)
    if kind == "plain":
        return tree["value"]
    if kind == "float":
        return float(tree["value"])
    if kind in ("module", "missing"):
        return None
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in tree["items"]}
    if kind in ("list", "tuple"):
        items = [unpack(item, tensors) for item in tree["items"]]
        return items if kind == "list" else tuple(items)
    if kind in ("namedtuple", "object"):
        fields = {name: unpack(item, tensors) for name, item in tree["fields"].items()}
        return _make_named_tuple(tree, fields) if kind == "namedtuple" else types.SimpleNamespace(**fields)
    raise UnsupportedError(
        f"the saved batch holds {kind!r}, which this version does not know. Read it with a newer one."
    )


def _unpack_tensor(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    if tree["name"] not in tensors:
        raise UnsupportedError(f"the saved batch names the tensor {tree['name']!r}, but its file does not hold it.")
    tensor = tensors[tree["name"]]
    tensor = torch.view_as_complex(tensor) if tree.get("complex") else tensor
    return tensor.requires_grad_() if tree.get("requires_grad") else tensor


def _make_named_tuple(tree: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    name = str(tree.get("type", ""))
    # The names come from a file: `rename` replaces those of fields that namedtuple() would refuse.
    fits = name.isidentifier() and not keyword.iskeyword(name)
    return collections.namedtuple(name if fits else "Batch", list(fields), rename=True)(*fields.values())
