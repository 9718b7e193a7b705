"""What a release promises: versions, systems, a build that works in any folder, files that agree with each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import steadygrad
from steadygrad.disk.write import is_alive, sync_folder
from steadygrad.errors import UnsupportedError
from steadygrad.guard.preflight import refuse_devices

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_works_in_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    """Every path that it passes is relative or quoted: none contains the folder's name."""
    clone = tmp_path / "a clone of steadygrad"
    clone.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone / name)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    for target in ("demo", "test", "docs", "release", "coverage", "bench", "clean"):
        printed = subprocess.run(["make", "-n", target], cwd=clone, env=environment, capture_output=True, text=True)
        assert printed.returncode == 0, printed.stderr
        assert clone.name not in printed.stdout


def test_the_wheel_builds_in_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    clone = tmp_path / "a clone of steadygrad"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", clone / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=clone, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert list((clone / "dist").glob("*.whl"))


def test_the_oldest_promised_torch_is_tested() -> None:
    oldest = next(re.search(r">=([\d.]+)", line)[1] for line in PROJECT["dependencies"] if line.startswith("torch"))  # type: ignore[index]
    assert f'"{oldest}.*"' in read(".github/workflows/tests.yml")
    assert f"torch {oldest} or later" in read("README.md")


def test_versions_and_systems_agree() -> None:
    workflow = read(".github/workflows/tests.yml")
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert [f'"{version}"' in workflow for version in pythons] == [True] * len(pythons)
    assert {"ubuntu-latest", "macos-latest", "windows-latest"} <= set(re.findall(r"[\w-]+-latest", workflow))
    assert f"version: {steadygrad.__version__}" in read("CITATION.cff")
    assert set(PROJECT["urls"]) >= {"Homepage", "Documentation", "Changes", "Issues"}
    assert PROJECT["license"] == "Apache-2.0"


def test_mps_is_refused_before_the_first_step() -> None:
    refuse_devices({"cpu", "cuda"})
    with pytest.raises(UnsupportedError, match="no float64"):
        refuse_devices({"mps"})


def test_windows_gets_no_unsupported_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, signal 0 is Ctrl+C, and a folder cannot be opened."""

    def refuse(*_args: object) -> None:
        raise AssertionError("not on Windows")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(os, "open", refuse)
    assert is_alive(4711)
    sync_folder(tmp_path)
