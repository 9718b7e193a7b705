"""The library of explanations: each failure really fails, each fix really cures it, and the right entry is chosen.

Fixes are run as printed. Nothing is mocked: plain torch fails, plain torch with the fix does not.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from catalogue import render_catalogue
from cures import CURES, Cure, sum_up
from cures.cure import TOOLS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadygrad
from steadygrad.diagnose import diagnose
from steadygrad.diagnose.explanations import explain
from steadygrad.diagnose.explanations.entry import plain_name
from steadygrad.diagnose.explanations.library import ENTRIES
from steadygrad.diagnose.situation import Operand, Situation
from steadygrad.facts import Cause

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

PAGE = Path(__file__).parents[2] / "docs" / "explanations.md"
BY_NAME = {entry.name: entry for entry in ENTRIES}
FIXES = [(entry.name, fix) for entry in ENTRIES for fix in entry.fixes]
REFUSALS = (RuntimeError, ValueError, IndexError)

entries = pytest.mark.parametrize("name", BY_NAME)
failures = pytest.mark.parametrize(
    ("name", "broken"), [(name, broken) for name, cure in CURES.items() for broken in (cure.broken, *cure.also)]
)
fixes = pytest.mark.parametrize(("name", "fix"), FIXES)


# --- the fixes --------------------------------------------------------------------------------------------------------


def test_every_entry_has_a_cure_and_every_cure_an_entry() -> None:
    assert set(CURES) == set(BY_NAME)


@failures
def test_the_failure_fails_in_plain_torch(name: str, broken: str) -> None:
    try:
        values, gradients = CURES[name].measure(broken)
    except REFUSALS:
        assert "error" in BY_NAME[name].kinds
    else:
        assert values
        assert not is_finite(values) or not is_finite(gradients)


@fixes
def test_a_fix_cures(name: str, fix: str) -> None:
    values, gradients = CURES[name].measure(fix)

    assert values
    assert is_finite(values)
    assert is_finite(gradients)


@pytest.mark.parametrize(("name", "fix"), [(name, fix) for name, fix in FIXES if CURES[name].healthy is not None])
def test_a_fix_keeps_healthy_values_or_says_that_it_does_not(name: str, fix: str) -> None:
    cure = CURES[name]
    before, slopes_before = cure.measure(cure.broken, healthy=True)
    after, slopes_after = cure.measure(fix, healthy=True)

    assert is_finite(before)
    assert is_finite(slopes_before)
    if fix in cure.differs:
        assert not agree(before + slopes_before, after + slopes_after, cure.tolerance), "it does not differ"
    else:
        assert agree(before, after, cure.tolerance)
        assert agree(slopes_before, slopes_after, 10 * cure.tolerance)


def test_each_difference_belongs_to_a_fix_of_its_entry() -> None:
    stale = [(name, fix) for name, cure in CURES.items() for fix in cure.differs if fix not in BY_NAME[name].fixes]
    assert not stale


@fixes
def test_a_fix_is_an_expression_over_existing_names(name: str, fix: str) -> None:
    compile(fix, "<fix>", "eval")
    assert " | " not in fix  # fixes are shown separated by bars
    for mentioned in re.findall(r"steadygrad((?:\.\w+)+)", fix):
        functools.reduce(getattr, mentioned[1:].split("."), steadygrad)


def is_finite(tensors: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(torch.view_as_real(one) if one.is_complex() else one).all()) for one in tensors)


def agree(some: list[Tensor], others: list[Tensor], tolerance: float) -> bool:
    """Return whether they are equal within `tolerance`, in any dtypes."""
    if len(some) != len(others) or any(a.shape != b.shape for a, b in zip(some, others)):
        return False
    wide = [(a.to(torch.complex128), b.to(torch.complex128)) for a, b in zip(some, others)]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in wide)


# --- which entry is chosen --------------------------------------------------------------------------------------------


UNSEEN = {
    "outside_tensor_with_nan": Situation(op="outside", phase="input", kind="nan"),
    "outside_tensor_with_inf": Situation(op="outside", phase="input", kind="inf"),
    "other_weight_not_finite": Situation(op="outside", phase="parameter", kind="nan"),
    "batch_norm_of_one_sample": Situation(op="aten.native_batch_norm", phase="forward", kind="error"),
    "optimizer_squares_overflow": Situation(op="aten._foreach_addcmul_", phase="optimizer", kind="inf"),
    "nonfinite_in_optimizer": Situation(op="aten.erfinv", phase="optimizer", kind="nan"),
    "exploding_signal": Situation(op="", phase="forward", kind="exploding"),
    "vanishing_signal": Situation(op="", phase="backward", kind="vanishing"),
    "dead_units": Situation(op="", phase="forward", kind="dead"),
    "log_variance_overflow": Situation(
        op="aten.exp",
        phase="forward",
        kind="inf",
        operands=(Operand(name="self", source="0.5 * logvar", dtype="float32", shape=(2,)),),
    ),
}
"""Situations of the entries that cannot be a step for `diagnose`."""


@failures
def test_diagnose_gives_the_expected_entry(name: str, broken: str) -> None:
    cure = CURES[name]
    if cure.unseen:
        assert explain(UNSEEN[name]).name == name
        return

    cause = ask_optimizer(cure, broken) if BY_NAME[name].phases == ("optimizer",) else ask_step(cure, broken)

    assert cause is not None
    assert cause.explanation.startswith(BY_NAME[name].why), (cause.op, cause.phase, cause.kind, cause.explanation)
    assert len(cause.fixes) == len(BY_NAME[name].fixes)
    assert all(is_renamed(meant, chosen) for meant, chosen in zip(BY_NAME[name].fixes, cause.fixes))


def is_renamed(meant: str, chosen: str) -> bool:
    """Return whether a fix is the expected one, with other expressions in place of x, y or z."""
    if meant == chosen:
        return True
    return _fits(ast.parse(meant, mode="eval").body, ast.parse(chosen, mode="eval").body)


def _fits(meant: object, chosen: object) -> bool:
    if isinstance(meant, ast.Name) and meant.id in ("x", "y", "z"):
        return isinstance(chosen, ast.expr)
    if isinstance(meant, ast.AST):
        return type(meant) is type(chosen) and all(
            _fits(getattr(meant, name), getattr(chosen, name)) for name in meant._fields
        )
    if isinstance(meant, list):
        return isinstance(chosen, list) and len(meant) == len(chosen) and all(map(_fits, meant, chosen))
    return meant == chosen


def ask_step(cure: Cure, broken: str) -> Cause | None:
    given = cure.names()

    def step(**given: object) -> Tensor:
        return sum_up(cure.run(broken, given))

    return diagnose(step, model=next((one for one in given.values() if isinstance(one, nn.Module)), None), **given)


def ask_optimizer(cure: Cure, broken: str) -> Cause | None:
    """Return a model with one weight, whose gradient is the one that the cure needs."""
    model = nn.ParameterList([nn.Parameter(cure.sick["start"])])
    optimizer = eval(broken, {**TOOLS, "params": list(model.parameters())})

    def step(model: nn.ParameterList) -> Tensor:
        return (model[0] * cure.sick["gradient"]).sum()

    return diagnose(step, model, model=model, optimizer=optimizer)


def test_every_entry_that_cannot_be_a_step_is_tested_as_a_situation() -> None:
    assert set(UNSEEN) == {name for name, cure in CURES.items() if cure.unseen}


def test_a_log_variance_is_known_by_its_name() -> None:
    model = nn.Linear(2, 4)
    nn.init.ones_(model.weight)

    def sample(x: Tensor) -> Tensor:
        mean, logvar = model(x).chunk(2, -1)
        return (mean + torch.exp(0.5 * logvar)).mean()

    cause = diagnose(sample, torch.full((3, 2), 400.0), model=model)

    assert cause is not None
    assert cause.fixes[0] == "torch.exp((0.5 * logvar).clamp(-15.0, 10.0))"


def test_the_text_contains_the_numbers() -> None:
    var = Operand(name="self", source="var", dtype="float32", shape=(64, 64), minimum=0.0, maximum=3.1, num_zeros=17)

    chosen = explain(Situation(op="aten.sqrt", phase="backward", kind="inf", operands=(var,)))

    assert chosen.name == "sqrt_at_zero"
    assert chosen.text == (
        "the derivative of sqrt is infinite at 0; 0 * inf then gives NaN (17 of 4096 elements of var are 0)"
    )
    assert "steadygrad.losses.safe_sqrt(x)" in chosen.fixes


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda layer, x: F.normalize(layer(x), dim=-1) / torch.zeros(1), "division_by_zero"),
        (lambda layer, x: layer(x).sum(-1) / (x[:, 0] * 0), "division_by_zero"),
        (lambda layer, x: layer(x).std(0) / layer.bias, "division_by_zero"),
        (lambda layer, x: F.normalize(layer(x), dim=-1) / (x * 0).norm(), "division_by_norm_of_zero"),
        (lambda layer, x: layer(x).std(0) / (x * 0).sum(0)[:3], "division_by_empty_sum"),
    ],
)
def test_the_dividend_is_not_blamed_for_a_division_by_zero(
    step: Callable[[nn.Module, Tensor], Tensor], name: str
) -> None:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.bias)

    cause = diagnose(lambda x: step(layer, x).mean(), torch.rand(5, 4), model=layer)

    assert cause is not None
    assert (cause.op, cause.name) == ("aten.div", name)


def test_without_numbers_the_op_is_still_explained() -> None:
    chosen = explain(Situation(op="aten.log", phase="forward", kind="inf"))

    assert chosen.name == "log_of_zero"
    assert "(" not in chosen.text.removeprefix("log(0)")


def test_numbers_can_rule_out_an_entry() -> None:
    tiny = Operand(name="other", dtype="float32", shape=(2,), minimum=1e-30, maximum=2.0)
    one = Operand(name="self", dtype="float32", shape=(2,), minimum=1.0, maximum=2.0)

    assert explain(Situation(op="aten.div", phase="backward", kind="inf", operands=(one, tiny))).name == (
        "division_slope_overflow"
    )


def test_more_evidence_gives_the_more_specific_entry() -> None:
    probability = Operand(name="self", dtype="float32", shape=(2, 3), minimum=0.0, maximum=1.0, num_zeros=1)
    plain = Situation(op="aten.log", phase="forward", kind="inf", operands=(probability,))
    softmax = Situation(
        op="aten.log", phase="forward", kind="inf", operands=(probability,), upstream=("aten.view", "aten._softmax")
    )

    assert explain(plain).name == "log_of_zero"
    assert explain(softmax).name == "log_of_softmax"


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten._log_softmax.default", "log_softmax"),
        ("aten.sqrt_", "sqrt"),
        ("aten._foreach_sqrt", "sqrt"),
        ("aten.__rpow__", "rpow"),
        ("mylib::op", "mylib::op"),
        ("", ""),
    ],
)
def test_an_op_is_found_by_its_plain_name(op: str, name: str) -> None:
    assert plain_name(op) == name


numbers = st.none() | st.floats(allow_nan=False, width=32)
counts = st.integers(0, 10)
operands = st.builds(
    Operand,
    name=st.sampled_from(["self", "other", "running_mean"]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "complex64", "int64"]),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    minimum=numbers,
    maximum=numbers,
    num_zeros=counts,
    num_negative=counts,
    num_nan=counts,
    num_inf=counts,
)
ops = st.sampled_from(sorted({op for entry in ENTRIES for op in entry.ops})).map("aten.{}".format) | st.text(max_size=9)
situations = st.builds(
    Situation,
    op=ops,
    phase=st.sampled_from(["forward", "loss", "backward", "optimizer", "input", "parameter", "unknown"]),
    kind=st.sampled_from(["nan", "inf", "error", "exploding", "vanishing", "dead", "unknown"]),
    operands=st.lists(operands, max_size=3).map(tuple),
    scalars=st.dictionaries(st.sampled_from(["exponent", "other", "eps", "self"]), st.none() | st.floats() | st.text()),
    output=st.none() | operands,
    grad=st.none() | operands,
    upstream=st.lists(ops, max_size=3).map(tuple),
    downstream=st.lists(ops, max_size=3).map(tuple),
    module_type=st.none() | st.just("MultiheadAttention"),
)


@given(situations)
def test_there_is_always_an_explanation(situation: Situation) -> None:
    chosen = explain(situation)

    assert chosen.text
    assert chosen.fixes


# --- the library as a whole -------------------------------------------------------------------------------------------


def test_the_library_has_at_least_sixty_ops_and_situations() -> None:
    assert len(BY_NAME) == len(ENTRIES) >= 60
    assert len({op for entry in ENTRIES for op in entry.ops}) >= 60


@entries
def test_an_entry_has_two_to_four_fixes_and_a_reason_that_fits_a_table_cell(name: str) -> None:
    entry = BY_NAME[name]
    assert 2 <= len(entry.fixes) <= 4
    assert len(set(entry.fixes)) == len(entry.fixes)
    assert "|" not in entry.why
    assert not entry.why.endswith(".")
    assert not re.search(r"\s\([^()]*\)$", entry.why)  # numbers follow in brackets


def test_the_page_shows_the_library() -> None:
    shown = re.search(r"<!-- catalogue -->\n\n(.*)\n<!-- /catalogue -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] == render_catalogue(), "run: python tests/zoo/catalogue.py"
