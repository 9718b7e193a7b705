"""Files of a run -> numbers to show: bounded memory, whatever the run's length, and never a line that is half there."""

from steadygrad.view.read.run import RunReader

__all__ = ["RunReader"]
