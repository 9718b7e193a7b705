"""Bytes -> a file and back, past the page cache where the system allows it, and through it elsewhere. Knows no torch.

A checkpoint is written once and seldom read: in the page cache it would push out the training's own data, and finding
pages for a gigabyte can take longer than writing it. Memory goes straight to the disk only where address, position and
size are whole blocks; the rest, and systems that refuse, use ordinary writes. Not durable before fsync, as always. Data
read back this way comes from the disk, not from the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading

BLOCK_BYTES = 4096
"""A multiple of the block size of every disk in use, and a page of memory on most systems."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_own = threading.local()


def write_all(descriptor: int, data: memoryview) -> int:
    """Write all of it at the file's position, in as many parts as the system takes; return the number of bytes."""
    done = _write_blocks(descriptor, data) if _fits_blocks(descriptor, data) else 0
    _write(descriptor, data[done:])
    return len(data)


def _write_blocks(descriptor: int, data: memoryview) -> int:
    """Write its whole blocks past the cache; return how many bytes were written, fewer if the system refuses.

    Systems refuse with many codes, some only for this memory; if the disk itself fails, the ordinary write fails next.
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
    """Read `num_bytes` in whole blocks, fewer at the end, into memory that this thread's next call reuses."""
    memory: mmap.mmap | None = getattr(_own, "memory", None)
    if memory is None or len(memory) < num_bytes:
        memory = _own.memory = mmap.mmap(-1, num_bytes)  # shared: a fork meanwhile must not take pages from the read
    view = memoryview(memory)[:num_bytes]
    with contextlib.suppress(OSError):
        _set_direct(descriptor, on=True)
        return view[: _read(descriptor, view, start)]
    _set_direct(descriptor, on=False)
    return view[: _read(descriptor, view, start)]


def _read(descriptor: int, view: memoryview, start: int) -> int:
    """Fill `view` up to the file's end, in as many parts as the system gives; return the number of bytes."""
    done, end = 0, min(len(view), os.fstat(descriptor).st_size - start)
    while done < end:
        got = os.preadv(descriptor, [view[done:]], start + done)
        if not got:
            break
        done += got
    return done
