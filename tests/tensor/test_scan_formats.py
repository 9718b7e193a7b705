"""Scan: every format, layout and dtype gives torch's numbers, and tied weights are reported."""

from __future__ import annotations

import json
import math
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoint_files import FORMATS, INF, NAN, make_weights, write_distributed, write_safetensors, write_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from steadygrad import Guard
from steadygrad.errors import CheckpointError
from steadygrad.scan.checkpoint_scan import TensorScan, scan_checkpoint
from steadygrad.scan.readers.chunks import CHUNK_BYTES
from steadygrad.scan.readers.formats import find_checkpoints

formats = pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS.keys())


def scan_by_name(path: Path) -> dict[str, TensorScan]:
    return {tensor.name: tensor for tensor in scan_checkpoint(path).tensors}


def assert_agrees(found: TensorScan, tensor: Tensor) -> None:
    """Compare with a plain float64 reference over the finite elements."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.float() if values.element_size() == 1 else values
    values = values.double().flatten()
    finite = values[values.isfinite()]
    assert found.shape == tuple(tensor.shape)
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    assert found.num_nan == int(values.isnan().sum())
    assert found.num_inf == int(values.isinf().sum())
    assert found.num_zeros == int((values == 0).sum())
    if finite.numel():
        assert (found.min, found.max) == (float(finite.min()), float(finite.max()))
        # squares are summed in the tensor's precision within a chunk, at least in float32
        assert found.norm == pytest.approx(float(finite.norm()), rel=1e-5)
    else:
        assert (found.min, found.max, found.norm) == (None, None, None)


@formats
def test_every_format_gives_the_same_numbers_as_torch(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    weights = make_weights()
    path = write(tmp_path, weights)

    scan = scan_checkpoint(path)

    assert {tensor.name for tensor in scan.tensors} == set(weights)
    for tensor in scan.tensors:
        assert_agrees(tensor, weights[tensor.name])
    assert [tensor.name for tensor in scan.bad_tensors] == ["bad"]
    assert not scan.is_clean


@formats
def test_a_healthy_checkpoint_is_clean(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    weights = make_weights()
    del weights["bad"]
    assert scan_checkpoint(write(tmp_path, weights)).is_clean


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_scanned(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(333) * 3
    values[5] = 0
    if dtype.is_floating_point:
        values[7] = NAN
    if not (dtype.is_floating_point or dtype.is_complex):
        values = values.abs()
    tensor = values.to(dtype)
    torch.save({"x": tensor}, tmp_path / "x.pt")
    save_file({"x": tensor}, tmp_path / "x.safetensors")

    for name in ("x.pt", "x.safetensors"):
        assert_agrees(scan_by_name(tmp_path / name)["x"], tensor)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e19, 1e30])
def test_norms_neither_overflow_nor_vanish(scale: float, tmp_path: Path) -> None:
    tensor = torch.randn(1000) * scale
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    assert_agrees(scan_by_name(tmp_path / "x.safetensors")["x"], tensor)


def make_layouts() -> dict[str, Tensor]:
    base = torch.randn(30, 40)
    base[0, 1] = NAN
    return {
        "transposed": base.t(),
        "with gaps": base[:, ::2],
        "gap holds the NaN": base[1:, 3:9],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "offset": torch.randn(100)[37:],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


@pytest.mark.parametrize("new", [True, False], ids=["archive", "stream"])
def test_every_layout_is_scanned(new: bool, tmp_path: Path) -> None:
    layouts = make_layouts()
    torch.save({"nested": [layouts]}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)

    found = scan_by_name(tmp_path / "x.pt")

    assert set(found) == {f"nested.0.{name}" for name in layouts}
    for name, tensor in layouts.items():
        assert_agrees(found[f"nested.0.{name}"], tensor.detach())
    assert found["nested.0.gap holds the NaN"].num_nan == 0


def test_a_tensor_of_many_chunks_is_scanned_completely(tmp_path: Path) -> None:
    tensor = torch.randn(3 * CHUNK_BYTES // 4 + 17)
    tensor[-1], tensor[CHUNK_BYTES // 4], tensor[0] = NAN, INF, 0.0
    wide = torch.randn(2, 3 * CHUNK_BYTES // 4)[:, ::2]
    wide[1, -1] = INF
    torch.save({"x": tensor, "wide": wide}, tmp_path / "x.pt")

    found = scan_by_name(tmp_path / "x.pt")

    assert_agrees(found["x"], tensor)
    assert_agrees(found["wide"], wide)


def test_an_expanded_tensor_is_scanned_once(tmp_path: Path) -> None:
    row = torch.tensor([NAN, INF, 1.0])
    torch.save({"x": row[:1].expand(10**12), "gap": row[::2].expand(10**12, 2)}, tmp_path / "x.pt")
    found = scan_by_name(tmp_path / "x.pt")
    assert (found["x"].num_elements, found["x"].num_nan) == (10**12, 1)
    assert (found["gap"].num_nan, found["gap"].num_inf, found["gap"].max) == (1, 0, 1.0)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_sparse_and_quantized_tensors_are_scanned_by_component(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, NAN]), (3,), check_invariants=True)
    quantized = torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.qint8)
    torch.save({"sparse": sparse, "quantized": quantized}, tmp_path / "x.pt")

    scan = scan_checkpoint(tmp_path / "x.pt")

    assert [tensor.num_nan for tensor in scan.tensors if tensor.name.startswith("sparse")] == [0, 1]
    assert [tensor.dtype for tensor in scan.tensors if tensor.name.startswith("quantized")] == ["int8"]


def test_nonfinite_plain_numbers_are_reported(tmp_path: Path) -> None:
    torch.save({"groups": [{"lr": NAN}], "best": INF}, tmp_path / "x.pt")
    scan = scan_checkpoint(tmp_path / "x.pt")
    assert [name for name, _ in scan.bad_numbers] == ["groups.0.lr", "best"]
    assert not scan.is_clean

    torch.save({"best": INF}, tmp_path / "x.pt")
    assert scan_checkpoint(tmp_path / "x.pt").is_clean  # programs often initialise a best loss like this


def test_an_infinity_that_a_history_of_the_guard_begins_with_is_not_listed(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=tmp_path) as guard:
        guard.step(lambda x: model(x).square().mean(), torch.randn(4, 3))
        guard.save()
    (folder,) = (tmp_path / "checkpoints").glob("step_*")
    assert scan_checkpoint(folder).bad_numbers == ()


def test_an_infinite_mask_is_not_damage_but_an_infinite_weight_is(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -INF).triu(1)
    save_file({"attn_mask": mask}, tmp_path / "a.safetensors")
    save_file({"weight": mask.clone()}, tmp_path / "b.safetensors")
    mask[0, 0] = 1.0
    save_file({"attn_mask": mask}, tmp_path / "c.safetensors")

    assert scan_checkpoint(tmp_path / "a.safetensors").is_clean
    assert not scan_checkpoint(tmp_path / "b.safetensors").is_clean
    assert not scan_checkpoint(tmp_path / "c.safetensors").is_clean


def test_tied_weights_are_reported_whether_shared_or_repeated(tmp_path: Path) -> None:
    weight = torch.randn(20, 20)
    other = weight.clone()
    other[3, 3] += 1e-3
    torch.save({"a": weight, "b": weight, "c": weight.clone(), "d": other}, tmp_path / "x.pt")
    assert scan_checkpoint(tmp_path / "x.pt").duplicates == (("a", "b", "c"),)


def test_zero_biases_and_unit_scales_are_not_duplicates(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100), "b": torch.zeros(100), "c": torch.ones(100)}, tmp_path / "x.safetensors")
    assert scan_checkpoint(tmp_path / "x.safetensors").duplicates == ()


def test_optimizers_and_scalers_of_real_trainings_are_scanned(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "text": "a",
        "when": {1, 2},
        "shape": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    torch.save(state, tmp_path / "x.pt")

    found = scan_by_name(tmp_path / "x.pt")

    assert_agrees(found["model.0.weight"], model[0].weight.detach())
    assert_agrees(found["optimizer.state.0.exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert "rng" in found


def test_numpy_values_are_read_as_data(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.save({"x": torch.ones(3), "score": numpy.float64(1.5), "state": numpy.arange(4)}, tmp_path / "x.pt")
    assert set(scan_by_name(tmp_path / "x.pt")) == {"x"}


def test_a_tensor_in_several_parts_is_reported_by_part(tmp_path: Path) -> None:
    folder = write_distributed(tmp_path, {"a": torch.zeros(3), "b": torch.tensor([1.0, NAN])})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    metadata.storage_data = {  # as if two ranks wrote one tensor of five elements
        MetadataIndex("w", torch.Size([0])): places["a"],
        MetadataIndex("w", torch.Size([3])): places["b"],
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    found = scan_by_name(folder)

    assert {name: (one.shape, one.num_nan) for name, one in found.items()} == {"w@0": ((3,), 0), "w@3": ((2,), 1)}


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_tensor_in_the_index_but_in_no_shard_is_a_problem(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["c"] = index["weight_map"]["a"]
    index["weight_map"]["d"] = "model-9-of-9.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    scan = scan_checkpoint(folder)

    assert not scan.is_clean
    assert [problem.split(" is ")[0] for problem in scan.problems] == ["c", "model-9-of-9.safetensors"]


def test_all_files_of_a_folder_are_scanned_except_pickled_settings(tmp_path: Path) -> None:
    write_safetensors(tmp_path, make_weights())
    torch.save({"x": torch.ones(2)}, tmp_path / "optimizer.pt")
    (tmp_path / "training_args.bin").write_bytes(b"anything")
    (tmp_path / "README.md").write_text("hello")
    assert [path.name for path in find_checkpoints(tmp_path)] == ["model.safetensors", "optimizer.pt"]


def test_in_a_run_directory_only_checkpoints_are_scanned(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    for name in ("checkpoints/step_1", "checkpoints/step_2", "checkpoints/.writing-1-step_3", "batches"):
        (tmp_path / name).mkdir(parents=True)
        torch.save({"x": torch.tensor([NAN])}, tmp_path / name / "x.pt")
    found = [path.relative_to(tmp_path).as_posix() for path in find_checkpoints(tmp_path)]
    assert found == ["checkpoints/step_1/x.pt", "checkpoints/step_2/x.pt"]


def test_a_folder_without_a_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*Give the checkpoint itself"):
        find_checkpoints(tmp_path)


def test_a_file_is_identified_by_its_contents_not_its_name(tmp_path: Path) -> None:
    weights = {"x": torch.ones(3)}
    save_file(weights, tmp_path / "a.bin")
    torch.save(weights, tmp_path / "b.ckpt")
    assert scan_checkpoint(tmp_path / "a.bin").format == "safetensors"
    assert scan_checkpoint(tmp_path / "b.ckpt").format == "torch archive"


def test_memory_stays_flat_and_threads_are_released(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(64 << 20, dtype=torch.uint8)}, tmp_path / "x.pt")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    tracemalloc.start()
    try:
        scan_checkpoint(tmp_path / "x.pt", num_threads=2)
        peak = tracemalloc.get_traced_memory()[1]
        with ThreadPoolExecutor(1) as pool:  # torch stores a number for each thread, and one for future threads
            threads = {torch.get_num_threads(), pool.submit(torch.get_num_threads).result()}
    finally:
        tracemalloc.stop()
        torch.set_num_threads(before)
    assert peak < 12 << 20  # two buffers of a MiB for each of the threads and for the search for duplicates
    assert threads == {3}


def test_progress_ends_at_the_size_of_what_was_read(tmp_path: Path) -> None:
    tensor = torch.randn(CHUNK_BYTES)
    torch.save({"a": tensor, "b": tensor}, tmp_path / "x.pt")
    calls: list[tuple[int, str]] = []

    scan_checkpoint(tmp_path / "x.pt", progress=lambda done, name: calls.append((done, name)))

    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == tensor.numel() * 4
    assert math.isfinite(calls[-1][0])
