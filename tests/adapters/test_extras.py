"""Without a framework: steadygrad imports, and an adapter says which extra to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import steadygrad

BLOCKED = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def run_python(code: str, *blocked: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(steadygrad.__file__).parent.parent)}
    code = BLOCKED.format(names=blocked) + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_adapter_without_its_library_names_its_extra() -> None:
    code = (
        "import steadygrad\n"
        "try:\n    import steadygrad.adapters.lightning\n"
        "except ImportError as error: print(error)\n"
        "try:\n    import steadygrad.adapters.transformers\n"
        "except ImportError as error: print(error)\n"
    )
    printed = run_python(code, "lightning", "lightning.pytorch", "pytorch_lightning", "transformers")
    assert "pip install 'steadygrad[lightning]'" in printed
    assert "pip install 'steadygrad[transformers]'" in printed


def test_a_guard_loads_no_framework() -> None:
    code = (
        "from steadygrad import Guard\n"
        "print(*(n for n in ('lightning', 'transformers', 'accelerate') if sys.modules.get(n)), 'end')\n"
    )
    assert run_python(code).split() == ["end"]
