"""Findings -> Verdicts. Pure: no torch, no clock, no side effect. `Judge` decides, by the table in `table.py`."""

from __future__ import annotations

from steadygrad.decide.early_stopping import EarlyStopping
from steadygrad.decide.judge import Judge
from steadygrad.decide.reflex import decide
from steadygrad.decide.table import Rung, build_table

__all__ = ["EarlyStopping", "Judge", "Rung", "build_table", "decide"]
