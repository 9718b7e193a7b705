"""What `from steadygrad import Guard` may load: torch, our own modules, and nothing slow or unused."""

from __future__ import annotations

import subprocess
import sys

SLOW = (
    "sympy",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch._dynamo",
    "triton",
    "matplotlib",
    "rich",
)
UNUSED = (
    "steadygrad.act.engine",  # DeepSpeed
    "steadygrad.act.zero",
    "steadygrad.scan.checkpoint_scan",
    "steadygrad.view.plot",
    "steadygrad.view.rate_plot",
    "steadygrad.view.render",
    "steadygrad.view.serve",
    "steadygrad.losses",
    "steadygrad.trainer",
    "steadygrad.adapters",
    "steadygrad.cli",
)
"""Our parts that a plain training never uses."""


def test_importing_guard_loads_nothing_slow_or_unused() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from steadygrad import Guard; "
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "steadygrad.guard.guard" in loaded
    assert not [name for name in loaded if name.startswith(SLOW)]
    assert not [name for name in loaded if name in UNUSED or name.rpartition(".")[0] in UNUSED]
