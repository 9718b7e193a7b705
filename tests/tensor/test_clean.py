"""Clean: the copy is finite and otherwise identical, in every format; the original and existing files are unchanged."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from checkpoint_files import FORMATS, INF, NAN, make_weights, write_safetensors, write_shards, write_torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from steadygrad.checkpoint.store import CheckpointStore
from steadygrad.cli import main
from steadygrad.disk.manifest import NAME, check_files, read_manifest
from steadygrad.errors import CheckpointError, UnsupportedError
from steadygrad.scan.checkpoint_scan import scan_checkpoint
from steadygrad.scan.clean import clean_checkpoint

Writer = Callable[[Path, dict[str, Tensor]], Path]
formats = pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS.keys())


def snapshot(path: Path) -> dict[str, bytes]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


@formats
def test_the_copy_is_finite_and_the_original_untouched(write: Writer, tmp_path: Path) -> None:
    source, target = write(tmp_path, make_weights()), tmp_path / "target.pt"
    before = snapshot(source)

    report = clean_checkpoint(source, target)

    assert report.replaced == {"bad": 3}
    assert snapshot(source) == before
    assert scan_checkpoint(target).is_clean
    assert not scan_checkpoint(source).is_clean
    assert not list(tmp_path.glob(".writing*"))


@pytest.mark.parametrize("write", [FORMATS["torch"], FORMATS["legacy"]])
def test_torch_loads_the_copy_and_only_the_bad_elements_differ(write: Writer, tmp_path: Path) -> None:
    weights = make_weights()
    source = write(tmp_path, weights)

    clean_checkpoint(source, tmp_path / "target.pt", value=0.5)

    loaded = torch.load(tmp_path / "target.pt", weights_only=True)
    assert list(loaded) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], torch.where(tensor.isfinite(), tensor, 0.5))


def test_checksums_of_the_copy_match(tmp_path: Path) -> None:
    source = write_torch(tmp_path, make_weights())
    clean_checkpoint(source, tmp_path / "target.pt")
    with zipfile.ZipFile(tmp_path / "target.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_distributed_copy_is_loaded_by_torch(tmp_path: Path) -> None:
    weights = make_weights()
    source = FORMATS["distributed"](tmp_path, weights)
    clean_checkpoint(source, tmp_path / "target")
    state = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    torch.distributed.checkpoint.load(state, checkpoint_id=str(tmp_path / "target"))

    assert torch.equal(state["bad"], torch.where(weights["bad"].isfinite(), weights["bad"], 0.0))
    assert torch.equal(state["embed"], weights["embed"])


def test_metadata_and_other_files_are_copied(tmp_path: Path) -> None:
    save_file(make_weights(), tmp_path / "a.safetensors", metadata={"format": "pt", "by": "me"})
    clean_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert b'"by":"me"' in (tmp_path / "b.safetensors").read_bytes()[:400]

    folder = write_shards(tmp_path, make_weights())
    clean_checkpoint(folder, tmp_path / "copy")
    assert snapshot(tmp_path / "copy").keys() == snapshot(folder).keys()
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"


def test_all_checkpoints_of_a_folder_are_cleaned(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_safetensors(source, make_weights())
    torch.save({"state": {0: {"exp_avg": torch.tensor([NAN, 1.0])}}}, source / "optimizer.pt")

    report = clean_checkpoint(source, tmp_path / "target")

    assert report.replaced == {"model.safetensors:bad": 3, "optimizer.pt:state.0.exp_avg": 1}
    assert load_file(tmp_path / "target" / "model.safetensors")["bad"].isfinite().all()
    state = torch.load(tmp_path / "target" / "optimizer.pt", weights_only=True)
    assert state["state"][0]["exp_avg"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn, torch.complex64]
)
def test_every_dtype_is_repaired(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, NAN, 3.0, 0.0, -2.0]).to(dtype)
    torch.save({"x": tensor}, tmp_path / "x.pt")

    clean_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt", value=1.5)

    loaded = torch.load(tmp_path / "y.pt", weights_only=True)["x"]
    assert loaded.to(torch.complex64).tolist() == [1.0, 1.5, 3.0, 0.0, -2.0]


def test_every_layout_is_repaired_and_bytes_between_elements_stay(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    base[2, 2], base[3, 3] = NAN, INF
    tied = torch.tensor([NAN, 1.0])
    torch.save(
        {"gaps": base[:, ::2], "tied": tied, "also": tied, "turned": torch.full((2, 3), INF).t()}, tmp_path / "x.pt"
    )

    clean_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt")

    loaded = torch.load(tmp_path / "y.pt", weights_only=True)
    assert loaded["gaps"].isfinite().all()
    assert loaded["gaps"].untyped_storage().nbytes() == base.untyped_storage().nbytes()
    whole = loaded["gaps"].as_strided((6, 8), (8, 1))
    assert whole[2, 2] == 0
    assert whole[3, 3] == INF  # not an element of a tensor
    assert loaded["tied"].data_ptr() == loaded["also"].data_ptr()
    assert loaded["also"].tolist() == [0.0, 1.0]
    assert not loaded["turned"].any()


def test_a_mask_of_infinities_stays(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -INF).triu(1)
    save_file({"attn_mask": mask, "w": torch.tensor([NAN])}, tmp_path / "a.safetensors")
    clean_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert torch.equal(load_file(tmp_path / "b.safetensors")["attn_mask"], mask)


def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([NAN]).half()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"1e\+06 does not fit float16"):
        clean_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", value=1e6)
    assert not (tmp_path / "b.safetensors").exists()


# --- a checkpoint of ours -----------------------------------------------------------------------------------------


def save_own(folder: Path, weight: Tensor) -> Path:
    store = CheckpointStore(folder, asynchronous=False)
    path = store.save({"model": {"w": weight}}, step=3, may_be_nonfinite=["model.w"]).wait()
    store.close()
    assert path is not None
    return path


def forget_allowance(folder: Path) -> None:
    """Make the checkpoint as a program without checks would leave it: bad, with a matching manifest."""
    import dataclasses

    from steadygrad.disk.manifest import FileEntry, hash_file, start_pool

    torch.save({"tree": {}, "odd": {}, "may_be_nonfinite": []}, folder / "state.pt")
    manifest = read_manifest(folder)
    with start_pool() as pool:
        hashes = tuple(hash_file(folder / "state.pt", pool))
    entry = FileEntry((folder / "state.pt").stat().st_size, hashes)
    made = dataclasses.replace(manifest, files={**manifest.files, "state.pt": entry})
    (folder / NAME).write_bytes(made.render())


def test_our_checkpoint_gets_a_matching_manifest_and_the_mark(tmp_path: Path) -> None:
    source = save_own(tmp_path / "run", torch.tensor([1.0, NAN, INF]))
    forget_allowance(source)
    assert [tensor.name for tensor in scan_checkpoint(source).bad_tensors] == ["model.w"]

    clean_checkpoint(source, tmp_path / "target")

    manifest = read_manifest(tmp_path / "target")
    check_files(tmp_path / "target", manifest)
    assert manifest.cleaned == {"model.w": 2}
    assert scan_checkpoint(tmp_path / "target").is_clean


def test_values_saved_as_nonfinite_on_purpose_are_not_a_finding(tmp_path: Path) -> None:
    assert scan_checkpoint(save_own(tmp_path, torch.tensor([1.0, NAN]))).is_clean


def test_a_damaged_checkpoint_of_ours_is_found_and_not_repaired_silently(tmp_path: Path) -> None:
    source = save_own(tmp_path / "run", torch.ones(100))
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-7] ^= 1
    (source / "model.safetensors").write_bytes(data)

    (problem,) = scan_checkpoint(source).problems
    assert "model.safetensors is not what was written" in problem
    with pytest.raises(CheckpointError, match=r"damaged and cannot be cleaned"):
        clean_checkpoint(source, tmp_path / "target")
    assert main(["scan", str(source)]) == 1


# --- existing files stay ------------------------------------------------------------------------------------------


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    source, target = write_torch(tmp_path, make_weights()), tmp_path / "target.pt"
    target.write_text("precious")
    with pytest.raises(CheckpointError, match=r"exists and was not changed"):
        clean_checkpoint(source, target)
    assert target.read_text() == "precious"

    clean_checkpoint(source, target, force=True)
    assert scan_checkpoint(target).is_clean


@pytest.mark.parametrize("force", [False, True])
def test_the_original_is_never_overwritten_under_any_name(force: bool, tmp_path: Path) -> None:
    source = write_torch(tmp_path, make_weights())
    folder = write_shards(tmp_path, make_weights())
    (tmp_path / "link.pt").symlink_to(source)
    os.link(source, tmp_path / "hard.pt")
    before = snapshot(tmp_path)
    wrong = [(source, source), (source, tmp_path / "link.pt"), (source, tmp_path / "hard.pt"), (folder, folder)]
    wrong += [(folder, folder / "inner"), (folder, tmp_path), (source, tmp_path / "." / "model.pt"), (folder, source)]
    for origin, target in wrong:
        with pytest.raises(CheckpointError, match=r"was not changed|which must not change"):
            clean_checkpoint(origin, target, force=force)
    assert snapshot(tmp_path) == before


def test_a_failure_leaves_no_files_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_torch(tmp_path, make_weights())

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        clean_checkpoint(source, tmp_path / "target.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_prints_what_it_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_torch(tmp_path, make_weights()), tmp_path / "target.pt"
    assert main(["clean", str(source), str(target), "--value", "0.25"]) == 0
    assert "bad: 3 replaced by 0.25" in capsys.readouterr().out

    assert main(["clean", str(source), str(tmp_path / "other.pt"), "--value", "nan"]) == 2
    assert "--value must be a finite number, got NaN" in capsys.readouterr().err

    assert main(["clean", str(source), str(target)]) == 2
    assert "--force" in capsys.readouterr().err

    assert main(["clean", str(source), str(target), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replaced"] == {"bad": 3}
    assert main(["scan", str(target)]) == 0


def test_an_old_file_with_unaligned_elements_is_refused_and_kept(tmp_path: Path) -> None:
    """For some name lengths the elements are unaligned, and no float can be written in place."""
    x = torch.randn(50, 7)
    x[3, 1] = NAN
    messages = []
    for length in range(1, 5):
        path = tmp_path / f"old{length}.pt"
        torch.save({"a" * length: x[:, :2]}, path, _use_new_zipfile_serialization=False)
        before = path.read_bytes()
        try:
            clean_checkpoint(path, tmp_path / f"out{length}.pt")
        except UnsupportedError as error:
            messages.append(str(error))
        assert path.read_bytes() == before
    assert messages
    assert all("torch.save" in text for text in messages)
