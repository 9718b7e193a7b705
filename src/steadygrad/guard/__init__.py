"""Guard: one training step made safe and measured.

`guard.py` holds the public class, `stages.py` spells out the order of a step, `build.py` builds the pieces. Each stage
is a file: `forward.py` and `backward.py` run the passes, `stepping.py` makes the step or skips it, `judging.py` judges
it once its numbers are on the host, `saving.py` saves. A stage receives only the few objects that it uses, grouped by
purpose: `Training` is what the user passed in, `Moment` the current position, `Watched` everything that measures the
parameters, `Optimizers` what steps, `Rollback` the way back.
"""

from steadygrad.guard.guard import Guard

__all__ = ["Guard"]
