"""Quarantine: the batch of a failing step -> a file in the run directory, and back in another process.

`batches/step-00001204.safetensors` holds the tensors, the generators' states and, where they fit, the model's weights;
the JSON beside it holds the structure. Written aside and renamed, the JSON last, so what can be read is whole. Bounded
in bytes and in number; what does not fit is refused, with the reason. Reading runs no code from the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.structure import Packed, unpack
from steadygrad.errors import UsageError
from steadygrad.state.shards import is_dtensor

FOLDER = "batches"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """A batch that was read back."""

    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: dict[str, Any] | None
    autocast: dict[str, str]
    """Kind of device -> dtype, of the autocasts that were open."""
    weights: dict[str, Tensor]
    """The model's state before the step; empty when it did not fit."""
    missing: tuple[str, ...] = ()
    modules: tuple[int, ...] = ()
    """Positions of arguments that were modules, which are not stored."""
    scale: float = 1.0


@dataclass(slots=True, kw_only=True)
class Quarantine:
    """Keeps batches in `run_dir`/batches."""

    run_dir: Path
    max_bytes: int = 256 << 20
    """Size limit of all files together."""
    max_batches: int = 16
    weights_share: float = 0.5
    """Share of `max_bytes` that the weights of all kept steps together may take."""
    refused: str = field(default="", init=False)
    """Why the last batch was not kept."""

    def save(self, step: int, capture: Capture, *, scale: float = 1.0) -> str | None:
        """Keep the batch of a captured step; return its path inside the run directory, or None if it was refused."""
        packed = Packed()
        tree = {
            "format": FORMAT,
            "step": step,
            "scale": scale,
            "args": [packed.pack(value, f"args.{place}") for place, value in enumerate(capture.args)],
            "kwargs": {name: packed.pack(value, f"kwargs.{name}") for name, value in capture.kwargs.items()},
            "random": None if capture.random is None else packed.pack(plain_random(capture.random), "random"),
            "autocast": {device: str(dtype).removeprefix("torch.") for device, dtype in capture.autocast.dtypes},
            "missing": packed.missing,
        }
        # Asked before the weights are copied to the host.
        self.refused, room = self._find_room(_count_bytes(packed.tensors))
        if self.refused:
            return None
        packed.tensors |= self._take_weights(capture.inner_model, room)
        return self._write(step, tree, packed.tensors)

    def _find_room(self, num_bytes: int) -> tuple[str, int]:
        """Return why `num_bytes` more cannot be kept, empty if they can; and how many bytes would then be left."""
        files = list((self.run_dir / FOLDER).glob("*.safetensors"))
        room = self.max_bytes - sum(file.stat().st_size for file in files) - num_bytes
        if len(files) >= self.max_batches:
            return f"{len(files)} batches are kept already", room
        return "" if room >= 0 else f"{num_bytes} more bytes would be over the bound of {self.max_bytes}", room

    def _take_weights(self, model: nn.Module | None, room: int) -> dict[str, Tensor]:
        """Return the model's state, when it is small enough; a replay elsewhere needs it, or a checkpoint."""
        state = {} if model is None else {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        if any(map(is_dtensor, state.values())):  # this rank's parts alone are of no use
            return {}
        if _count_bytes(state) > min(room, self.weights_share * self.max_bytes / self.max_batches):
            return {}
        # clone: tied weights share memory, which safetensors refuses.
        return {f"weights.{name}": t.detach().cpu().contiguous().clone() for name, t in state.items()}

    def _write(self, step: int, tree: Mapping[str, Any], tensors: dict[str, Tensor]) -> str:
        folder = self.run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{step:08d}"
        for suffix in (".safetensors", ".json"):
            aside = folder / f"{name}{suffix}.tmp"
            if suffix == ".json":
                aside.write_text(json.dumps(tree, allow_nan=False) + "\n", encoding="utf-8")
            else:
                save_file(tensors, aside)
            # The JSON comes second: a batch is found by it, so its tensors are in place by then.
            aside.replace(folder / f"{name}{suffix}")
        return f"{FOLDER}/{name}.json"


def load_batch(path: str | Path) -> SavedBatch:
    """Read a batch that `Quarantine.save` wrote."""
    path = Path(path)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(path.with_suffix(".safetensors"))
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"the saved batch {path} cannot be read: {error}. Was it copied with both of its files?"
        ) from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise UsageError(
            f"{path} is not a saved batch of format {FORMAT}. Give a batches/step-*.json of a run directory."
        )
    return SavedBatch(
        step=int(tree["step"]),
        scale=float(tree["scale"]),
        args=tuple(unpack(item, tensors) for item in tree["args"]),
        kwargs={name: unpack(item, tensors) for name, item in tree["kwargs"].items()},
        random=None if tree["random"] is None else unplain_random(unpack(tree["random"], tensors)),
        autocast=dict(tree["autocast"]),
        weights={name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")},
        missing=tuple(tree["missing"]),
        modules=tuple(place for place, item in enumerate(tree["args"]) if item["kind"] == "module"),
    )


def plain_random(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return generator states as tensors, numbers and lists."""
    version, numbers, gauss = state["python"]
    plain: dict[str, Any] = {"torch": state["torch"], "python": [version, torch.tensor(numbers, device="cpu"), gauss]}
    plain["cuda"] = {str(device): generator for device, generator in state["cuda"].items()}
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        # int64, since uint32 is not among the dtypes that every reader of safetensors knows.
        plain["numpy"] = [
            str(name),
            torch.tensor(keys.astype("int64"), device="cpu"),
            *(float(number) for number in rest),
        ]
    return plain


def unplain_random(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `restore_random` takes, without devices that are not available, or numpy if it is not imported."""
    version, numbers, gauss = plain["python"]
    state: dict[str, Any] = {"torch": plain["torch"], "python": (version, tuple(numbers.tolist()), gauss)}
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = {torch.device(device): generator for device, generator in plain["cuda"].items()}
    state["cuda"] = {device: g for device, g in devices.items() if (device.index or 0) < here}
    if "numpy" in plain and "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = plain["numpy"]
        array = sys.modules["numpy"].array(keys.tolist(), dtype="uint32")
        state["numpy"] = (name, array, int(position), int(has_gauss), cached)
    return state


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
