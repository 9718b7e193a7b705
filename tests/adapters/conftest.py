"""Real frameworks bring warnings of their own; ours are still errors, and so is one that an adapter could cause."""

from __future__ import annotations

import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded here
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/adapters" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::steadygrad"))
            item.add_marker(pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step"))
