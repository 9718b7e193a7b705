"""`mmdit.json` of a run directory: what the model looks like, so that samples need no data, and how it went on.

Written aside and renamed. It holds plain values only.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.config.plain import build, to_plain
from steadygrad.errors import UsageError
from steadygrad_recipes.mmdit.config import MMDiTConfig, ModelConfig
from steadygrad_recipes.mmdit.data import Corpus
from steadygrad_recipes.mmdit.model import MMDiT, Shapes

NAME = "mmdit.json"


@dataclass(frozen=True)
class Description:
    """What is written down."""

    shapes: dict[str, Any]
    model: dict[str, Any]
    vocab: list[str] | None
    asked_lr: float
    """The learning rate of the settings."""
    lr: float
    """The one that is trained with: lower after a recovery."""

    @classmethod
    def of(cls, config: MMDiTConfig, corpus: Corpus) -> Description:
        """Of a training that begins."""
        words = None if corpus.vocab is None else list(corpus.vocab)
        rate = config.optimizer.lr
        return cls(dataclasses.asdict(corpus.shapes), to_plain(config.model), words, rate, rate)

    @classmethod
    def read(cls, run_dir: Path) -> Description:
        """Of a run."""
        try:
            return cls(**json.loads((run_dir / NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{run_dir} is no run of mmdit: {NAME} cannot be used ({error}). Train first, or give --run-dir."
            ) from None

    def write(self, run_dir: Path) -> None:
        """Whole or not at all."""
        run_dir.mkdir(parents=True, exist_ok=True)
        aside = run_dir / f"{NAME}.tmp"
        aside.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")
        aside.replace(run_dir / NAME)

    def make_model(self) -> MMDiT:
        """An untrained model of this shape."""
        return MMDiT(build(ModelConfig, self.model), Shapes(**self.shapes))
