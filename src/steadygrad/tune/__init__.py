"""Settings chosen for stable training: a range test, trials from one common state, evidence for each choice.

The entry point is `steadygrad tune`; your own script gives it a `Tunable`. The model is left bit for bit as it was.
"""

from steadygrad.tune.tunable import Tunable

__all__ = ["Tunable"]
