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
_refusing: set[int] = set()
"""Disks, by number, that have refused to be read past the cache."""


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
        # Before any ordinary write: while the flag is set, the kernel refuses a size that is not whole blocks.
        _set_direct(descriptor, on=False)
    return os.lseek(descriptor, 0, os.SEEK_CUR) - position


def _fits_blocks(descriptor: int, data: memoryview) -> bool:
    if not _DIRECT or data.readonly or len(data) < BLOCK_BYTES:  # ctypes takes the address of writable memory only
        return False
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
    return address % BLOCK_BYTES == 0 and os.lseek(descriptor, 0, os.SEEK_CUR) % BLOCK_BYTES == 0


def _set_direct(descriptor: int, *, on: bool) -> None:
    if not _DIRECT:
        return
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)


def _is_direct(descriptor: int) -> bool:
    import fcntl

    return bool(_DIRECT and fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def _write(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def read_at(descriptor: int, num_bytes: int, start: int) -> memoryview:
    """Read `num_bytes` in whole blocks, fewer at the end, into memory that this thread's next call reuses."""
    memory: mmap.mmap | None = getattr(_own, "memory", None)
    if memory is None or len(memory) < num_bytes:
        memory = _own.memory = mmap.mmap(-1, num_bytes)  # shared: a fork meanwhile must not take pages from the read
    view = memoryview(memory)[:num_bytes]
    disk = os.fstat(descriptor).st_dev
    if disk not in _refusing:
        try:
            _set_direct(descriptor, on=True)
            return view[: _read(descriptor, view, start)]
        except OSError:
            _refusing.add(disk)
    # The flag belongs to the open file: a thread that shares the descriptor, and began before the disk was known to
    # refuse, may switch it on once more.
    while True:
        _set_direct(descriptor, on=False)
        try:
            return view[: _read(descriptor, view, start)]
        except OSError:
            if not _is_direct(descriptor):
                raise


def _read(descriptor: int, view: memoryview, start: int) -> int:
    """Fill `view` up to the file's end, in as many parts as the system gives; return the number of bytes."""
    done, end = 0, min(len(view), os.fstat(descriptor).st_size - start)
    while done < end:
        got = os.preadv(descriptor, [view[done:]], start + done)
        # The file became shorter since fstat; a loop that waits for the rest would never end.
        if not got:
            break
        done += got
    return done
