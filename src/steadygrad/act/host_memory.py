"""How much host memory is free for this process: what the system has, and what its container allows."""

from __future__ import annotations

import os
from pathlib import Path

FALLBACK = 32 << 30
"""Free bytes to assume where the system does not say."""


def find_free_bytes() -> int:
    """Return how many bytes could be allocated now without swapping."""
    found = [size for size in (_read_meminfo(), _read_cgroup()) if size is not None]
    return min(found) if found else _read_pages() or FALLBACK


def _read_meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if words is None else int(words[1]) * 1024


def _read_cgroup() -> int | None:
    """Return what is left of the container's limit (cgroup v2 or v1), None without one. Page cache counts as free."""
    for folder, limit, used in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            # v1 has a huge number in place of "max"; the system's free memory is below it then.
            most, now = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
            stats = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        return max(0, most - now + int(stats.get("inactive_file", 0)))
    return None


def _read_pages() -> int | None:
    """Return half of all memory, for systems that report only the total: macOS."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None
