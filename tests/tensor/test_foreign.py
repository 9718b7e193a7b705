"""load_checkpoint: weights of any program are found and loaded exactly, or mismatches are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import FORMATS, INF, NAN, Payload
from safetensors.torch import save_file
from torch import Tensor, nn

from steadygrad.checkpoint.store import CheckpointStore
from steadygrad.errors import CheckpointError, MismatchError, NonFiniteStateError, UnsafePickleError
from steadygrad.scan.foreign import load_checkpoint, read_tensor
from steadygrad.scan.readers.formats import read_contents


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.body = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4))

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.state_dict().items()}


def make_source(seed: int = 5) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.body[1].running_mean.normal_()
    return net


def assert_equal(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS.keys())
def test_every_format_is_loaded_exactly(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    state = make_source().state()
    path = write(tmp_path, state)
    model = Net()

    report = load_checkpoint(path, model)

    assert_equal(model, state)
    assert set(report.loaded) == set(state)
    assert report.is_complete


WRAPPINGS = {
    "plain": lambda state: state,
    "lightning": lambda state: {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{name}": value for name, value in state.items()},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}],
        "hparams_name": "kwargs",
    },
    "lightning without prefix": lambda state: {"state_dict": state, "loops": {}},
    "hand-written": lambda state: {"model_state_dict": state, "optimizer_state_dict": {"state": {}}, "loss": 0.1},
    "ddp": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled": lambda state: {"model": {f"_orig_mod.{name}": value for name, value in state.items()}},
    "wrapped inside": lambda state: {
        name.replace("body.", "body._checkpoint_wrapped_module."): value for name, value in state.items()
    },
    "next to its average": lambda state: {
        "ema": {name: value + 1 for name, value in state.items()},
        "model": state,
    },
    "parameters": lambda state: {
        name: nn.Parameter(value) if value.is_floating_point() else value for name, value in state.items()
    },
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_weights_are_found_at_any_place(wrap, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    state = make_source().state()
    torch.save(wrap(state), tmp_path / "x.ckpt")
    model = Net()

    report = load_checkpoint(tmp_path / "x.ckpt", model)

    assert_equal(model, state)
    assert report.is_complete


def test_a_wrapped_model_accepts_the_names_of_a_bare_one(tmp_path: Path) -> None:
    state = make_source().state()
    torch.save(state, tmp_path / "x.pt")
    model = nn.Module()
    model.module = Net()

    report = load_checkpoint(tmp_path / "x.pt", model)

    assert_equal(model.module, state)
    assert report.is_complete


def test_a_file_that_fits_several_parts_of_the_model_is_not_called_ambiguous(tmp_path: Path) -> None:
    save_file(nn.Linear(3, 3).state_dict(), tmp_path / "other.safetensors")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    with pytest.raises(
        MismatchError, match=r"holds .*, and 2 parts of the model have such weights: '0\.', '1\.'"
    ) as got:
        load_checkpoint(tmp_path / "other.safetensors", model)
    assert "prefix=" not in str(got.value)  # that is about the file's names


def test_a_prefix_selects_one_of_two(tmp_path: Path) -> None:
    state, other = make_source().state(), make_source(6).state()
    torch.save({"student": state, "teacher": other}, tmp_path / "x.pt")
    model = Net()
    with pytest.raises(MismatchError, match=r"2 times: under 'student\.', 'teacher\.'.*prefix="):
        load_checkpoint(tmp_path / "x.pt", model)

    assert load_checkpoint(tmp_path / "x.pt", model, prefix="teacher.").prefix == "teacher."
    assert_equal(model, other)


def test_our_checkpoint_can_be_the_starting_point(tmp_path: Path) -> None:
    source = make_source()
    store = CheckpointStore(tmp_path, asynchronous=False)
    path = store.save({"model": source.state_dict(), "optimizer": {}}, step=1).wait()
    store.close()
    assert path is not None
    model = Net()
    load_checkpoint(path, model)
    assert_equal(model, source.state())


def make_misfit() -> dict[str, Tensor]:
    state = make_source().state()
    del state["body.0.bias"]
    state["extra"] = torch.ones(2)
    state["embed.weight"] = torch.ones(9, 5)
    return state


def test_strict_names_every_mismatch_and_changes_nothing(tmp_path: Path) -> None:
    torch.save(make_misfit(), tmp_path / "x.pt")
    model = Net()
    before = model.state()

    with pytest.raises(MismatchError) as caught:
        load_checkpoint(tmp_path / "x.pt", model)

    for part in (
        "missing: body.0.bias",
        "unexpected: extra",
        "embed.weight (file [9, 5], model [7, 5])",
        "strict=False",
    ):
        assert part in str(caught.value)
    assert_equal(model, before)


def test_without_strict_what_fits_is_loaded_and_the_rest_reported(tmp_path: Path) -> None:
    state = make_misfit()
    torch.save(state, tmp_path / "x.pt")
    model = Net()
    before = model.state()

    report = load_checkpoint(tmp_path / "x.pt", model, strict=False)

    assert report.missing == ("body.0.bias",)
    assert report.unexpected == ("extra",)
    assert report.misshaped == {"embed.weight": ((9, 5), (7, 5))}
    kept = {"body.0.bias", "embed.weight"}
    assert set(report.loaded) == before.keys() - kept
    assert_equal(model, {name: (before if name in kept else state)[name] for name in before})


def test_a_checkpoint_of_another_model_raises_an_error_even_without_strict(tmp_path: Path) -> None:
    torch.save({"something": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(MismatchError, match=r"none of the model's weights: it holds something, the model embed"):
        load_checkpoint(tmp_path / "x.pt", Net(), strict=False)


def test_tied_weights_stored_once_are_not_missing(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 3)
            self.head = nn.Linear(3, 6, bias=False)
            self.head.weight = self.embed.weight

    weight = torch.randn(6, 3)
    save_file({"embed.weight": weight}, tmp_path / "x.safetensors")
    model = Tied()
    assert load_checkpoint(tmp_path / "x.safetensors", model).is_complete
    assert torch.equal(model.head.weight, weight)


@pytest.mark.parametrize("value", [NAN, INF])
def test_nonfinite_weights_are_refused_unless_allowed(value: float, tmp_path: Path) -> None:
    state = make_source().state()
    state["embed.weight"][2, 3] = value
    torch.save(state, tmp_path / "x.pt")
    model = Net()
    before = model.state()

    with pytest.raises(NonFiniteStateError, match=r"embed\.weight \(1\)"):
        load_checkpoint(tmp_path / "x.pt", model)
    assert_equal(model, before)

    load_checkpoint(tmp_path / "x.pt", model, allow_nonfinite=True)
    assert not model.embed.weight.isfinite().all()


def test_values_too_large_for_the_models_dtype_are_refused(tmp_path: Path) -> None:
    state = make_source().state()
    state["embed.weight"][0, 0] = 1e6
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(MismatchError, match=r"embed\.weight holds 1e\+06.*torch\.float16"):
        load_checkpoint(tmp_path / "x.pt", Net().half())


def test_other_dtypes_are_converted_and_layouts_preserved(tmp_path: Path) -> None:
    state = make_source().state()
    torch.save(
        {name: value.double().t() if value.dim() == 2 else value for name, value in state.items()}, tmp_path / "x.pt"
    )
    transposed = {tensor.name: read_tensor(tensor) for tensor in read_contents(tmp_path / "x.pt").tensors}
    assert torch.equal(transposed["body.0.weight"], state["body.0.weight"].double().t())


def test_a_malicious_file_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({**make_source().state(), "x": Payload(tmp_path / "mark")}, tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match=r"posix\.mkdir"):
        load_checkpoint(tmp_path / "x.pt", Net())
    assert not (tmp_path / "mark").exists()


def test_a_model_without_memory_raises_an_error(tmp_path: Path) -> None:
    torch.save(make_source().state(), tmp_path / "x.pt")
    with torch.device("meta"):
        empty = Net()
    for model in (empty, nn.LazyLinear(3)):
        with pytest.raises(CheckpointError, match=r"no memory yet"):
            load_checkpoint(tmp_path / "x.pt", model)


def test_gradients_and_parameters_stay_the_same_objects(tmp_path: Path) -> None:
    torch.save(make_source().state(), tmp_path / "x.pt")
    model = Net()
    weight = model.embed.weight
    load_checkpoint(tmp_path / "x.pt", model)
    assert model.embed.weight is weight
    assert weight.requires_grad
    assert weight.is_leaf
