"""StoreIO: what Lightning wants to save -> checkpoints of a CheckpointStore, and back.

Lightning's own files are pickles that are written in place; these are verified, atomic, finite and read without running
code, and the weights are safetensors under their own names. The path that Lightning names is not used: a store names
its folders by step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygrad.checkpoint import CheckpointStore
from steadygrad.checkpoint.load import Checkpoint
from steadygrad.errors import CheckpointError, NonFiniteStateError
from steadygrad.extras import import_extra
from steadygrad.trainer.files import read_checkpoint

logger = logging.getLogger("steadygrad")

CheckpointIO: Any = import_extra(
    "lightning", "lightning.pytorch.plugins.io", "pytorch_lightning.plugins.io", what="the recipe clip6d"
).CheckpointIO

WEIGHTS = "state_dict"
"""Where Lightning keeps the weights in what it saves."""
LIGHTNING = "lightning"
"""Where the rest of it lies in our checkpoints."""


class StoreIO(CheckpointIO):  # type: ignore[misc]
    """`Trainer(plugins=[StoreIO(store)])`: `trainer.save_checkpoint` and `fit(ckpt_path=...)` go through the store."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.metrics: Mapping[str, float] = {}
        """What the next checkpoint is told to have reached."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Lightning's; a state that is not finite is refused and told, and the training goes on."""
        rest = {key: value for key, value in checkpoint.items() if key != WEIGHTS}
        state = {"model": dict(checkpoint[WEIGHTS]), LIGHTNING: rest}
        try:
            self.store.save(state, step=checkpoint["global_step"], metrics=self.metrics)
        except NonFiniteStateError as error:
            logger.error("No checkpoint was saved: %s", error)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Lightning's; on the CPU."""
        found = self.store.load(path=path)
        assert found is not None
        return {**found.state[LIGHTNING], WEIGHTS: found.state["model"]}

    def remove_checkpoint(self, path: Any) -> None:
        """Lightning never does: the store makes room."""


def find_checkpoint(resume: str | None, run_dir: Path) -> Checkpoint | None:
    """The newest good checkpoint of this run (`latest`), its `best`, of another's folder, or the one `resume` is."""
    found = None if resume is None else read_checkpoint(run_dir, resume)
    if found is not None and LIGHTNING not in found.state:
        raise CheckpointError(f"{found.info.path} was not saved by clip6d. Give a run directory of this recipe.")
    return found
