"""Guard: one training step made safe and measured.

`guard.py` spells out the order of the stages and is what people call; `parts.py` builds what it consists of,
`stepping.py` makes the step or skips it, `judging.py` judges it when its numbers are on the host, `summary.py` tells
about it. They meet in `Parts` and `Moment` alone.
"""

from steadygrad.guard.guard import Guard

__all__ = ["Guard"]
