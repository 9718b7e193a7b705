"""Baseline: a median and a spread that no non-finite value and no outlier can move."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadygrad.errors import ConfigError
from steadygrad.stats import MAD_TO_SIGMA, Baseline, median_deviation

# Far below the largest double, where the sum of two middle values would overflow; no norm or loss comes near.
VALUES = st.floats(min_value=-1e150, max_value=1e150, allow_nan=False)


def admit_all(baseline: Baseline, values: list[float]) -> Baseline:
    for value in values:
        baseline.admit(value)
    return baseline


def healthy_baseline(**settings: Any) -> Baseline:
    """Return a baseline of 64 values around 2, within 1 %."""
    generator = np.random.default_rng(0)
    return admit_all(Baseline(**{"window": 64, **settings}), (2.0 + 0.02 * generator.uniform(-1, 1, size=64)).tolist())


# --- the statistic --------------------------------------------------------------------------------------------------


@given(values=st.lists(VALUES, min_size=1, max_size=60), window=st.integers(8, 20))
def test_median_and_spread_equal_numpys_over_the_last_window(values: list[float], window: int) -> None:
    baseline = Baseline(window=window, min_values=2, outlier_score=math.inf, relative_floor=0.0)

    admit_all(baseline, values)

    last = np.array(values[-window:])
    median = float(np.median(last))
    assert baseline.median == median
    assert baseline.spread == max(MAD_TO_SIGMA * float(np.median(np.abs(last - median))), 1e-300)
    assert len(baseline) == len(last)


@given(values=st.lists(VALUES, min_size=8, max_size=40), asked=VALUES)
def test_the_score_is_the_distance_from_the_median_in_units_of_spread(values: list[float], asked: float) -> None:
    baseline = admit_all(Baseline(window=40, min_values=8, outlier_score=math.inf), values)
    assert baseline.score(asked) == (asked - baseline.median) / baseline.spread


def test_the_spread_of_gaussian_noise_is_its_standard_deviation() -> None:
    noise = np.random.default_rng(1).normal(5.0, 0.25, size=4096)
    baseline = admit_all(Baseline(window=4096, min_values=4096), noise.tolist())
    # The MAD of n Gaussian values scatters by 1.17 / sqrt(n) of itself: 1.8 % here; three times that.
    assert baseline.spread == pytest.approx(0.25, rel=0.055)


def test_a_constant_history_does_not_give_infinite_scores() -> None:
    baseline = admit_all(Baseline(window=8, min_values=8, relative_floor=1e-2), [5.0] * 8)
    assert baseline.spread == 5.0 * 1e-2
    assert baseline.score(5.01) == pytest.approx(0.2)


def test_a_history_of_zeros_still_gives_a_score() -> None:
    baseline = admit_all(Baseline(window=8, min_values=8), [0.0] * 8)
    assert baseline.score(0.0) == 0.0
    assert baseline.score(1.0) > 1e9


def test_an_empty_baseline_has_no_median() -> None:
    baseline = Baseline()
    assert math.isnan(baseline.median)
    assert len(baseline) == 0


# --- warm-up --------------------------------------------------------------------------------------------------------


def test_while_warming_up_every_finite_value_scores_zero() -> None:
    baseline = Baseline(window=16, min_values=8)
    for i in range(8):
        assert not baseline.is_warm
        assert baseline.score(1e30) == 0.0
        assert baseline.admit(1.0 + i)
    assert baseline.is_warm
    assert baseline.score(1e30) > 8.0


def test_a_nonfinite_value_scores_inf_from_the_start() -> None:
    assert Baseline().score(math.nan) == math.inf


# --- values that never enter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_value_never_enters_and_scores_inf(poison: float) -> None:
    baseline = healthy_baseline()
    before, score = baseline.state_dict(), baseline.score(9.0)

    for _ in range(3 * baseline.patience):
        assert not baseline.admit(poison)

    assert baseline.score(poison) == math.inf
    assert baseline.state_dict() == before
    assert baseline.score(9.0) == score > 6.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_value_neither_starts_nor_interrupts_a_new_level(poison: float) -> None:
    baseline = healthy_baseline(patience=4)
    accepted = [baseline.admit(value) for value in (9.0, poison, 9.0, poison, 9.0, poison, 9.0)]
    assert accepted == [False] * 6 + [True]
    assert baseline.median == 9.0


@pytest.mark.parametrize("outlier", [1e6, -1e6, 3.0])
def test_an_outlier_is_kept_out_of_the_history(outlier: float) -> None:
    baseline = healthy_baseline()
    median, spread = baseline.median, baseline.spread

    for _ in range(baseline.patience - 1):
        assert abs(baseline.score(outlier)) > baseline.outlier_score
        assert not baseline.admit(outlier)

    assert (baseline.median, baseline.spread, len(baseline)) == (median, spread, 64)


def test_without_the_exclusion_outliers_would_become_normal() -> None:
    trusting, careful = healthy_baseline(outlier_score=math.inf, patience=100), healthy_baseline(patience=100)
    for _ in range(40):  # more than half of the window
        trusting.admit(9.0)
        careful.admit(9.0)
    assert trusting.score(9.0) == 0.0
    assert careful.score(9.0) > careful.outlier_score


# --- a new normal ---------------------------------------------------------------------------------------------------


def test_a_new_level_is_accepted_after_patience_outliers_in_a_row() -> None:
    baseline = healthy_baseline(patience=10, min_values=8)
    accepted = [baseline.admit(9.0 + 0.01 * i) for i in range(10)]
    assert accepted == [False] * 9 + [True]
    assert len(baseline) == 10
    assert baseline.median == pytest.approx(9.045)
    assert abs(baseline.score(9.05)) < 3
    assert abs(baseline.score(2.0)) > 8


def test_one_ordinary_value_resets_the_patience() -> None:
    baseline = healthy_baseline(patience=4)
    values = [9.0, 9.0, 9.0, 2.0, 9.0, 9.0, 9.0]
    assert [baseline.admit(value) for value in values] == [False, False, False, True, False, False, False]
    assert baseline.median == pytest.approx(2.0, abs=0.02)


def test_after_a_new_level_the_baseline_warms_up_again() -> None:
    baseline = healthy_baseline(patience=4, min_values=8)
    admit_all(baseline, [9.0] * 4)
    assert not baseline.is_warm
    assert baseline.score(1e9) == 0.0


def test_with_a_patience_longer_than_the_window_the_newest_values_are_kept() -> None:
    baseline = admit_all(Baseline(window=8, min_values=8, patience=20), [1.0] * 8)
    admit_all(baseline, [100.0 + i for i in range(20)])
    assert baseline.state_dict()["values"] == [112.0 + i for i in range(8)]


# --- resuming -------------------------------------------------------------------------------------------------------


@given(
    before=st.lists(VALUES, max_size=40),
    after=st.lists(st.one_of(VALUES, st.sampled_from([math.nan, math.inf])), max_size=20),
)
def test_a_restored_baseline_continues_exactly(before: list[float], after: list[float]) -> None:
    settings: dict[str, Any] = {"window": 16, "min_values": 4, "patience": 3}
    baseline = admit_all(Baseline(**settings), before)

    restored = Baseline(**settings)
    restored.load_state_dict(json.loads(json.dumps(baseline.state_dict(), allow_nan=False)))

    assert restored.state_dict() == baseline.state_dict()
    for value in after:
        assert restored.score(value) == baseline.score(value)
        assert restored.admit(value) == baseline.admit(value)
    assert restored.state_dict() == baseline.state_dict()


def test_the_state_keeps_refused_values_so_that_patience_continues() -> None:
    settings: dict[str, Any] = {"patience": 3}
    baseline, restored = healthy_baseline(**settings), healthy_baseline(**settings)
    admit_all(baseline, [9.0, 9.0])
    restored.load_state_dict(baseline.state_dict())
    assert restored.admit(9.0)


def test_the_state_is_a_copy() -> None:
    baseline = healthy_baseline()
    state = baseline.state_dict()
    baseline.admit(2.0)
    assert len(state["values"]) == 64
    assert state != baseline.state_dict()


def test_a_state_with_nonfinite_values_does_no_harm() -> None:
    baseline = Baseline(window=8, min_values=2)
    baseline.load_state_dict({"values": [1.0, math.nan, 2.0, math.inf], "refused": [math.nan, 50.0]})
    assert baseline.state_dict() == {"values": [1.0, 2.0], "refused": [50.0]}


def test_loading_replaces_the_history() -> None:
    baseline = healthy_baseline()
    baseline.load_state_dict({"values": [7.0] * 32, "refused": []})
    assert (len(baseline), baseline.median) == (32, 7.0)


def test_an_emptied_baseline_forgets_its_spread() -> None:
    baseline = Baseline(window=8, min_values=2)
    admit_all(baseline, [1.0, 2.0, 3.0, 4.0])
    assert baseline.spread > 0  # read once, so that it is cached
    baseline.load_state_dict({"values": [], "refused": []})
    assert math.isnan(baseline.spread)


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("window", 7, "Use 128"),
        ("window", 0, "Use 128"),
        ("window", -1, "Use 128"),
        ("min_values", 1, "quarter of the window"),
        ("min_values", 129, "quarter of the window"),
        ("outlier_score", 0.0, "8 is a good value"),
        ("outlier_score", -1.0, "8 is a good value"),
        ("relative_floor", -0.1, "Use 1e-3"),
        ("patience", 0, "Use 32"),
        ("patience", -5, "Use 32"),
        ("window", "a", "Use 128"),
        ("window", 16.0, "Use 128"),
        ("min_values", 2.5, "quarter of the window"),
        ("outlier_score", math.nan, "8 is a good value"),
        ("outlier_score", None, "8 is a good value"),
        ("relative_floor", math.nan, "Use 1e-3"),
        ("relative_floor", math.inf, "Use 1e-3"),
        ("patience", 1.5, "Use 32"),
        ("patience", math.nan, "Use 32"),
    ],
)
def test_a_bad_argument_is_reported_with_value_and_advice(field: str, value: Any, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Baseline(**{field: value})
    message = str(caught.value)
    assert f"Baseline.{field} must" in message
    assert f"got {value!r}" in message
    assert advice in message


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        Baseline(128)  # type: ignore[misc]


@given(values=st.lists(VALUES, min_size=1, max_size=40), centre=VALUES, near=st.none() | st.integers(0, 50))
def test_the_median_deviation_is_independent_of_the_search_start(
    values: list[float], centre: float, near: int | None
) -> None:
    ordered = sorted(values)
    found, _ = median_deviation(ordered, centre, near)
    assert found == float(np.median(np.abs(np.array(ordered) - centre)))
