"""Guard: one training step made safe and measured.

`guard.py` is what people call, `stages.py` spells out the order of a step, `build.py` makes what it consists of. Each
stage is a file: `forward.py` and `backward.py` run the passes, `stepping.py` makes the step or skips it, `judging.py`
judges it when its numbers are on the host, `saving.py` saves. A stage is given the few things that it uses, and what
belongs together is one thing: `Training` what the user gave, `Moment` where it is, `Watched` what looks at the
parameters, `Optimizers` what steps, `Rollback` the way back.
"""

from steadygrad.guard.guard import Guard

__all__ = ["Guard"]
