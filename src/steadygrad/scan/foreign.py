"""`load_checkpoint`: weights of another program -> a model, as a safe starting point.

A plain state_dict, a Lightning .ckpt, a file with the weights under any key, a Hugging Face folder, a checkpoint of
ours: names are matched with the model's, whatever prefix they have. No code in the file is run, and the model is
changed only after every name, shape and value has been checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.disk import manifest
from steadygrad.errors import CheckpointError, MismatchError, NonFiniteStateError
from steadygrad.scan.checkpoint_scan import is_mask, measure_tensors
from steadygrad.scan.foreign_names import match_names
from steadygrad.scan.readers.chunks import read_tensor
from steadygrad.scan.readers.formats import read_contents
from steadygrad.scan.stored import StoredTensor
from steadygrad.scan.trusted import unpickled_copy

MAX_SHOWN = 5
WEIGHT_FILES = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
"""File names that transformers and peft use."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded, and what was not."""

    prefix: str
    """Prefix of the model's names in the file."""
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Names in the model but not in the file; they keep their values."""
    unexpected: tuple[str, ...]
    """Names next to the weights in the file but not in the model."""
    misshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Name -> shape in the file, shape in the model; these keep their values."""

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.misshaped)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    *,
    strict: bool = True,
    prefix: str | None = None,
    allow_nonfinite: bool = False,
    trust: bool = False,
) -> LoadReport:
    """Copy the weights at `path` into `model`.

    `strict`: everything must fit, or MismatchError names what does not; otherwise what fits is loaded and the rest
    reported. `prefix`: what precedes the model's names in the file, if that is ambiguous, for example "ema.".
    Weights with NaN or Inf are refused unless `allow_nonfinite`. Objects of a program's own classes are left out.
    `trust` runs what the file asks for, as `torch.load` does: only for files whose origin you know.
    """
    weights = _find_weights(Path(path))
    with unpickled_copy(weights) if trust else contextlib.nullcontext(weights) as source:
        return _load(path, source, model, strict=strict, prefix=prefix, allow_nonfinite=allow_nonfinite)


def _load(
    path: str | Path, source: Path, model: nn.Module, *, strict: bool, prefix: str | None, allow_nonfinite: bool
) -> LoadReport:
    stored = {tensor.name: tensor for tensor in read_contents(source).tensors}
    wanted = _list_wanted(model)
    found = match_names(stored, wanted, prefix, path)
    pairs = {name: (stored[source], wanted[name]) for name, source in found.names.items()}
    fitting = {name: (held, own) for name, (held, own) in pairs.items() if held.shape == tuple(own.shape)}
    report = LoadReport(
        prefix=found.prefix,
        loaded=tuple(fitting),
        missing=tuple(_find_missing(wanted, pairs)),
        unexpected=found.unexpected,
        misshaped={name: (held.shape, tuple(own.shape)) for name, (held, own) in pairs.items() if name not in fitting},
    )
    if strict and not report.is_complete:
        raise MismatchError(f"{path} does not fit the model: {_describe(report)}. Load what fits with strict=False.")
    # Before the first copy: the model is changed by all of it or by nothing
    _check_values(path, fitting, allow_nonfinite=allow_nonfinite)
    with torch.no_grad():
        for held, own in fitting.values():
            own.copy_(read_tensor(held))
    return report


def _find_weights(path: Path) -> Path:
    """Of a folder that holds an optimizer too, the file of the model."""
    usual = (path / name for name in WEIGHT_FILES)
    own = path / manifest.NAME
    return next((file for file in usual if file.is_file()), path) if path.is_dir() and not own.exists() else path


def _list_wanted(model: nn.Module) -> dict[str, Tensor]:
    wanted = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    for name, value in wanted.items():
        if is_lazy(value) or value.is_meta:
            raise CheckpointError(
                f"{name} of the model has no memory yet, so nothing can be loaded into it. Run a batch through a lazy "
                "module first; give a model on the meta device memory with to_empty(device=...)."
            )
    return wanted


def _find_missing(wanted: Mapping[str, Tensor], pairs: Mapping[str, object]) -> Iterable[str]:
    """Return names that the file has not, but for those tied to one that it has: files keep such weights once."""
    had = {_place(wanted[name]) for name in pairs}
    return (name for name, own in wanted.items() if name not in pairs and _place(own) not in had)


def _place(tensor: Tensor) -> tuple[object, ...]:
    # All empty tensors have address 0, and are not tied
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device) if tensor.numel() else (id(tensor),)


def _check_values(
    path: str | Path, fitting: Mapping[str, tuple[StoredTensor, Tensor]], *, allow_nonfinite: bool
) -> None:
    """Every value must be finite, in the file and in the dtype that the model gives it."""
    unknown = [name for name, (held, _) in fitting.items() if held.dtype is None]
    if unknown:
        raise CheckpointError(f"{path}: {unknown[0]} has elements that this torch has no name for. Use a newer torch.")
    if allow_nonfinite:
        return
    stats = dict(zip(fitting, measure_tensors(tuple(held for held, _ in fitting.values()))))
    bad = {name: one.num_nonfinite for name, one in stats.items() if one.num_nonfinite and not is_mask(name, one)}
    if bad:
        raise NonFiniteStateError(str(path), bad)
    for name, one in stats.items():
        dtype = fitting[name][1].dtype
        if dtype.is_floating_point and one.num_elements:
            largest = max(-one.least, one.largest)
            # A finite float32 can become Inf in the model's fp16
            if largest > torch.finfo(dtype).max:
                raise MismatchError(
                    f"{name} holds {largest:g} in {path}, which {dtype} of the model cannot. Use a wider dtype."
                )


def _describe(report: LoadReport) -> str:
    shapes = [f"{name} (file {list(old)}, model {list(new)})" for name, (old, new) in report.misshaped.items()]
    groups = {"missing": report.missing, "unexpected": report.unexpected, "of another shape": tuple(shapes)}
    return "; ".join(f"{len(names)} {what}: {_show(names)}" for what, names in groups.items() if names)


def _show(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
