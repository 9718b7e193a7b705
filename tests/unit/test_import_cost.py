"""What `from steadygrad import Guard` may load: torch, ourselves, and nothing that is slow to import."""

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


def test_importing_guard_loads_nothing_slow_that_torch_has_not_loaded() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from steadygrad import Guard; "
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "steadygrad.guard.guard" in loaded
    assert not [name for name in loaded if name.startswith(SLOW)]
