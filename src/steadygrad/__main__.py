"""`python -m steadygrad` is the command `steadygrad`."""

from __future__ import annotations

import sys

from steadygrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
