"""Settings: frozen, keyword-only, checked on construction, without torch.

Each value object owns its fields and says under each what it means. A wrong value fails here, before the first step,
with the field's name, the value found and what to write instead. `GuardConfig.load` reads YAML or TOML and names
every unknown or wrong field at once.
"""

from steadygrad.config.checkpoint import CheckpointConfig
from steadygrad.config.clip import (
    AdaGC,
    AdaptiveUnitClip,
    AutoClip,
    ClipStrategy,
    ClipValue,
    FixedNorm,
    OutlierClip,
    ZClip,
)
from steadygrad.config.detect import (
    DetectConfig,
    FlowThresholds,
    ForecastConfig,
    HabitThresholds,
    LayerThresholds,
    LossThresholds,
    ValidationThresholds,
)
from steadygrad.config.guard import GuardConfig
from steadygrad.config.parts import (
    DiagnoseConfig,
    Implementation,
    Interval,
    MeasureConfig,
    Precision,
    RecordConfig,
    SnapshotConfig,
)
from steadygrad.config.plain import build, read_mapping
from steadygrad.config.policy import Policy
from steadygrad.config.prove import ProveConfig

__all__ = [
    "AdaGC",
    "AdaptiveUnitClip",
    "AutoClip",
    "CheckpointConfig",
    "ClipStrategy",
    "ClipValue",
    "DetectConfig",
    "DiagnoseConfig",
    "FixedNorm",
    "FlowThresholds",
    "ForecastConfig",
    "GuardConfig",
    "HabitThresholds",
    "Implementation",
    "Interval",
    "LayerThresholds",
    "LossThresholds",
    "MeasureConfig",
    "OutlierClip",
    "Policy",
    "Precision",
    "ProveConfig",
    "RecordConfig",
    "SnapshotConfig",
    "ValidationThresholds",
    "ZClip",
    "build",
    "read_mapping",
]
