"""The exit codes of every command."""

from __future__ import annotations

DONE = 0
"""Did its job."""
FOUND = 1
"""Did its job, which was to look for something, and found it."""
FAILED = 2
"""Could not do it."""
