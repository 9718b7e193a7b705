"""The command `scan`: exit codes, text, JSON, and that names in a file cannot control the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import NAN, Payload, make_weights, write_safetensors, write_torch
from safetensors.torch import save_file

from steadygrad.cli import main
from steadygrad.cli.console import Console
from steadygrad.cli.scan import report_scan


@pytest.fixture
def clean_file(tmp_path: Path) -> Path:
    save_file({"w": torch.ones(3)}, tmp_path / "clean.safetensors")
    return tmp_path / "clean.safetensors"


@pytest.fixture
def bad_file(tmp_path: Path) -> Path:
    return write_torch(tmp_path, make_weights())


@pytest.fixture
def refused_file(tmp_path: Path) -> Path:
    torch.save(Payload(tmp_path / "mark"), tmp_path / "refused.pt")
    return tmp_path / "refused.pt"


def test_exit_codes_mean_clean_found_and_failed(clean_file: Path, bad_file: Path, refused_file: Path) -> None:
    assert main(["scan", str(clean_file)]) == 0
    assert main(["scan", str(bad_file)]) == 1
    assert main(["scan", str(clean_file), str(bad_file)]) == 1
    assert main(["scan", str(refused_file)]) == 2
    assert main(["scan", str(clean_file), str(refused_file)]) == 2
    assert main(["scan", str(bad_file), str(refused_file)]) == 2
    assert main(["scan", str(bad_file.with_name("nowhere.pt"))]) == 2
    assert main(["scan"]) == 2


def test_the_output_names_the_tensor_and_what_to_do(bad_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["scan", str(bad_file)])
    said = capsys.readouterr().out
    assert "NaN or Inf in 3 elements of 1 of 3 tensors" in said
    assert "steadygrad clean" in said
    assert "embed" not in said

    main(["scan", str(bad_file), "--all"])
    assert "embed" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["scan"], ["scan", "--diff"], ["clean"]])
def test_files_that_are_damaged_or_no_checkpoint_are_reported_with_advice(
    command: list[str], bad_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, cut = tmp_path / "notes.txt", tmp_path / "cut.safetensors"
    text.write_text("hello")
    save_file({"a": torch.ones(3)}, cut)
    cut.write_bytes(cut.read_bytes()[:-4])
    for path, expected in (
        (text, "is not a checkpoint: it begins with b'hello'"),
        (cut, "copy it again, or use an older one"),
    ):
        more = {"scan": [], "scan --diff": [str(bad_file)], "clean": [str(tmp_path / "target.pt")]}[" ".join(command)]
        assert main([*command, str(path), *more]) == 2
        said = capsys.readouterr().err
        assert expected in said
        assert "resume()" not in said  # there may be no run to resume


def test_refused_files_are_reported_on_stderr_and_the_rest_is_scanned(
    bad_file: Path, refused_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scan", str(refused_file), str(bad_file)]) == 2
    said = capsys.readouterr()
    assert "would run posix.mkdir" in said.err
    assert "NaN or Inf" in said.out
    assert not (refused_file.parent / "mark").exists()


def test_the_json_is_one_strict_object(bad_file: Path, refused_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"lr": NAN}, bad_file.with_name("number.pt"))
    code = main(["scan", "--json", str(bad_file), str(refused_file), str(bad_file.with_name("number.pt"))])

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert code == 2
    assert found["clean"] is False
    first, second = found["checkpoints"]
    assert first["num_bad_tensors"] == 1
    bad = next(one for one in first["tensors"] if one["name"] == "bad")
    assert (bad["num_nan"], bad["num_inf"], bad["shape"], bad["dtype"]) == (1, 2, [40, 50], "float32")
    assert second["bad_numbers"] == [["lr", "nan"]]
    assert "posix.mkdir" in found["refused"][0]["reason"]


def test_diff_reports_equality_or_changes(clean_file: Path, bad_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", "--diff", str(bad_file), str(bad_file)]) == 0
    assert "3 equal, 0 changed" in capsys.readouterr().out
    assert main(["scan", "--diff", str(clean_file), str(bad_file)]) == 1
    said = capsys.readouterr().out
    assert "- w" in said
    assert "+ bad" in said
    assert main(["scan", str(clean_file), "--diff"]) == 2
    assert main(["scan", "--diff", str(clean_file), str(clean_file.with_name("nowhere"))]) == 2
    capsys.readouterr()

    assert main(["scan", "--json", "--diff", str(clean_file), str(bad_file)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["removed"], found["num_equal"]) == (False, ["w"], 0)


def test_names_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"\x1b[2Jw\n": torch.tensor([NAN])}, tmp_path / "x.safetensors")
    main(["scan", str(tmp_path / "x.safetensors")])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\\x1b[2Jw\\n" in said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_file_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    path = write_safetensors(tmp_path, {"w": torch.ones(1 << 20)})
    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        report_scan(Console(output), [path], show_all=False, as_json=False)
    assert "4/4" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()
    assert "4/4" not in file.getvalue()


@pytest.mark.parametrize("command", ["scan", "clean"])
def test_help_has_an_example_and_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"steadygrad {command} " in said.partition("Example:")[2]
    assert "Exit code 0" in " ".join(said.split())
