"""Scan: damaged, lying, malicious and slow files end in a clear error, at once, and nothing is run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import FORMATS, Payload, make_weights, write_distributed, write_legacy, write_torch
from torch import Tensor

from steadygrad.errors import CheckpointError, SteadygradError, UnsafePickleError
from steadygrad.scan.checkpoint_scan import scan_checkpoint
from steadygrad.scan.inert import BrokenPickle, Name, read_pickle
from steadygrad.scan.readers.formats import read_contents

pytestmark = pytest.mark.timeout(60)
Writer = Callable[[Path, dict[str, Tensor]], Path]


def interpret(data: bytes) -> object:
    return read_pickle(io.BytesIO(data), lambda name: False, lambda identity: identity).value


def write_archive(path: Path, data: bytes, records: dict[str, bytes] | None = None, compression: int = 0) -> Path:
    """Return an archive like torch.save's, around a custom pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, record in {"data.pkl": data, **(records or {})}.items():
            archive.writestr(f"x/{name}", record)
    return path


def pickle_tensor(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, count: int = 4) -> bytes:
    """Return a pickle of one float32 tensor on storage "0", with any numbers."""
    opcodes = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + dump(count) + b"tQ",
        *(dump(value) for value in (offset, shape, stride, False)),
        b"}tR.",
    ]
    return b"".join(opcodes)


def dump(value: object) -> bytes:
    """Return the opcodes of a number or a tuple of numbers, without frame and end."""
    return pickle.dumps(value, 2)[2:-1]


# --- code ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("form", ["archive", "stream", "bare pickle"])
def test_a_malicious_pickle_is_refused_by_name_and_not_run(form: str, protocol: int, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "evil.pt"
    state = {"weight": torch.ones(3), "payload": Payload(mark)}
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(state["payload"], protocol))
    else:
        new = form == "archive"
        torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=new)

    with pytest.raises(UnsafePickleError, match=r"posix\.mkdir\('/"):
        scan_checkpoint(path)
    assert not mark.exists()

    if form != "bare pickle":  # the payload works
        torch.load(path, weights_only=False)
        assert mark.exists()


def test_the_metadata_of_a_distributed_checkpoint_is_not_run_either(tmp_path: Path) -> None:
    folder = write_distributed(tmp_path, {"a": torch.ones(3)})
    mark = tmp_path / "mark"
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))

    with pytest.raises(UnsafePickleError, match=r"posix\.mkdir"):
        scan_checkpoint(folder)
    assert not mark.exists()

    pickle.loads((folder / ".metadata").read_bytes())  # torch's own reader runs it
    assert mark.exists()


def test_a_pickled_module_is_refused_with_the_name_of_its_class(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match=r"torch\.nn\.modules\.linear\.Linear"):
        scan_checkpoint(tmp_path / "x.pt")


def test_names_are_never_resolved() -> None:
    value = interpret(b"\x80\x02cno_such_module\nno_such_name\n.")
    assert value == Name("no_such_module", "no_such_name")


@pytest.mark.parametrize("data", [b"\x80\x02cos\nsystem\n}b.", b"\x80\x02cos\nsystem\n}X\x01\x00\x00\x00aK\x01sb."])
def test_the_state_of_an_unresolved_name_is_dropped(data: bytes) -> None:
    assert interpret(data) == Name("os", "system")
    assert not hasattr(os.system, "a")


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.pt", b"\x80\x02}.", {"code/__torch__.py": b"def forward(self): pass"})
    with pytest.raises(SteadygradError, match=r"TorchScript"):
        scan_checkpoint(path)


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", list(FORMATS.values())[:3], ids=list(FORMATS)[:3])
def test_every_truncation_raises_an_error(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path, make_weights())
    data = path.read_bytes()
    chooser = random.Random(0)
    for length in [0, 1, 7, 8, 9, len(data) - 1, *(chooser.randrange(len(data)) for _ in range(40))]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=path.name):
            scan_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("safetensors", ""),
        ("torch", ""),
        ("legacy", ""),
        ("distributed", ".metadata"),
        ("distributed", "__0_0.distcp"),
        ("shards", "model.safetensors.index.json"),
    ],
)
def test_a_flipped_bit_gives_an_error_or_a_scan_and_never_a_crash(name: str, part: str, tmp_path: Path) -> None:
    whole = FORMATS[name](tmp_path, {"a": torch.ones(5), "b": torch.ones(3, 2)})
    path = whole / part if part else whole
    data = path.read_bytes()
    chooser = random.Random(1)
    outcomes = {"error": 0, "scan": 0}
    for _ in range(250):
        place = chooser.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chooser.randrange(8)]) + data[place + 1 :])
        try:
            scan_checkpoint(whole, num_threads=1)
            outcomes["scan"] += 1
        except SteadygradError as error:
            assert str(whole) in str(error)  # noqa: PT017
            outcomes["error"] += 1
    assert min(outcomes.values()) > 0


