"""Fixes use the program's own names: its operands replace x and y, and nothing is guessed."""

from __future__ import annotations

import pytest

from steadygrad.diagnose.own_names import use_own_names


@pytest.mark.parametrize(
    ("op", "fix", "operands", "shown"),
    [
        ("div", "x / (y + eps)", ("total", "count"), "total / (count + eps)"),
        ("sqrt", "x.clamp_min(eps).sqrt()", ("h.var(dim=1)",), "h.var(dim=1).clamp_min(eps).sqrt()"),
        ("log", "torch.log(x + eps)", ("a - b",), "torch.log(a - b + eps)"),
        ("mul", "x * y", ("y", "x"), "y * x"),
        ("div", "x / (y + eps)", ("total",), "x / (y + eps)"),
        ("div", "x / (y + eps)", ("total", ""), "x / (y + eps)"),
        ("sqrt", "lower the learning rate", ("x",), "lower the learning rate"),
        ("sqrt", "torch.nan_to_num(x)", (), "torch.nan_to_num(x)"),
        # Here x is not the operand of the op that failed.
        ("sqrt", "steadygrad.losses.safe_norm(x, dim=-1)", ("h.sum(-1)",), "steadygrad.losses.safe_norm(x, dim=-1)"),
        ("div", "(x * mask).sum(-1) / mask.sum(-1)", ("a", "b"), "(x * mask).sum(-1) / mask.sum(-1)"),
        ("exp", "torch.exp(x - x.max())", ("a",), "torch.exp(x - x.max())"),
    ],
)  # fmt: skip
def test_a_fix_uses_the_operands_of_the_line(op: str, fix: str, operands: tuple[str, ...], shown: str) -> None:
    assert use_own_names((fix,), operands, f"aten.{op}") == (shown,)


def test_a_power_keeps_its_exponent() -> None:
    fixes = ("x.clamp_min(eps) ** p", "p * torch.log(x)")
    assert use_own_names(fixes, ("model(x)",), "aten.pow", {"exponent": 1.5}) == (
        "model(x).clamp_min(eps) ** 1.5",
        "p * torch.log(x)",  # another function
    )
    assert use_own_names(fixes, ("model(x)", "y"), "aten.pow") == fixes  # a tensor is the exponent


def test_an_eps_comes_first_if_no_fix_fits_the_line() -> None:
    fixes = ("torch.linalg.vector_norm(x, dim=-1)", "torch.sqrt(x.square().sum(-1) + eps)")
    shown = use_own_names(fixes, ("d.pow(2).sum(-1)",), "aten.sqrt")
    assert shown == ("torch.sqrt(d.pow(2).sum(-1) + eps)", "torch.sqrt(d.pow(2).sum(-1).clamp_min(eps))", *fixes)


def test_a_diagnosis_suggests_code_that_fits_the_line() -> None:
    import torch

    from steadygrad import diagnose

    def training_step(features: torch.Tensor) -> torch.Tensor:
        x = features.sum()  # not the x of the explanation
        spread = features.var(dim=1)
        return spread.sqrt().sum() + x

    batch = torch.randn(4, 3)
    batch[1] = 2.0
    cause = diagnose(training_step, batch.requires_grad_())
    assert cause is not None
    assert cause.source == "return spread.sqrt().sum() + x"
    assert any("spread" in fix for fix in cause.fixes)
    assert "1 of 4 elements of spread are 0" in cause.explanation
    assert not any(fix.startswith("x") for fix in cause.fixes)


def test_the_fix_of_a_division_by_a_deviation_uses_the_programs_names() -> None:
    fixes = ("(x - x.mean()) / (x.std() + eps)", "(x - x.mean()) / x.std().clamp_min(eps)")
    assert use_own_names(fixes, ("features", "spread[:, None]"), "aten.div") == (
        "features / (spread[:, None] + eps)",
        "features / spread[:, None].clamp_min(eps)",
        *fixes,
    )
    assert use_own_names(fixes, (), "aten.div") == fixes
    assert use_own_names(("nn.init.orthogonal_(layer.weight)",), ("a", "b"), "aten.div") == (
        "nn.init.orthogonal_(layer.weight)",
    )
