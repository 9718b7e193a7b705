"""clip6d against its seed, line by line: names, defaults, flags, numbers and printed lines."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from clip6d_trainings import SIX, TINY, make_config, open_shapes, train
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader

from steadygrad import GradientHealthMonitor
from steadygrad.adapters.lightning import EnhancedTrainingMixin
from steadygrad.cli import main
from steadygrad.losses import StableLossFunctions, get_stable_loss_function, multiway_contrastive, safe_normalize
from steadygrad.nn import ImprovedActivations, add_gradient_checkpointing
from steadygrad_recipes.clip6d.check_setup import check_setup
from steadygrad_recipes.clip6d.config import ACTIVATIONS, Clip6dConfig
from steadygrad_recipes.clip6d.data import Batch, CaptionLoader, iterate_validation
from steadygrad_recipes.clip6d.encoders import ResidualAttentionBlock
from steadygrad_recipes.clip6d.module import (
    SIMILARITIES,
    EnhancedLightningCLIPModule,
    average_cross_entropy,
    compute_plain_logits,
)


def make_module(**settings: Any) -> EnhancedLightningCLIPModule:
    torch.manual_seed(0)
    return EnhancedLightningCLIPModule(**({"model": TINY} | settings))


def take_batch(**changes: Any) -> Batch:
    config = make_config(**changes)
    return next(iter(CaptionLoader(open_shapes(config), config)))


def fit_alone(module: LightningModule, config: Clip6dConfig, **options: Any) -> pl.Trainer:
    """In a Trainer of one's own, without a GuardCallback, as the seed uses it."""
    corpus = open_shapes(config)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings: dict[str, Any] = {"logger": False, "accelerator": "cpu", "max_epochs": 1} | quiet | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(num_sanity_val_steps=0, log_every_n_steps=1, **settings)
        batches: Any = list(iterate_validation(corpus, config))
        trainer.fit(module, CaptionLoader(corpus, config), DataLoader(batches, batch_size=None))
    return trainer


# --- "Option 3: use the enhanced training module" -------------------------------------------------------------------


def test_the_module_takes_the_seeds_arguments_and_has_its_defaults() -> None:
    EnhancedLightningCLIPModule(
        learning_rate=1e-4,
        enable_gradient_monitoring=True,
        use_stable_loss=True,
        stable_loss_version=1,  # Norm-based stable loss
        gradient_clip_value=1.0,
        model=TINY,
    )
    wanted: dict[str, Any] = {
        "learning_rate": 1e-4,
        "enable_gradient_monitoring": True,
        "use_stable_loss": True,
        "stable_loss_version": 1,
        "gradient_clip_value": 1.0,
    }
    parameters = inspect.signature(EnhancedLightningCLIPModule).parameters
    assert {name: parameters[name].default for name in wanted} == wanted
    config = Clip6dConfig()
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert len(config.modalities) == 6
    assert config.model.improved_activation == "gelu"
    assert (config.eval_every, config.save_every, config.log_frequency) == (1000, 1000, 100)


def test_it_is_the_mixin_and_a_lightning_module() -> None:
    module = make_module()
    assert isinstance(module, EnhancedTrainingMixin)
    assert isinstance(module, LightningModule)
    assert module.enable_gradient_monitoring
    assert "on_after_backward" in vars(EnhancedLightningCLIPModule)


def test_alone_in_a_trainer_it_looks_clips_and_logs_as_the_seed_says(capsys: pytest.CaptureFixture[str]) -> None:
    class Lines(DummyLogger):
        lines: list[dict[str, float]] = []  # noqa: RUF012 - of this test only

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.lines.append(dict(metrics))

    class Watched(EnhancedLightningCLIPModule):
        norms: list[float] = []  # noqa: RUF012

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.cat(gradients).norm()))

    torch.manual_seed(0)
    module = Watched(model=TINY, modalities=("en", "vector"), log_frequency=10)
    config = make_config(modalities=("en", "vector"), num_synthetic=432)
    fit_alone(module, config, logger=Lines(), max_steps=12)

    keys = {key for line in Lines.lines for key in line}
    assert {"grad/global_norm", "grad/max_norm", "grad/min_norm", "grad/has_nan", "grad/has_inf"} <= keys
    before = [line["grad/global_norm"] for line in Lines.lines if "grad/global_norm" in line]
    assert len(before) == 12
    assert module.norms == pytest.approx([min(norm, 1.0) for norm in before], rel=1e-4)
    out = capsys.readouterr().out
    assert "Step 0 - Gradient Health: Global Norm=" in out
    assert "Step 10 - Gradient Health: Global Norm=" in out


