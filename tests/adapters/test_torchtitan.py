"""torchtitan's own Trainer, on two ranks with FSDP2: guarded by one call, equal bits, a bad step skipped by both."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parent / "titan_program.py"
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew tea in old towers".split()  # noqa: SIM905

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None or importlib.util.find_spec("spmd_types") is None,
    reason="torchtitan is not installed (pip install torchtitan)",
)


def make_assets(folder: Path) -> None:
    """Make the text and tokenizer that are in torchtitan's repository but not in its wheel."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    source = random.Random(0)
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    rows = [json.dumps({"text": " ".join(source.choices(WORDS, k=60))}) for _ in range(200)]
    (data / "data.json").write_text("\n".join(rows))
    marks = ["<|begin_of_text|>", "<|end_of_text|>"]
    vocabulary = {word: i for i, word in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(marks)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": marks[0], "eos_token": marks[1]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))


def train(folder: Path, how: str, bad_step: int = -1) -> list[dict[str, Any]]:
    folder.mkdir()
    make_assets(folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(PROGRAM), how, str(bad_step), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf"), "WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_a_guarded_torchtitan_training_is_bit_identical_and_survives_a_bad_step(tmp_path: Path) -> None:
    plain, quiet = train(tmp_path / "plain", "plain"), train(tmp_path / "quiet", "guarded")
    faulty = train(tmp_path / "faulty", "guarded", bad_step=4)
    for one, other, bad in zip(plain, quiet, faulty):
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())
        assert (other["skipped"], other["incidents"], other["rate"]) == (0, [], one["rate"])
        assert bad["skipped"] == 1
        step, kind, message = bad["incidents"][-1]
        assert (step, kind) == (3, "nonfinite_loss")
        assert "it began on rank 1" in message
        assert all(weight.isfinite().all() for weight in bad["weights"].values())
        assert bad["rate"] > one["rate"]  # the schedule did not advance during the skipped step
