"""The wheel with only its hard dependencies, and with each extra: what a new user tries first works.

The environments are real, created by venv, but their packages are links to those installed here. So this shows that the
declared dependencies are sufficient, not that an index can resolve them.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    "yaml": "from steadygrad import GuardConfig; open('a.yaml', 'w').write('{}'); GuardConfig.load('a.yaml')",
    "lightning": "from steadygrad.adapters.lightning import GuardCallback; GuardCallback()",
    "transformers": "from steadygrad.adapters.transformers import GuardCallback; GuardCallback()",
    "tensorboard": "from steadygrad.record.tensorboard import TensorBoardSink; TensorBoardSink('tb').close()",
    "wandb": "from steadygrad.record.wandb import WandbSink; WandbSink(mode='disabled').close()",
    "trackio": "from steadygrad import TrackioSink; import trackio",
    "mlflow": "from steadygrad import MlflowSink; import mlflow",
    "view": "from steadygrad.cli import main; assert main(['plot', 'runs/a', '-o', 'a.png']) == 0",
    "recipes": "from steadygrad_recipes.seo import Config; import yaml, PIL, bs4",
    "data": "import datasets, pyarrow",
    "qlora": "import bitsandbytes",
    "timm": "import timm",
    "tune": "from steadygrad.cli import main; assert main(['tune', 'seo', '--help']) == 0; import optuna",
}
"""A program that needs each extra; extras that only combine others are not listed."""


def find_dependencies(extra: str | None = None) -> set[str]:
    """Return the distributions that the wheel needs, with or without an extra, and their dependencies."""
    own = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else [])]
    found: set[str] = set()
    left = [Requirement(line) for line in own]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        wanted = [{"extra": one} for one in requirement.extras] or [{"extra": ""}]
        if not is_installed(name) or (name in found and not requirement.extras):
            continue
        found.add(name)
        inner = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        left += [one for one in inner if one.marker is None or any(one.marker.evaluate(way) for way in wanted)]
    return found


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return next((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel and its hard dependencies."""
    return make_environment(tmp_path_factory.mktemp("bare"), wheel, find_dependencies())


def make_environment(folder: Path, wheel: Path, names: set[str]) -> Path:
    """Create an environment with the wheel and these distributions, linked from the current one; return its Python."""
    venv.create(folder / "env", symlinks=True, with_pip=False)
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in names:
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
        [str(bare), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def test_the_environment_is_bare(bare: Path, tmp_path: Path) -> None:
    seen = run(bare, "-c", "import steadygrad, torch; print(steadygrad.__file__)", cwd=tmp_path)
    assert "bare" in seen.stdout, seen.stderr
    for name in ("yaml", "matplotlib", "transformers", "lightning", "starlette"):
        assert run(bare, "-c", f"import {name}", cwd=tmp_path).returncode == 1, f"{name} is not a hard dependency"


def test_the_readme_runs(bare: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    ran = run(bare, "readme.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "born in aten.div" in ran.stdout
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


def test_every_extra_is_tested_or_combines_others() -> None:
    groups = {"all", "docs", "dev"}
    assert set(EXTRAS) | groups == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installs_what_it_is_for(extra: str, wheel: Path, tmp_path: Path) -> None:
    declared = [canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"][extra]]
    missing = [name for name in declared if not is_installed(name)]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    python = make_environment(tmp_path, wheel, find_dependencies(extra))
    if extra == "view":
        (tmp_path / "train.py").write_text(
            "import torch\nfrom steadygrad import Guard\nmodel = torch.nn.Linear(2, 1)\n"
            "with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir='runs/a') as guard:\n"
            "    for x in torch.randn(5, 4, 2):\n"
            "        guard.step(lambda x: model(x).square().mean(), x)\n"
        )
        assert run(python, "train.py", cwd=tmp_path).returncode == 0
    tried = run(python, "-c", EXTRAS[extra], cwd=tmp_path)
    assert tried.returncode == 0, tried.stdout + tried.stderr