def test_alone_in_a_trainer_it_validates_with_retrieval_for_each_pair() -> None:
    config = make_config(modalities=("en", "zh", "vector"))
    trainer = fit_alone(make_module(modalities=config.modalities), config, limit_train_batches=2)
    metrics = trainer.callback_metrics
    assert 0 < float(metrics["val_loss"]) < 10
    assert {f"R@{k}/en->zh" for k in (1, 5, 10)} | {"R@1", "R@5", "R@10"} <= set(metrics)


def test_with_accumulation_the_gradients_are_looked_at_when_they_are_whole(tmp_path: Path) -> None:
    config = make_config(modalities=("en", "vector"), accumulation_steps=4, num_synthetic=60)
    module, _ = train(config, tmp_path, corpus=open_shapes(config, num=60))
    assert module.gradient_monitor is not None
    assert module.gradient_monitor.num_checks == math.ceil(9 / 4)


def test_under_a_guard_the_module_only_looks(tmp_path: Path) -> None:
    config = make_config(modalities=("en", "vector"), max_steps=3, gradient_clip_value=1e-3)
    module, _ = train(config, tmp_path)
    assert module.gradient_monitor is not None
    records = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    norms = [record["grad_norm"] for record in records]
    assert norms == pytest.approx(list(module.gradient_monitor.history["global_norm"])), "both saw them unclipped"
    assert [r["clip_coefficient"] for r in records] == pytest.approx([1e-3 / norm for norm in norms], rel=1e-3)


# --- the losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_every_loss_version_of_the_seed_gives_logits_and_a_loss(version: int) -> None:
    batch = take_batch()
    module = make_module(stable_loss_version=version)
    logits = module(batch)
    assert logits.shape == ((6,) * 6 if version < 2 else (6, 6))
    stable = get_stable_loss_function(loss_version=version, normalize=True, eps=1e-8)
    assert torch.equal(logits, stable(*module.encode(batch).values()))

    features = module.encode(batch)
    loss = module.compute_loss(features)
    units = [safe_normalize(f) for f in features.values()]
    naive = multiway_contrastive(units, module.logit_scale(), similarity=SIMILARITIES[version], impl="naive")  # type: ignore[arg-type]
    torch.testing.assert_close(loss, naive, rtol=1e-4, atol=1e-4)  # fp32 sums of 7776 in another order
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize("negatives", ["all", "fibre", "sampled", "permuted"])
def test_every_kind_of_negatives_can_be_used(negatives: str) -> None:
    batch = take_batch(modalities=("image", "en", "vector"))
    module = make_module(modalities=("image", "en", "vector"), negatives=negatives)
    loss = module.compute_loss(module.encode(batch), batch["present"])
    loss.backward()
    assert 0 < float(loss.detach()) < 20


def test_without_the_stable_loss_it_is_the_product_at_clips_scale_whatever_the_version() -> None:
    """As the original: `stable_loss_version` chooses among the stable ones only."""
    batch = take_batch()
    for version in range(4):
        module = make_module(use_stable_loss=False, stable_loss_version=version)
        features = module.encode(batch)
        units = [f / f.norm(dim=-1, keepdim=True) for f in features.values()]
        logits = torch.einsum("az,bz,cz,dz,ez,fz->abcdef", *units)
        torch.testing.assert_close(module(batch), logits, rtol=1e-4, atol=1e-7)  # fp32 sums in another order
        wanted = average_cross_entropy(logits / 0.07)
        torch.testing.assert_close(module.compute_loss(features), wanted)


