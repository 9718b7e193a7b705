"""Files written past the page cache hold the given bytes, even if the system refuses direct writes."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest

from steadygrad.disk import direct
from steadygrad.disk.direct import BLOCK_BYTES, read_at, write_all


def make_memory(num_bytes: int) -> memoryview:
    """Return writable random bytes that start at a memory page."""
    memory = mmap.mmap(-1, num_bytes)
    memory.write(random.Random(num_bytes).randbytes(num_bytes))
    return memoryview(memory)


def write_file(path: Path, pieces: list[memoryview]) -> int:
    with path.open("xb", buffering=0) as file:
        return sum(write_all(file.fileno(), piece) for piece in pieces)


def allows_direct(folder: Path) -> bool:
    """Whether files of this folder can bypass the cache; some file systems refuse."""
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("sizes", [[5], [BLOCK_BYTES], [2 * BLOCK_BYTES, BLOCK_BYTES + 7], [7, 3 * BLOCK_BYTES, 1], []])
@pytest.mark.parametrize("start", [0, 1])
def test_a_file_holds_the_given_bytes_at_any_offset_and_size(tmp_path: Path, sizes: list[int], start: int) -> None:
    pieces = [make_memory(size + start)[start:] for size in sizes]
    assert write_file(tmp_path / "file", pieces) == sum(sizes)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7])
def test_reading_returns_what_the_file_holds(tmp_path: Path, size: int) -> None:
    whole = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(whole)
    with (tmp_path / "file").open("rb") as file:
        parts = [bytes(read_at(file.fileno(), 2 * BLOCK_BYTES, start)) for start in range(0, size, 2 * BLOCK_BYTES)]
    assert b"".join(parts) == whole


def test_whole_blocks_bypass_the_cache_and_the_rest_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    write = os.write

    def watch(descriptor: int, data: memoryview) -> int:
        import fcntl

        seen.append((len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watch)
    write_file(tmp_path / "file", [make_memory(2 * BLOCK_BYTES + 5)])
    assert seen == (
        [(2 * BLOCK_BYTES, True), (5, False)] if allows_direct(tmp_path) else [(2 * BLOCK_BYTES + 5, False)]
    )


def test_a_system_without_direct_writes_uses_ordinary_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, *, on: bool) -> None:
        if on:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(direct, "_set_direct", refuse)
    piece = make_memory(3 * BLOCK_BYTES)
    write_file(tmp_path / "file", [piece])
    assert (tmp_path / "file").read_bytes() == piece


def test_a_failing_disk_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", [make_memory(BLOCK_BYTES)])
