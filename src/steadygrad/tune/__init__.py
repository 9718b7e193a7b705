"""Settings chosen by how stable training is with them: a range test, trials from one state, evidence for each choice.

`steadygrad tune` is the way in; a script of one's own gives it a `Tunable`. The model is left bit for bit as it was.
"""

from steadygrad.tune.tunable import Tunable

__all__ = ["Tunable"]