def test_a_truncated_shard_is_reported_by_name(tmp_path: Path) -> None:
    folder = write_distributed(tmp_path, {"a": torch.ones(3)})
    (part,) = folder.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"distcp"):
        scan_checkpoint(folder)


def header(entries: object, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (struct.pack("<Q", 1 << 62) + b"{}", "header claims"),
        (struct.pack("<Q", 99_000_000) + b"{}", "header claims"),
        (header(b"{not json"), "not JSON"),
        (header(b"[" * 100_000), "not JSON"),
        (header([1, 2]), "not a JSON object"),
        (header({"a": 3}), "no dtype, shape or place"),
        (header({"a": {**GOOD, "shape": [-2]}}, bytes(8)), "no dtype, shape or place"),
        (header({"a": {**GOOD, "shape": [True]}}, bytes(8)), "no dtype, shape or place"),
        (header({"a": {**GOOD, "shape": [1 << 70, 1 << 70]}}, bytes(8)), "does not fit into 8 bytes"),
        (header({"a": {**GOOD, "data_offsets": [0, 1 << 60]}}, bytes(8)), "the file ends at 8"),
        (header({"a": {**GOOD, "data_offsets": [8, 0]}}, bytes(8)), "claims bytes 8 to 0"),
        (header({"a": GOOD, "b": GOOD}, bytes(8)), "overlaps"),
        (header({"a": GOOD}, bytes(12)), "4 bytes at the end"),
        (header({"a": {**GOOD, "data_offsets": [4, 12]}}, bytes(12)), "leaves a gap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lying_safetensors_header_raises_an_error(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        scan_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "data",
    [
        pickle_tensor((5,), (1,)),
        pickle_tensor((2,), (1 << 60,)),
        pickle_tensor((1 << 40,), (1,)),
        pickle_tensor((4,), (1,), offset=1),
        pickle_tensor((4,), (1,), offset=-1),
        pickle_tensor((-4,), (1,)),
        pickle_tensor((4,), (-1,)),
        pickle_tensor((4, 1), (1,)),
    ],
)
def test_a_tensor_beyond_its_storage_raises_an_error(data: bytes, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.pt", data, {"data/0": bytes(16)})
    with pytest.raises(CheckpointError, match=r"is damaged|cannot be used"):
        scan_checkpoint(path)


def test_the_same_tensor_within_its_storage_is_accepted(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.pt", pickle_tensor((4,), (1,)), {"data/0": bytes(16)})
    assert scan_checkpoint(path).tensors[0].num_zeros == 4


# --- waste of time and memory -------------------------------------------------------------------------------------


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = write_archive(tmp_path / "x.pt", bytes(64 << 20), compression=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(SteadygradError, match=r"compressed or encrypted"):
        scan_checkpoint(bomb)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_with_one_name_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for data in (b"\x80\x02}.", b"\x80\x02N."):
            archive.writestr("x/data.pkl", data)
    with pytest.raises(CheckpointError, match=r"two records"):
        scan_checkpoint(tmp_path / "x.pt")


def test_nested_tuples_are_never_hashed() -> None:
    doubled = b"\x80\x02)" + b"q\x00h\x00\x86" * 200  # t = (t, t): its hash takes 2**200 steps
    with pytest.raises(BrokenPickle, match=r"a key that is a tuple"):
        interpret(doubled + b"q\x01}h\x01K\x01s.")


@pytest.mark.parametrize("container", [b"q\x00h\x00\x86", b"q\x00]q\x01(h\x00h\x00e"], ids=["tuples", "lists"])
def test_shared_containers_are_visited_once(container: bytes, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.pt", b"\x80\x02]" + container * 200 + b".")
    assert scan_checkpoint(path).tensors == ()


def test_a_self_containing_container_is_visited_once(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.pt", b"\x80\x02]q\x00h\x00a.")
    assert scan_checkpoint(path).tensors == ()


MANY = b"](" + b"N" * 1000 + b"e"
COPIED = {
    "list": (MANY, b"cbuiltins\nlist\n", b"h\x01h\x00\x85R"),
    "tuple": (MANY, b"cbuiltins\ntuple\n", b"h\x01h\x00\x85R"),
    "dict": (
        b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(1000)) + b"u",
        b"cbuiltins\ndict\n",
        b"h\x01h\x00\x85R",
    ),
    "arguments": (b"(" + MANY[2:-1] + b"t", b"cbuiltins\nobject\n", b"h\x01h\x00}\x92"),
}


@pytest.mark.parametrize("container", COPIED)
def test_a_container_is_not_copied_repeatedly(container: str) -> None:
    content, function, call = COPIED[container]
    begin = b"\x80\x04" + content + b"q\x000" + function + b"q\x010]("
    assert len(interpret(begin + call + b"e.")) == 1  # type: ignore[arg-type]
    with pytest.raises(BrokenPickle, match=r"bytes that make \d+ copies"):
        interpret(begin + call * 100 + b"e.")


def test_a_key_of_many_parts_is_not_hashed_repeatedly() -> None:
    with pytest.raises(BrokenPickle, match=r"a key of 1000 parts"):
        interpret(b"\x80\x02(" + b"N" * 1000 + b"tq\x000}(" + b"h\x00N" * 100 + b"u.")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_containers_of_real_programs_are_copied_as_often_as_needed(protocol: int) -> None:
    value = [(Counter("abracadabra"), OrderedDict(a=1), {(n, n) for n in range(9)}, frozenset("ab")) for _ in range(99)]
    assert len(interpret(pickle.dumps(value, protocol))) == 99  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]r\xff\xff\xff\xff.",  # a memo index that makes the C unpickler allocate gigabytes
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    ],
    ids=["memo", "bytes", "bytearray", "decimal"],
)
def test_wrong_lengths_cost_nothing(data: bytes) -> None:
    tracemalloc.start()
    with contextlib.suppress(BrokenPickle):
        assert interpret(data) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_endlessly_overlapping_views_are_refused(tmp_path: Path) -> None:
    storage = torch.zeros(1 << 16)
    torch.save([storage[i:] for i in range(200)], tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"overlapping one another"):
        scan_checkpoint(tmp_path / "x.pt")


