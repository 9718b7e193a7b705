"""CheckpointStore: a checkpoint on disk is complete, finite and safe to read, or it is not used."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import threading
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from steadygrad import ConfigError, GuardConfig, UnsupportedError, UsageError
from steadygrad.checkpoint import (
    CheckpointError,
    CheckpointStore,
    DamagedCheckpoint,
    MismatchError,
    NonFiniteStateError,
    UnsafePickleError,
)
from steadygrad.checkpoint.catalogue import CheckpointInfo, Marks, find_removable
from steadygrad.checkpoint.plain import pack
from steadygrad.config import CheckpointConfig
from steadygrad.disk.manifest import PIECE_BYTES, FileEntry, hash_piece, read_manifest
from steadygrad.disk.staging import StagedFile


def make_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((3, 2), value), "bias": torch.arange(3.0)},
        "optimizer": {"state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(3, 2) * value}}, "lr": 0.1},
        "note": "plain",
    }


def save_steps(store: CheckpointStore, steps: range, **settings: Any) -> None:
    for step in steps:
        save = store.save(make_state(float(step)), step=step, **settings)
        assert save.wait() is not None, save.error


def steps_of(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.list()]


# --- saving and reading back --------------------------------------------------------------------------------------


def test_saved_values_are_read_back(tmp_path: Path) -> None:
    odd = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True)
    state = {
        **make_state(),
        "dtypes": [torch.ones(3).to(d) for d in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float64)],
        "small": (torch.tensor(3), torch.empty(0, 4), torch.ones(2, dtype=torch.complex64), odd),
        "kinds": {"tuple": (1, (2.5, None)), "set": {1, 2}, "counter": Counter(a=2), "odd key": {3: "x", (1, 2): "y"}},
        "ordered": OrderedDict(b=1, a=2),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "numpy": (numpy.float32(1.5), numpy.arange(4, dtype=numpy.uint32)),
        "bytes": b"\x00\xff",
        "dtype": torch.float16,
        "extremes": (math.inf, -0.0, 1 << 70),
    }
    with CheckpointStore(tmp_path) as store:
        store.save(state, step=7)
        found = store.load()
    assert found is not None
    assert found.step == 7
    assert_alike(state, found.state)
    assert found.state["transposed"].stride() == (1, 3)
    assert isinstance(found.state["kinds"]["counter"], Counter)


def assert_alike(left: Any, right: Any) -> None:
    assert type(left) is type(right) or isinstance(left, numpy.generic), (left, right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout)
        assert torch.equal(left.to_dense(), right.to_dense())
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_alike(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_alike(one, other)
    elif isinstance(left, numpy.ndarray):
        assert left.dtype == right.dtype
        assert (left == right).all()
    else:
        assert left == right


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
TREES = st.recursive(
    PLAIN | st.lists(st.floats(-9, 9, width=32), max_size=4).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=4), TREES, max_size=3))
def test_any_plain_state_is_read_back(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("any")
    with CheckpointStore(folder, asynchronous=False) as store:
        assert store.save(state, step=0).error is None
        found = store.load()
    assert found is not None
    assert_alike(state, found.state)
    shutil.rmtree(folder)


def test_weights_are_safetensors_that_other_programs_can_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with CheckpointStore(tmp_path) as store:
        path = store.save({"model": model}, step=1).wait()
    assert path is not None
    found = load_file(path / "model.safetensors")
    assert found.keys() == model.state_dict().keys() - {"2.weight"}
    assert torch.equal(found["0.weight"], model[0].weight)
    again = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    assert CheckpointStore(tmp_path).resume({"model": again}) is not None
    assert torch.equal(again[2].weight, model[0].weight)


def test_large_tensors_span_several_pieces(tmp_path: Path) -> None:
    count = PIECE_BYTES // 4
    state = {"model": {"a": torch.randn(count - 5), "b": torch.randn(count + 7), "c": torch.arange(3)}}
    with CheckpointStore(tmp_path) as store:
        store.save(state, step=0)
        store.save(state, step=1)  # the same memory as before
        found = store.load()
    assert found is not None
    assert_alike(state["model"], found.state["model"])
    [entry, *_] = found.info.manifest.files.values()
    assert len(entry.crc32) == 3


def test_host_memory_is_reused() -> None:
    image = StagedFile()
    image.stage({"a": torch.randn(1000)}, {})
    addresses = [segment.data_ptr() for segment in image._segments]
    image.stage({"a": torch.randn(900), "b": torch.ones(50)}, {})
    assert [segment.data_ptr() for segment in image._segments] == addresses


def test_the_state_may_change_during_the_write(tmp_path: Path) -> None:
    weight = torch.ones(1 << 20)
    history = [1.0]
    with CheckpointStore(tmp_path) as store:
        store.save({"model": {"weight": weight}, "history": history}, step=0)
        weight.fill_(2.0)
        history.append(2.0)
        found = store.load()
    assert found is not None
    assert found.state["model"]["weight"].eq(1.0).all()
    assert found.state["history"] == [1.0]


UNREADABLE: dict[str, Any] = {
    "function": lambda: 0,
    "object": object(),
    "set": {"x": {1, object()}},
    "lock": threading.Lock(),
    "set of tensors": {"x": {torch.ones(2)}},
    "set of tuples": {"x": {(1, torch.ones(2))}},
    "long double": numpy.longdouble(1.5),
    "long doubles": numpy.ones(3, dtype=numpy.longdouble),
    "texts": numpy.array(["a", "b"]),
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_state_that_needs_code_is_refused_when_saving(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"at thing"):
        CheckpointStore(tmp_path).save({"thing": value}, step=0)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [">f8", ">i4", ">u2", "<f4"])
def test_an_array_keeps_its_byte_order(tmp_path: Path, dtype: str) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(dtype)
    with CheckpointStore(tmp_path) as store:
        store.save({"array": array}, step=0)
        found = store.load()
    assert found is not None
    assert found.state["array"].dtype == array.dtype
    assert numpy.array_equal(found.state["array"], array)


def test_our_reserved_keys_in_a_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="these are reserved"):
        CheckpointStore(tmp_path).save({"x": {"$tensor": "model:w"}}, step=0)


def test_colliding_names_are_kept_apart() -> None:
    packed = pack({"a": {"b.c": torch.ones(1), "b": {"c": torch.zeros(1)}}})
    assert list(packed.files["state"]) == ["a.b.c", "a.b.c#2"]


def test_an_unusable_or_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a folder"):
        CheckpointStore("")
    with CheckpointStore(tmp_path / "store") as store, pytest.raises(CheckpointError, match="nothing is there"):
        store.load(path=tmp_path / "nosuch")


def test_a_closed_store_refuses_and_a_wrong_setting_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.save(make_state(), step=0)
    with pytest.raises(ConfigError, match=r"CheckpointConfig\.keep_last"):
        CheckpointStore(tmp_path, keep_last=0)


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_an_invalid_step_number_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="step must be a whole number"):
        CheckpointStore(tmp_path).save(make_state(), step=step)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every", 0),
        ("keep_last", True),
        ("keep_best", -1),
        ("keep_every", 2.5),
        ("clean_value", math.nan),
        ("best_by", ""),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"CheckpointConfig\.{field} must .*got {value!r}"):
        CheckpointConfig(**{field: value})


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[checkpoint]\nevery = 500\nkeep_every = 10000\n")
    config = GuardConfig.load(tmp_path / "config.toml")
    assert config.checkpoint == CheckpointConfig(every=500, keep_every=10000)
    assert GuardConfig.from_dict(config.to_dict()) == config


def test_no_thread_remains(tmp_path: Path) -> None:
    before = threading.active_count()
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(3))
    assert threading.active_count() == before


# --- finite -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_nonfinite_state_is_refused_by_name(tmp_path: Path, poison: float, dtype: torch.dtype) -> None:
    state = make_state()
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(70, dtype=dtype)
    state["optimizer"]["state"][0]["exp_avg"][69] = poison
    store = CheckpointStore(tmp_path)
    with pytest.raises(NonFiniteStateError, match=r"optimizer\.state\.0\.exp_avg \(1\)") as caught:
        store.save(state, step=3)
    assert caught.value.tensors == {"optimizer.state.0.exp_avg": 1}
    assert not any(tmp_path.iterdir())


def test_a_large_finite_value_is_accepted(tmp_path: Path) -> None:
    top = torch.finfo(torch.float32).max
    with CheckpointStore(tmp_path) as store:
        assert store.save({"model": {"w": torch.tensor([top, -top, top])}}, step=0).wait() is not None


def test_clean_replaces_values_only_in_the_copy_and_marks_it(tmp_path: Path) -> None:
    state = make_state()
    state["model"]["weight"][1] = torch.tensor([math.nan, math.inf])
    with CheckpointStore(tmp_path, clean_value=0.5) as store:
        store.save(state, step=3, clean=True)
        found = store.load()
    assert found is not None
    assert found.state["model"]["weight"].tolist() == [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0]]
    assert found.info.cleaned == {"model.weight": 2}
    assert state["model"]["weight"].isfinite().sum() == 4


def test_values_allowed_to_be_nonfinite_are_saved_and_read(tmp_path: Path) -> None:
    state = {"model": {"mask": torch.tensor([0.0, -math.inf])}}
    with CheckpointStore(tmp_path) as store:
        store.save(state, step=0, may_be_nonfinite={"model.mask"})
        found = store.load()
    assert found is not None
    assert torch.equal(found.state["model"]["mask"], state["model"]["mask"])


# --- which checkpoints are kept -----------------------------------------------------------------------------------


def test_the_newest_the_best_and_every_nth_are_kept(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=2, keep_best=1, keep_every=4) as store:
        for step in range(1, 10):
            store.save(make_state(), step=step, metrics={"val_loss": abs(step - 3.2)})
    assert steps_of(store) == [3, 4, 8, 9]
    assert store.best is not None
    assert store.best.step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in (3, 4, 8, 9)]


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_nonfinite_loss_is_never_the_best(tmp_path: Path, loss: float) -> None:
    with CheckpointStore(tmp_path, keep_last=1) as store:
        store.save(make_state(), step=1, metrics={"val_loss": 0.4})
        store.save(make_state(), step=2, metrics={"val_loss": loss})
        store.save(make_state(), step=3, metrics={"val_loss": 0.9})
    assert store.best is not None
    assert store.best.step == 1


def test_the_last_good_checkpoint_is_never_removed(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=1, keep_best=0, good_after=2) as store:
        save_steps(store, range(1))
        store.healthy_step(0)
        store.healthy_step(1)
        for step in range(2, 7):
            save_steps(store, range(step, step + 1))
            store.unhealthy_step(step)
    assert [(info.step, info.good) for info in store.list()] == [(0, True), (6, False)]
    found = store.load()
    assert found is not None
    assert found.step == 0, "the newest is suspect"


def test_an_unhealthy_step_during_the_write_counts(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(1))
        store.save(make_state(), step=1)
        store.unhealthy_step(1, "the loss was nan")
    assert store.list()[-1].suspect == "step 1 was not healthy: the loss was nan"


def test_with_proof_disabled_a_checkpoint_is_good_once_it_is_on_disk(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, good_after=5) as store:
        save_steps(store, range(1))
    with CheckpointStore(tmp_path, good_after=0) as store:
        assert store.load() is not None
        save_steps(store, range(1, 2))
        store.unhealthy_step(1)
    assert [(info.step, info.good, info.suspect) for info in store.list()] == [(0, True, None), (1, True, None)]


def test_a_restarted_run_is_not_hidden_by_an_older_one(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=2) as store:
        save_steps(store, range(100, 103))
    with CheckpointStore(tmp_path, keep_last=2) as store:
        save_steps(store, range(3))
        found = store.load()
    assert found is not None
    assert found.step == 2
    assert steps_of(store) == [1, 2]


def test_saving_a_step_again_keeps_the_old_files_until_the_new_ones_are_complete(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        first = store.save(make_state(1.0), step=5).wait()
        second = store.save(make_state(2.0), step=5).wait()
        found = store.load()
    assert first is not None
    assert second is not None
    assert (first.name, second.name) == ("step_00000005", "step_00000005-2")
    assert found is not None
    assert found.state["model"]["weight"][0, 0] == 2.0
    assert not first.exists()


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.booleans(), st.booleans(), st.none() | st.floats(0, 1)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
    st.integers(0, 2),
    st.none() | st.integers(1, 5),
)
def test_removal_never_takes_the_last_good_checkpoint_or_the_next_to_resume(
    rows: list[tuple[int, bool, bool, float | None]], last: int, best: int, every: int | None
) -> None:
    from steadygrad.checkpoint.catalogue import rank
    from steadygrad.disk.manifest import Manifest

    infos = [
        CheckpointInfo(
            step,
            Path(f"{i}"),
            Manifest(step=step, serial=i, created="", files={}, metrics={} if loss is None else {"val_loss": loss}),
            Marks(good=good and not suspect, suspect="why" if suspect else None),
        )
        for i, (step, good, suspect, loss) in enumerate(rows)
    ]
    gone = find_removable(infos, CheckpointConfig(keep_last=last, keep_best=best, keep_every=every))
    left = [info for info in infos if info not in gone]
    assert rank(infos)[0] in left
    assert {info.path for info in infos if info.good} == set() or any(
        info.path == [one for one in infos if one.good][-1].path for info in left
    )
    assert infos[-1] in left
    assert len(left) >= min(last, len({info.step for info in infos}))


# --- damage -------------------------------------------------------------------------------------------------------


def damage(path: Path, rng: random.Random, *, cut: bool) -> None:
    """Flip one bit of one file of a checkpoint, or truncate the file."""
    files = [file for file in sorted(path.iterdir()) if file.name != "marks.json"]
    file = rng.choices(files, weights=[file.stat().st_size for file in files])[0]
    data = bytearray(file.read_bytes())
    offset = rng.randrange(len(data))
    if cut:
        del data[offset:]
    else:
        data[offset] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


@pytest.mark.parametrize("cut", [False, True], ids=["bit flips", "truncations"])
def test_damage_at_any_offset_is_detected_and_the_previous_checkpoint_is_used(tmp_path: Path, cut: bool) -> None:
    """500 random offsets over both kinds, in manifest, weights and state."""
    with CheckpointStore(tmp_path / "whole", asynchronous=False) as store:
        save_steps(store, range(2))
    rng = random.Random(4)
    for i in range(250):
        copy = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", copy)
        damage(copy / "step_00000001", rng, cut=cut)
        store = CheckpointStore(copy)
        found = store.load()
        assert found is not None
        assert found.step == 0, f"the damaged one was loaded: {i}"
        assert (copy / "set_aside" / "step_00000001" / "reason.txt").read_text().strip()
        assert steps_of(store) == [0]
        with pytest.raises(DamagedCheckpoint):
            store.load(path=copy / "set_aside" / "step_00000001")
        shutil.rmtree(copy)


def test_if_all_are_damaged_the_error_gives_every_reason(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(2))
    for step in range(2):
        (tmp_path / f"step_{step:08d}" / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000001: state\.pt cannot be read.*step_00000000"):
        CheckpointStore(tmp_path).load()
    assert CheckpointStore(tmp_path).load() is None, "set aside, so that a restart begins from scratch"


def test_a_folder_without_a_manifest_is_unfinished(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(2))
    (tmp_path / "step_00000001" / "manifest.json").unlink()
    found = CheckpointStore(tmp_path).load()
    assert found is not None
    assert found.step == 0
    assert "never finished" in (tmp_path / "set_aside" / "step_00000001" / "reason.txt").read_text()


def rehash(folder: Path) -> None:
    """Make the manifest match the files again, as an attacker would."""
    manifest = read_manifest(folder)
    files = {}
    for name in manifest.files:
        data = (folder / name).read_bytes()
        files[name] = FileEntry(
            len(data), tuple(hash_piece(data[i : i + PIECE_BYTES]) for i in range(0, len(data), PIECE_BYTES))
        )
    import dataclasses

    (folder / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files).render())


def test_a_nonfinite_checkpoint_with_valid_hashes_is_set_aside(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(2))
    file = tmp_path / "step_00000001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")  # the last float32 becomes NaN
    rehash(file.parent)
    found = CheckpointStore(tmp_path).load()
    assert found is not None
    assert found.step == 0
    assert "model." in (tmp_path / "set_aside" / "step_00000001" / "reason.txt").read_text()


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("form", ["archive", "bare pickle"])
def test_a_malicious_pickle_is_refused_and_its_payload_does_not_run(tmp_path: Path, form: str) -> None:
    mark = tmp_path / "mark"
    run = tmp_path / "run"
    with CheckpointStore(run) as store:
        save_steps(store, range(2))
    file = run / "step_00000001" / "state.pt"
    if form == "archive":
        torch.save({"tree": {}, "odd": Payload(mark)}, file)
    else:
        file.write_bytes(pickle.dumps({"tree": Payload(mark)}))
    rehash(file.parent)
    shutil.copytree(file.parent, tmp_path / "copy")

    found = CheckpointStore(run).load()
    assert found is not None
    assert found.step == 0
    assert "posix.system" in (run / "set_aside" / "step_00000001" / "reason.txt").read_text()
    with pytest.raises(UnsafePickleError, match=r"would run posix\.system.*Nothing was run") as caught:
        CheckpointStore(run).load(path=tmp_path / "copy")
    assert any("touch" in wanted for wanted in caught.value.wanted)
    assert not mark.exists()
    copy = tmp_path / "copy" / "state.pt"  # the payload is real
    if form == "archive":
        torch.load(copy, weights_only=False)
    else:
        pickle.loads(copy.read_bytes())
    assert mark.exists()


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "a/b", "manifest.json"])
def test_a_manifest_that_points_outside_is_not_followed(tmp_path: Path, name: str) -> None:
    with CheckpointStore(tmp_path) as store:
        path = store.save(make_state(), step=0).wait()
    assert path is not None
    fields = json.loads((path / "manifest.json").read_text())
    fields["files"][name] = fields["files"].pop("state.pt")
    (path / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(DamagedCheckpoint):
        CheckpointStore(tmp_path).load(path=path)


@pytest.mark.parametrize(("field", "value"), [("step", math.inf), ("about", {"a": math.nan}), ("about", [])])
def test_a_manifest_with_invalid_values_is_damaged(tmp_path: Path, field: str, value: object) -> None:
    with CheckpointStore(tmp_path) as store:
        path = store.save(make_state(), step=0).wait()
    assert path is not None
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(fields | {field: value}))
    with pytest.raises(DamagedCheckpoint):
        CheckpointStore(tmp_path).load(path=path)


def test_state_pt_contains_no_code(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        path = store.save(make_state(), step=0).wait()
    assert path is not None
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path / "state.pt") == []
    with zipfile.ZipFile(path / "state.pt") as archive:
        assert not any("/data/" in name for name in archive.namelist()), "tensors belong in safetensors"


# --- into a model -------------------------------------------------------------------------------------------------


def test_resume_names_what_does_not_fit(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save({"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))}, step=0)
    other = nn.Sequential(nn.Linear(2, 4), nn.Identity(), nn.Linear(3, 1))
    with pytest.raises(MismatchError) as caught:
        store.resume({"model": other})
    for part in ("missing 2.weight", "unexpected 1.weight", "0.weight has shape (4, 2), the saved one (3, 2)"):
        assert part in str(caught.value)
    with pytest.raises(MismatchError, match="no state of optimizer"):
        store.resume({"optimizer": torch.optim.SGD(other.parameters())})
    found = store.resume({"model": other}, strict=False)
    assert found is not None


def test_a_missing_step_is_reported_with_the_existing_ones(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(2))
    with pytest.raises(CheckpointError, match="no checkpoint before step 9; it has 0, 1"):
        store.load(9)
    found = store.load(0)
    assert found is not None
    assert found.step == 0


# --- crashes ------------------------------------------------------------------------------------------------------


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".writing-999999999-step_00000001", tmp_path / f".writing-{os.getppid()}-step_00000002"
    removing = tmp_path / ".removing-999999999-step_00000000"
    for folder in (dead, alive, removing):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    assert CheckpointStore(tmp_path).load() is None
    assert dead.exists(), "reading changes nothing"
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(1))
    assert (dead.exists(), alive.exists(), removing.exists()) == (False, True, False)


def test_damaged_marks_count_as_missing(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        save_steps(store, range(1))
        store.mark_good(0)
        assert store.list()[0].good
        (tmp_path / "step_00000000" / "marks.json").write_text('{"good": "ye')
        assert not store.list()[0].good
        assert store.load() is not None
