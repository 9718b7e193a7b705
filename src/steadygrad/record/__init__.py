"""Facts -> sinks. What is written down: a step's scalars, per-parameter numbers, incidents."""

from steadygrad.record.recorder import Recorder, Sink
from steadygrad.record.run_directory import RunDirectory

__all__ = ["Recorder", "RunDirectory", "Sink"]