def test_overlapping_windows_of_one_tensor_are_scanned_once(tmp_path: Path) -> None:
    torch.save(torch.zeros(20_000).unfold(0, 10_000, 1), tmp_path / "x.pt")
    (tensor,) = scan_checkpoint(tmp_path / "x.pt").tensors
    assert tensor.num_elements > 10**8
    assert tensor.num_zeros == 20_000


# --- paths --------------------------------------------------------------------------------------------------------


def test_a_cycle_of_links_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.pt").symlink_to(tmp_path / "b.pt")
    (tmp_path / "b.pt").symlink_to(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        scan_checkpoint(tmp_path / "a.pt")


def test_a_folder_linked_into_itself_is_searched_once(tmp_path: Path) -> None:
    from steadygrad.scan.readers.formats import find_checkpoints

    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "inner" / "again").symlink_to(tmp_path)
    path = write_torch(tmp_path / "inner" / "deep", {"a": torch.ones(1)})
    assert find_checkpoints(tmp_path) == [path]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in its file system")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"is not a regular file"):
        scan_checkpoint(tmp_path / "x.pt")


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_an_unreadable_file_raises_an_error(tmp_path: Path) -> None:
    path = write_torch(tmp_path, {"a": torch.ones(1)})
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied"):
            scan_checkpoint(path)
    finally:
        if was_root:
            os.seteuid(0)


@pytest.mark.parametrize("where", ["../secret.safetensors", "/etc/passwd", "a/../../x"])
def test_an_index_that_leaves_its_folder_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": where}}))
    with pytest.raises(CheckpointError, match=r"outside itself"):
        read_contents(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 9999])
def test_an_invalid_index_raises_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index|weight_map"):
        read_contents(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"hello, world", bytes(100), b"PK\x03\x04", b"\x80\x02.", b"PK\x05\x06" + bytes(18)]
)
def test_a_file_that_is_not_a_checkpoint_raises_an_error(content: bytes, tmp_path: Path) -> None:
    for name in ("x.pt", "x.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SteadygradError, match=name):
            scan_checkpoint(tmp_path / name)


def test_a_file_that_shrinks_during_reading_raises_an_error(tmp_path: Path) -> None:
    from steadygrad.scan.checkpoint_scan import scan_contents

    path = write_legacy(tmp_path, {"a": torch.ones(1000)})
    contents = read_contents(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"ended at byte"):
        scan_contents(contents)
