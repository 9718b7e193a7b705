"""Every scenario, by name, in the order of the families below."""

from __future__ import annotations

import importlib

from healthy.scenario import SCENARIOS

__all__ = ["FAMILIES", "SCENARIOS"]

FAMILIES = (
    "rl",
    "rl_worlds",
    "rl_policies",
    "rl_programs",
    "adversarial",
    "continual",
    "self_supervised",
    "generative",
    "solvers",
    "moving",
    "schedules",
    "stability",
    "objectives",
    "objectives_changed",
    "weights_changed",
    "weights_kept",
    "data",
    "models",
    "steps",
    "numbers",
    "directions",
    "effects",
)

for family in FAMILIES:
    importlib.import_module(f"healthy.{family}")