def test_the_plain_loss_shrinks_with_the_number_of_combinations() -> None:
    """A cross entropy averaged over [B]^M has B labels in B^(M-1) rows."""
    torch.manual_seed(0)
    features = [torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    units = [f / f.norm(dim=-1, keepdim=True) for f in features]
    plain = average_cross_entropy(compute_plain_logits(*features))
    torch.testing.assert_close(plain * 4 ** (4 - 2), multiway_contrastive(units, 1.0, negatives="fibre"))


def test_the_plain_logits_break_where_the_stable_ones_do_not() -> None:
    features = [torch.randn(4, 8) for _ in range(3)]
    features[1][2] = 0.0
    assert not compute_plain_logits(*features).isfinite().all()
    assert get_stable_loss_function(loss_version=0)(*features).isfinite().all()


def test_the_seeds_custom_loss_can_be_put_in_the_place_of_the_modules_logits() -> None:
    stable_ops = StableLossFunctions(eps=1e-8, clamp_min=-100, clamp_max=100)

    def my_custom_loss(*features: Tensor) -> Tensor:
        units = [stable_ops.stable_norm(f) for f in features]
        similarity = stable_ops.stable_norm_based_similarity(*units)
        return torch.clamp(similarity, -10, 10)

    module = make_module()
    module.calculate_loss = my_custom_loss
    logits = module(take_batch())
    assert logits.shape == (6,) * 6
    assert 0 < float(logits.detach().max()) <= 6.001, "six unit vectors never reach the clamp"


# --- activations, checkpointing, monitoring -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_the_seed_can_be_chosen(name: str) -> None:
    block = ResidualAttentionBlock(32, dataclasses.replace(TINY, improved_activation=name))
    assert block.activation is getattr(ImprovedActivations, name)


def test_blocks_are_checkpointed_by_the_names_of_the_seed_and_nothing_changes() -> None:
    batch = take_batch(modalities=("image", "en"))
    plain, wrapped = (make_module(modalities=("image", "en")) for _ in range(2))
    names = add_gradient_checkpointing(model=wrapped, modules_to_checkpoint=["transformer", "ResidualAttentionBlock"])
    assert set(names) == {"image_encoder.transformer.0", "text_encoder.transformer.0"}
    for module in (plain, wrapped):
        module.compute_loss(module.encode(batch)).backward()
    pairs = zip(plain.parameters(), wrapped.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


def test_units_that_die_during_training_are_counted_as_dead(capsys: pytest.CaptureFixture[str]) -> None:
    class Dying(EnhancedLightningCLIPModule):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step >= 3:
                for parameter in self.text_encoder.project.parameters():
                    parameter.detach().zero_()

    config = make_config(modalities=("en", "de"), batch_size=2, log_frequency=2)
    torch.manual_seed(0)
    module = Dying(
        model=TINY, modalities=config.modalities, enable_activation_monitoring=True, log_frequency=config.log_frequency
    )
    fit_alone(module, config, max_steps=7)

    printed = re.findall(r"Step (\d+) - Activations: .* dead units ([\d.]+)%(.*)", capsys.readouterr().out)
    assert [(step, float(share) > 0) for step, share, _ in printed] == [
        ("0", False), ("2", False), ("4", True), ("6", True),
    ]  # fmt: skip
    assert printed[-1][-1] == ", most in text_encoder.project (100.0%)"


def test_gradient_checkpointing_is_a_field(tmp_path: Path) -> None:
    losses = []
    for on in (False, True):
        model = dataclasses.replace(TINY, gradient_checkpointing=on)
        _, saver = train(make_config(modalities=("image", "en"), max_steps=2, model=model), tmp_path / str(on))
        losses.append(saver.metrics["val_loss"])
    assert losses[0] == losses[1]


def test_the_monitor_of_the_seed_works_on_the_module_by_hand() -> None:
    module = make_module(modalities=("en", "vector"))
    monitor = GradientHealthMonitor(
        model=module,
        grad_clip_threshold=1.0,
        vanishing_threshold=1e-7,
        exploding_threshold=100.0,
        log_frequency=100,
        enable_detailed_logging=True,
    )
    module.compute_loss(module.encode(take_batch(modalities=("en", "vector")))).backward()
    stats = monitor.check_gradients()
    assert not stats["has_nan"]
    if stats["global_grad_norm"] > 10.0:
        monitor.apply_gradient_clipping(max_norm=1.0)
    flow = monitor.get_gradient_flow_summary()
    assert flow["layers_with_vanishing_grads"] == flow["layers_with_exploding_grads"] == []


def test_activations_are_watched_where_that_is_asked_for(tmp_path: Path) -> None:
    config = make_config(modalities=("en", "vector"), max_steps=2, enable_activation_monitoring=True)
    module, _ = train(config, tmp_path)
    assert "vector_encoder.up" in module.get_activation_statistics()["activations"]


def test_the_check_of_the_setup_prints_what_the_seed_expects(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_setup() == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "Testing Gradient Health Monitor",
        "================================",
        "✓ Gradient monitoring test passed!",
    ]
    assert re.fullmatch(r"  Global norm: \d+\.\d{4}", lines[3])
    assert re.fullmatch(r"  Max norm: \d+\.\d{4}", lines[4])
    assert re.fullmatch(r"  Min norm: \d\.\de-\d\d", lines[5])
    assert lines[6:11] == [
        "  Has NaN: False",
        "  Has Inf: False",
        "",
        "Testing Stable Loss Functions",
        "==============================",
    ]
    at = lines.index("✓ Norm-based (v1):")
    assert lines[at + 1] == "  Shape: torch.Size([16, 16, 16])"
    assert re.fullmatch(r"  Range: \[-?\d+\.\d{4}, -?\d+\.\d{4}\]", lines[at + 2])
    assert re.fullmatch(r"  Mean: -?\d+\.\d{4}, Std: \d+\.\d{4}", lines[at + 3])
    assert lines[at + 4 : at + 6] == ["  Valid: ✓", "  Backward pass: ✓"]
    assert lines[-1] == "ALL TESTS COMPLETED!"


def test_the_check_of_the_setup_fails_where_a_loss_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "steadygrad_recipes.clip6d.check_setup.get_stable_loss_function"
    monkeypatch.setattr(where, lambda **_: compute_plain_logits)

    assert check_setup() == 4

    assert capsys.readouterr().out.splitlines()[-1] == "4 TESTS FAILED!"


def test_large_norms_under_a_guard_are_worth_one_warning_an_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadygrad_recipes.clip6d.module.EXPLODING", 1e-6)
    config = make_config(modalities=("en", "vector"), num_synthetic=60, epochs=3)
    train(config, tmp_path, corpus=open_shapes(config, num=60))

    num_told = capsys.readouterr().out.count("Exploding gradients detected")
    assert num_told == 2, "the first epoch has the monitor's own threshold"


def test_small_norms_under_a_guard_are_worth_one_warning_an_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadygrad_recipes.clip6d.module.VANISHING", 99.0)
    config = make_config(modalities=("en", "vector"), num_synthetic=60, epochs=3)
    train(config, tmp_path, corpus=open_shapes(config, num=60))

    num_told = capsys.readouterr().out.count("Vanishing gradients detected")
    assert num_told == 2, "the first epoch has the monitor's own threshold"


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_trains_tells_and_finds_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "clip6d", "--quick", f"--run-dir={tmp_path}", "--max-steps=6", "--eval-every=4"]
    sizes = ["--model.embed_dim=32", "--modalities=image,en,vector", "--batch-size=4", "--num-synthetic=40"]
    assert main([*words, *sizes]) == 0
    out = capsys.readouterr().out
    assert "No data was given: 40 images with captions were generated" in out
    assert "image + en + vector: 36 samples to train, 4 to validate" in out
    assert "Step 4: val_loss=" in out
    assert "Epoch 1/8: loss=" in out
    assert "grad avg=" in out
    assert " max=" in out
    assert "image - vector" in out
    assert (tmp_path / "report.html").is_file()

    picture = str(tmp_path / "data" / "images" / "0003.png")
    assert main(["train", "clip6d", f"--predict={picture}", f"--run-dir={tmp_path}"]) == 0
    assert "Nearest to the image" in capsys.readouterr().out
    assert main(["train", "clip6d", "--predict=a red circle", f"--run-dir={tmp_path}"]) == 0
    assert "  image  " in capsys.readouterr().out


def test_the_help_lists_the_fields_of_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "clip6d", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("enable-gradient-monitoring", "use-stable-loss", "stable-loss-version", "gradient-clip-value"):
        assert f"--{flag}" in out
    assert "0 product (einsum), 1 norm of the sum, 2 mean of the pairwise cosines, 3 distance." in " ".join(out.split())


def test_six_is_the_default_number_of_modalities() -> None:
    assert Clip6dConfig().modalities == SIX


def test_the_page_has_every_field_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes" / "clip6d.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `--([\w.-]+)` \| (.*?) \|", page, re.MULTILINE))
    config = Clip6dConfig()
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "model"}
    fields |= {f"model.{f.name}": getattr(config.model, f.name) for f in dataclasses.fields(config.model)}
    flags = {name.replace("_", "-"): value for name, value in fields.items()}
    for name, value in flags.items():
        plain = str(value).lower() if isinstance(value, bool) or value is None else str(value)
        text = ",".join(value) if isinstance(value, tuple) else plain
        assert shown[name] == text or float(shown[name]) == value
    assert shown.keys() == flags.keys()
