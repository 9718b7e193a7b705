"""Files of a run -> numbers to show: in bounded memory, whatever its length, and never from an incomplete line."""

from steadygrad.view.read.run import RunReader

__all__ = ["RunReader"]
