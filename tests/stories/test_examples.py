"""The programs and notebooks of examples/: each runs in an empty folder and prints what it promises."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from launching import run_plainly

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
PRINTS = {
    "plain_loop.py": ["plain_loop.py:17", "(index 5)", "1 of 200 steps skipped; healthy: True"],
    "amp_accumulation.py": ["skipped: [30]; weights and BatchNorm statistics finite: True"],
    "ppo.py": ["4 updates skipped, 0 rollbacks"],
    "gan.py": ["generator: 0 skipped, 0 rollbacks", "discriminator: 1 skipped, 0 rollbacks", "input real"],
    "lightning_trainer.py": ["step 104: nonfinite_loss, 1 of 32 in the batch (index 3)", "weights finite: True"],
    "hf_trainer.py": ["[(0, 'nonfinite_loss'), (16, 'nonfinite_loss')]", "2 of 32 steps skipped"],
    "trl_sft.py": ["the step was skipped", "input_layernorm", "weights finite: True"],
    "accelerate_deepspeed.py": ["[(12, 'nonfinite_loss')]"],
}
"""Part of what each program prints."""
NEEDS = {
    "lightning_trainer.py": "lightning",
    "hf_trainer.py": "transformers",
    "trl_sft.py": "trl",
    "accelerate_deepspeed.py": "accelerate",
}
DEEPSPEED_ON_A_CPU = """
import os, runpy, sys
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
import torch.distributed as dist
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would need a C++ compiler
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_CPU)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.argv = [sys.argv[1], "--deepspeed"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("name", PRINTS)
def test_a_program_survives_its_fault(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))

    done = run_plainly(tmp_path, str(EXAMPLES / name))
    printed = done.out + done.err

    assert done.code == 0, printed
    assert [text for text in PRINTS[name] if text not in printed] == [], printed


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_accelerate_program_also_survives_on_deepspeed(tmp_path: Path) -> None:
    printed = run("-c", DEEPSPEED_ON_A_CPU, str(EXAMPLES / "accelerate_deepspeed.py"), cwd=tmp_path)

    assert "[(12, 'nonfinite_loss')]" in printed


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("first_guard", ["<svg", "300 steps, 1 skipped", "already in the input", "True 1"]),
        ("find_a_nan", ["True False", "aten.sqrt", "(index 9)", "None"]),
    ],
)
def test_a_notebook_runs_from_top_to_bottom(name: str, shown: list[str], tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="no ipykernel: pip install nbclient ipykernel")
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import KernelManager

    notebook = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    manager = KernelManager()
    manager._kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client leaves sockets open until it is garbage collected
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, km=manager, timeout=300, resources=resources).execute()
        del manager
        gc.collect()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") + "".join(output.get("data", {}).values()) for output in outputs)

    assert [word for word in shown if word not in text] == [], text


def test_the_list_names_every_example() -> None:
    named = re.findall(r"\]\(([\w/]+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    there = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".ipynb")]
    assert sorted(named) == sorted(there)
    assert sorted(PRINTS) == sorted(name for name in there if name.endswith(".py"))


def test_no_notebook_is_committed_with_outputs() -> None:
    """Outputs would show another machine, and become outdated."""
    notebooks = [json.loads(path.read_text(encoding="utf-8")) for path in (EXAMPLES / "notebooks").glob("*.ipynb")]
    assert len(notebooks) == 2
    assert [cell for one in notebooks for cell in one["cells"] if cell.get("outputs")] == []
