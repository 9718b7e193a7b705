"""Bytes -> a file and back, past the page cache where the system allows it, and through it elsewhere. Knows no torch.

A checkpoint is written once and seldom read: kept in the page cache it pushes out the training's own data, and finding
pages for a gigabyte can take longer than the disk needs for it. Memory goes straight to the disk only where address,
position and size are whole blocks; the rest, and every system that refuses, takes the ordinary way. Not durable before
fsync, as ever. What is read back so comes from the disk, not from what the system still remembers of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading

BLOCK_BYTES = 4096
"""Whole blocks for every disk in use, and a page of memory on most systems."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_own = threading.local()


def write_all(descriptor: int, data: memoryview) -> int:
    """Write it all at the file's position, in as many parts as the system takes; how much it was."""
    done = _write_blocks(descriptor, data) if _fits_blocks(descriptor, data) else 0
    _write(descriptor, data[done:])
    return len(data)


def _write_blocks(descriptor: int, data: memoryview) -> int:
    """Write the whole blocks of it past the cache; how many bytes that were, fewer where the system refuses.

    Systems refuse with many codes, some for this memory only; a disk that fails fails the ordinary way next.
    """
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        with contextlib.suppress(OSError):
            _set_direct(descriptor, on=True)
            _write(descriptor, data[: len(data) - len(data) % BLOCK_BYTES])
    finally:
        _set_direct(descriptor, on=False)
    return os.lseek(descriptor, 0, os.SEEK_CUR) - position


def _fits_blocks(descriptor: int, data: memoryview) -> bool:
    if not _DIRECT or data.readonly or len(data) < BLOCK_BYTES:
        return False
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
    return address % BLOCK_BYTES == 0 and os.lseek(descriptor, 0, os.SEEK_CUR) % BLOCK_BYTES == 0


def _set_direct(descriptor: int, *, on: bool) -> None:
    if not _DIRECT:
        return
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)


def _write(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def read_at(descriptor: int, num_bytes: int, start: int) -> memoryview:
    """`num_bytes` from whole blocks, fewer at the end, in memory that this thread's next call uses again."""
    memory: mmap.mmap | None = getattr(_own, "memory", None)
    if memory is None or len(memory) < num_bytes:
        memory = _own.memory = mmap.mmap(-1, num_bytes)  # shared: a fork meanwhile takes no page away from the disk
    view = memoryview(memory)[:num_bytes]
    with contextlib.suppress(OSError):
        _set_direct(descriptor, on=True)
        return view[: _read(descriptor, view, start)]
    _set_direct(descriptor, on=False)
    return view[: _read(descriptor, view, start)]


def _read(descriptor: int, view: memoryview, start: int) -> int:
    """Fill `view` up to the file's end, in as many parts as the system gives; how much there was."""
    done, end = 0, min(len(view), os.fstat(descriptor).st_size - start)
    while done < end:
        got = os.preadv(descriptor, [view[done:]], start + done)
        if not got:
            break
        done += got
    return done
