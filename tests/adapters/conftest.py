"""Real frameworks emit their own warnings; ours are still errors, and so are warnings that an adapter could cause."""

from __future__ import annotations

import logging
import os
import sys

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


@pytest.fixture(autouse=True)
def fresh_accelerate() -> None:
    """Reset accelerate's process-wide settings: the Trainer of an earlier test must not affect this one."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
