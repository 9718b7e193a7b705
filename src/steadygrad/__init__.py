"""steadygrad keeps PyTorch training numerically healthy.

    guard = Guard(model, optimizer)
    for batch in loader:
        guard.step(training_step, batch)

Names that need torch are loaded when they are first used, so that `import steadygrad` is quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from steadygrad._version import __version__
from steadygrad.config import (
    AdaGC,
    AdaptiveUnitClip,
    AutoClip,
    CheckpointConfig,
    ClipValue,
    DetectConfig,
    DiagnoseConfig,
    FixedNorm,
    GuardConfig,
    MeasureConfig,
    OutlierClip,
    Policy,
    Precision,
    ProveConfig,
    RecordConfig,
    SnapshotConfig,
    ZClip,
)
from steadygrad.config.trainer import TrainerConfig
from steadygrad.errors import (
    ConfigError,
    NonFiniteError,
    SteadygradError,
    TrainingHalted,
    UnsupportedError,
    UsageError,
)
from steadygrad.facts import Action, Cause, Finding, Incident, Reading, Severity, StepRecord

if TYPE_CHECKING:
    from steadygrad import diagnose, losses, nn
    from steadygrad.act.precision import choose_precision, conservative_scaler
    from steadygrad.act.sanitize import handle_nan_inf
    from steadygrad.checkpoint import CheckpointStore
    from steadygrad.guard import Guard
    from steadygrad.measure.check import check_nan_inf
    from steadygrad.monitor import ActivationMonitor, GradientHealthMonitor
    from steadygrad.record.logger import LoggerSink
    from steadygrad.record.mlflow import MlflowSink
    from steadygrad.record.tensorboard import TensorBoardSink
    from steadygrad.record.trackio import TrackioSink
    from steadygrad.record.wandb import WandbSink
    from steadygrad.scan.foreign import load_checkpoint
    from steadygrad.trainer import Trainer

__all__ = [
    "Action",
    "ActivationMonitor",
    "AdaGC",
    "AdaptiveUnitClip",
    "AutoClip",
    "Cause",
    "CheckpointConfig",
    "CheckpointStore",
    "ClipValue",
    "ConfigError",
    "DetectConfig",
    "DiagnoseConfig",
    "Finding",
    "FixedNorm",
    "GradientHealthMonitor",
    "Guard",
    "GuardConfig",
    "Incident",
    "LoggerSink",
    "MeasureConfig",
    "MlflowSink",
    "NonFiniteError",
    "OutlierClip",
    "Policy",
    "Precision",
    "ProveConfig",
    "Reading",
    "RecordConfig",
    "Severity",
    "SnapshotConfig",
    "SteadygradError",
    "StepRecord",
    "TensorBoardSink",
    "TrackioSink",
    "Trainer",
    "TrainerConfig",
    "TrainingHalted",
    "UnsupportedError",
    "UsageError",
    "WandbSink",
    "ZClip",
    "__version__",
    "check_nan_inf",
    "choose_precision",
    "conservative_scaler",
    "diagnose",
    "handle_nan_inf",
    "load_checkpoint",
    "losses",
    "nn",
]

_LAZY = {
    "WandbSink": "steadygrad.record.wandb",
    "TensorBoardSink": "steadygrad.record.tensorboard",
    "TrackioSink": "steadygrad.record.trackio",
    "MlflowSink": "steadygrad.record.mlflow",
    "LoggerSink": "steadygrad.record.logger",
    "CheckpointStore": "steadygrad.checkpoint",
    "ActivationMonitor": "steadygrad.monitor",
    "GradientHealthMonitor": "steadygrad.monitor",
    "Guard": "steadygrad.guard",
    "Trainer": "steadygrad.trainer",
    "check_nan_inf": "steadygrad.measure.check",
    "choose_precision": "steadygrad.act.precision",
    "conservative_scaler": "steadygrad.act.precision",
    "handle_nan_inf": "steadygrad.act.sanitize",
    "load_checkpoint": "steadygrad.scan.foreign",
}
_PACKAGES = ("diagnose", "losses", "nn")
"""Exported as they are; `diagnose` can be called."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"steadygrad.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'steadygrad' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value  # so that this function is not called for it again
    _note_loads()
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _note_loads() -> None:
    """Once torch is there, note which weights a program loads: that happens before it makes a Guard."""
    # Never imports torch: a process without it pays nothing. None is how a program blocks an import
    if sys.modules.get("torch") is not None and os.environ.get("STEADYGRAD") != "off":
        importlib.import_module("steadygrad.measure.loads").install()


_note_loads()
