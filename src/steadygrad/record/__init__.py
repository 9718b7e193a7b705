"""Facts -> sinks. Records a step's scalars, per-parameter numbers and incidents."""

from steadygrad.record.recorder import Recorder
from steadygrad.record.run_directory import RunDirectory
from steadygrad.record.sink import Sink

__all__ = ["Recorder", "RunDirectory", "Sink"]
