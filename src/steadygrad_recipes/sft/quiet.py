"""What the libraries do around a small training, put off while it runs, and put back after it.

transformers and peft speak of things that are as they should be here; on a CPU, threads of a model this small only wait
for each other.
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
"""Warnings about what is meant to be so."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without transformers' own bars and advice between our lines."""
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
    """One thread for the made model; a folder's model gets what torch would take."""
    before = torch.get_num_threads()
    if config.model is None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
