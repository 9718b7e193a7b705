"""Run by Python at the start of every process that a script under `steadygrad run` has started; see children.py.

The environment's own `sitecustomize`, if there is one, runs first, as it would without this one. Raises only what that
one raises, at the end: Python then prints it, as it would have.
"""

import contextlib
import importlib
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
# Out of the path and out of sys.modules, or the import below would find this very file again.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _folder]
_ours = sys.modules.pop(__name__, None)
_error: Exception | None = None
try:
    importlib.import_module(__name__)  # the next one on the path
except Exception as error:
    if not (isinstance(error, ImportError) and error.name == __name__):  # there is no other one
        _error = error

if _ours is not None:
    sys.modules.setdefault(__name__, _ours)  # the import system looks for it when this file is done
with contextlib.suppress(Exception):  # another interpreter, without steadygrad or too old for it
    from steadygrad.adapters.scripts.children import arm

    arm()
if _error is not None:
    raise _error
