"""StoreIO: what Lightning saves -> checkpoints of a CheckpointStore, and back.

Lightning's own files are pickles written in place; these are verified, atomic, finite and readable without running
code, and the weights are safetensors under their own names. The path that Lightning passes is ignored: a store names
its folders by step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygrad.checkpoint import CheckpointStore
from steadygrad.checkpoint.catalogue import ENDS_EPOCH
from steadygrad.errors import CheckpointError, NonFiniteStateError
from steadygrad.extras import import_extra
from steadygrad.trainer.files import read_checkpoint

logger = logging.getLogger("steadygrad")

CheckpointIO: Any = import_extra(
    "lightning", "lightning.pytorch.plugins.io", "pytorch_lightning.plugins.io", what="the recipe clip6d"
).CheckpointIO

WEIGHTS = "state_dict"
"""Key under which Lightning saves the weights."""
LIGHTNING = "lightning"
"""Key under which our checkpoints hold the rest."""


class StoreIO(CheckpointIO):  # type: ignore[misc]
    """`Trainer(plugins=[StoreIO(store)])`: `trainer.save_checkpoint` and `fit(ckpt_path=...)` go through the store."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.metrics: Mapping[str, float] = {}
        """Metrics to record with the next checkpoint."""
        self.ends_epoch = False
        """Whether that is the one at the end of an epoch."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Save for Lightning; a state that is not finite is rejected and reported, and training continues."""
        rest = {key: value for key, value in checkpoint.items() if key != WEIGHTS}
        state = {"model": dict(checkpoint[WEIGHTS]), LIGHTNING: rest}
        try:
            about = {ENDS_EPOCH: True} if self.ends_epoch else {}
            self.store.save(state, step=checkpoint["global_step"], metrics=self.metrics, about=about)
        # A disk that fails does not raise: the store reports it and the next save tries again
        except NonFiniteStateError as error:
            logger.error("No checkpoint was saved: %s", error)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Load for Lightning, on the CPU."""
        found = self.store.load(path=path)
        assert found is not None
        return {**found.state[LIGHTNING], WEIGHTS: found.state["model"]}

    def remove_checkpoint(self, path: Any) -> None:
        """Do nothing: Lightning never calls it, and the store removes old checkpoints itself."""


def find_start(resume: str | None, run_dir: Path) -> tuple[Path, int] | None:
    """Return path and step of a run's newest good checkpoint (`latest`), its `best`, or the one at `resume`."""
    found = None if resume is None else read_checkpoint(run_dir, resume)
    if found is not None and LIGHTNING not in found.state:
        raise CheckpointError(f"{found.info.path} was not saved by clip6d. Give a run directory of this recipe.")
    return None if found is None else (found.info.path, found.step)
