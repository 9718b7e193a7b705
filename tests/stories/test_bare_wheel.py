"""The wheel with nothing but its hard dependencies: what a new user tries first works, or names the missing extra."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def find_hard_dependencies() -> set[str]:
    """Names of the distributions that the wheel needs, and of all that those need, without any extra."""
    found: set[str] = set()
    left = ["steadygrad"]
    while left:
        for requirement in importlib.metadata.requires(left.pop()) or []:
            name = re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0]
            if "extra ==" not in requirement and name not in found and is_installed(name):
                found.add(name)
                left.append(name)
    return found


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that sees the wheel and its hard dependencies, linked from the present one."""
    folder = tmp_path_factory.mktemp("bare")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    venv.create(folder / "env", symlinks=True, with_pip=False)
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    wheel = next((folder / "dist").glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in find_hard_dependencies():
        files = importlib.metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files if file.parts and not file.parts[0].startswith("..")}:
            target = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if target.exists() and not (packages / top).exists():
                (packages / top).symlink_to(target)
    return folder / "env" / "bin" / "python"


def run(bare: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    return subprocess.run(
        [str(bare), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_it_is_bare(bare: Path, tmp_path: Path) -> None:
    seen = run(bare, "-c", "import steadygrad, torch; print(steadygrad.__file__)", cwd=tmp_path)
    assert "bare" in seen.stdout, seen.stderr
    for name in ("yaml", "matplotlib", "transformers", "lightning", "starlette"):
        assert run(bare, "-c", f"import {name}", cwd=tmp_path).returncode == 1, f"{name} is no hard dependency"


def test_the_readme_runs(bare: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    ran = run(bare, "readme.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "born by aten.div" in ran.stdout
    assert list((tmp_path / "runs" / "first" / "batches").iterdir()), "the bad batch is kept"


def test_the_commands_work_or_name_the_extra(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(12):\n"
        "    x = torch.randn(8, 4)\n"
        "    loss = (model(x) / (step != 7)).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    guarded = run(bare, "-m", "steadygrad", "run", "--run-dir", "runs/a", "train.py", cwd=tmp_path)
    assert guarded.returncode == 0, guarded.stderr
    assert "train.py:6" in guarded.stdout + guarded.stderr
    assert run(bare, "-m", "steadygrad", "doctor", cwd=tmp_path).returncode in (0, 1)
    report = run(bare, "-m", "steadygrad", "report", "runs/a", cwd=tmp_path)
    assert report.returncode == 0 or "pip install" in report.stdout + report.stderr, report.stderr
    plot = run(bare, "-m", "steadygrad", "plot", "runs/a", "-o", "a.png", cwd=tmp_path)
    assert plot.returncode == 2
    assert "pip install 'steadygrad[view]'" in plot.stdout + plot.stderr


def test_the_demo_survives(bare: Path, tmp_path: Path) -> None:
    demo = run(bare, "-m", "steadygrad", "demo", "--quick", "--run-dir", "runs/demo", cwd=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
