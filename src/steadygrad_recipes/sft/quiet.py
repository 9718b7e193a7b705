"""Suppresses what the libraries do around a small training while it runs, and restores it afterwards.

transformers and peft warn about things that are intended here; on a CPU, threads of a model this small only wait for
each other.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from steadygrad.extras import import_extra
from steadygrad_recipes.sft.config import SftConfig

_logging = import_extra("transformers", "transformers.utils.logging", what="the recipe sft")

EXPECTED = ("Setting `save_embedding_layers` to `True`",)  # the made model's, which are trained
"""Warnings about things that are intended."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Turn off transformers' own progress bars and advice between our lines."""
    log = logging.getLogger("transformers")
    level, bars = log.level, _logging.is_progress_bar_enabled()
    log.setLevel(logging.ERROR)
    _logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            for message in EXPECTED:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        log.setLevel(level)
        if bars:
            _logging.enable_progress_bar()


@contextmanager
def use_few_threads(config: SftConfig) -> Iterator[None]:
    """Use one thread for the built model; a model from a folder gets torch's default."""
    before = torch.get_num_threads()
    if config.model is None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
