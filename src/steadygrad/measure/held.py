"""All live objects -> the parameters that some optimizer holds.

Only when a suspicion is to be settled, since all objects of the process are searched. Reads only.
"""

from __future__ import annotations

import torch

from steadygrad.state.live_objects import list_live


def find_held() -> set[int]:
    """Return the ids of the parameters of every live optimizer."""
    groups = [group for one in list_live(torch.optim.Optimizer) for group in vars(one).get("param_groups", ())]
    return {id(p) for group in groups for p in group["params"]}
