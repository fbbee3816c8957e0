"""How far two arrays are apart, by exact values."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.tensors.metrics import CHUNK, measure_pair
from tensorprobe.tensors.pair_metrics import PairMetrics

BF16 = ml_dtypes.bfloat16


def metrics(actual: Any, expected: Any, dtype: Any = np.float32, other: Any = None) -> PairMetrics:
    return measure_pair(np.array(actual, dtype), np.array(expected, other or dtype))


def test_a_table_of_exact_values() -> None:
    m = metrics([1.0, 2.0, 4.0, -3.0], [1.0, 2.0, 5.0, -3.0])
    assert (m.numel, m.mismatched, m.index) == (4, 1, 2)
    assert (m.max_abs, m.max_rel, m.euclidean) == (1.0, pytest.approx(0.2), 1.0)
    assert m.rel_l2 == pytest.approx(1 / math.sqrt(39))
    assert m.cosine == pytest.approx(34 / math.sqrt(30 * 39))
    assert (m.within_1_1000, m.within_5_1000) == (0.75, 0.75)
    assert m.rms_error == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("dtype", "actual", "expected", "ulps"),
    [
        (np.float32, [1 + 2**-23], [1.0], 1),
        (np.float64, [1 + 5 * 2**-52], [1.0], 5),
        (np.float16, [1 + 3 * 2**-10], [1.0], 3),
        (BF16, [1 + 4 * 2**-7], [1.0], 4),
        (ml_dtypes.float8_e4m3fn, [1.125], [1.0], 1),
        (ml_dtypes.float8_e5m2, [1.5], [1.0], 2),
        (np.float32, [-0.0], [0.0], 0),
        (np.float32, [np.float32(1e-45)], [np.float32(-1e-45)], 2),
        (BF16, [1e-3], [-1e-3], 2 * 0x3A83),
    ],
)  # fmt: skip
def test_steps_between_neighbours(dtype: Any, actual: Any, expected: Any, ulps: int) -> None:
    assert metrics(actual, expected, dtype).ulp_max == ulps


def test_shares_of_ulps() -> None:
    steps = np.array([0, 1, 2, 5, 17, 40, 0, 0], np.int32)
    expected = np.full(8, 1.5, np.float32)
    actual = (expected.view(np.int32) + steps).view(np.float32)
    m = measure_pair(actual, expected)
    assert (m.ulp_over_1, m.ulp_over_4, m.ulp_over_16) == (4 / 8, 3 / 8, 2 / 8)


def test_a_zero_that_is_not_there_is_kept_apart() -> None:
    m = metrics([1.0, 2.0, 0.5, 0.0], [1.0, 4.0, 0.0, 0.0])
    assert (m.max_rel, m.max_rel_nonzero, m.max_abs_at_zero) == (math.inf, 0.5, 0.5)
    assert m.max_rel_with(0.25) == 2.0
    assert m.within_1_1000 == 0.5


def test_nan_and_infinity_agree_or_not() -> None:
    nan, inf = math.nan, math.inf
    m = metrics([nan, inf, -inf, 1.0], [nan, inf, -inf, 1.5])
    assert (m.nonfinite_disagree, m.mismatched, m.index) == (0, 1, 3)
    assert (m.max_abs, m.euclidean) == (0.5, 0.5)
    m = metrics([nan, inf, 1.0], [1.0, -inf, 1.0])
    assert (m.nonfinite_disagree, m.mismatched, m.index) == (2, 2, 0)
    assert m.max_abs == math.inf
    m = metrics([nan] * 3, [nan] * 3)
    assert (m.nonfinite_disagree, m.cosine, m.rms_error) == (0, 1.0, 0.0)


def test_masks_stay_out_of_norms() -> None:
    low = float(np.finfo(np.float32).min)
    m = metrics([low, 1.0, 2.0], [low, 1.0, 2.5])
    assert m.rms_error == pytest.approx(0.5 / math.sqrt(2))
    assert m.rms_expected == pytest.approx(math.sqrt((1 + 6.25) / 2))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e28])
def test_squares_that_leave_float32(scale: float) -> None:
    m = metrics([3 * scale, 4 * scale], [3 * scale, 5 * scale])
    assert m.rel_l2 == pytest.approx(1 / math.sqrt(34), rel=1e-5)


def test_cosine_of_a_result_that_is_far_too_small() -> None:
    expected = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert measure_pair(expected * np.float32(1e-5), expected).cosine == pytest.approx(1, abs=1e-6)
    assert measure_pair(expected * 0, expected).cosine is None


def test_differences_whose_squares_vanish_are_counted() -> None:
    expected = np.array([1e-17, 1.0], np.float32)
    actual = np.array([1.000001e-17, 1.0], np.float32)
    assert measure_pair(actual, expected).mismatched == 1


def test_zeros_empty_scalars_integers_bools_complex() -> None:
    assert metrics([0.0, 0.0], [0.0, 0.0]).cosine == 1.0
    assert metrics([1.0], [0.0]).cosine is None
    assert metrics([1.0, 0.0], [0.0, 0.0]).max_rel == math.inf
    empty = metrics([], [])
    assert (empty.numel, empty.mismatched, empty.within_1_1000) == (0, 0, 1.0)
    assert metrics(2.0, 1.0).max_abs == 1.0
    m = metrics([1, 2, 3], [1, 2, 5], np.int64)
    assert (m.mismatched, m.max_abs, m.ulp_max) == (1, 2.0, None)
    assert metrics([True, False], [True, True], np.bool_).mismatched == 1
    m = metrics([1 + 2j, 3j], [1 + 2j, 4j], np.complex64)
    assert (m.numel, m.max_abs) == (2, 1.0)


def test_different_dtypes_are_compared_in_the_coarser() -> None:
    values = np.array([1.0, 1 / 3, 100.7], np.float32)
    m = measure_pair(values, values.astype(BF16))
    assert m.ulp_max == 0
    assert 0 < m.max_rel < 2**-8


def test_the_worst_place_is_found_beyond_one_chunk() -> None:
    expected = np.ones(3 * CHUNK + 5, np.float32)
    actual = expected.copy()
    actual[2 * CHUNK + 7] = 9
    actual[5] = 2
    m = measure_pair(actual.reshape(-1, 1), expected.reshape(-1, 1))
    assert (m.index, m.mismatched, m.max_abs) == (2 * CHUNK + 7, 2, 8.0)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1e25, 1e35, 1e-30, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.float16])
def test_chunks_of_equal_bits(value: float, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        x = np.full(CHUNK + 5, value, np.float32).astype(dtype)
    m = measure_pair(x, x.copy())
    assert (m.mismatched, m.nonfinite_disagree, m.index, m.ulp_max) == (0, 0, None, 0)
    assert (m.max_abs, m.max_rel, m.rms_error, m.euclidean) == (0.0, 0.0, 0.0, 0.0)
    wide = x.astype(np.float64)
    if math.isfinite(value) and abs(wide[0]) < 1e30:
        assert m.rms_expected == pytest.approx(abs(float(wide[0])), rel=1e-5)
        assert (m.cosine, m.within_1_1000) == (pytest.approx(1.0, abs=1e-15), 1.0)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        measure_pair(np.zeros((2, 3)), np.zeros((3, 2)))


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=50, max_size=50),
)
def test_against_plain_numpy(a: list[float], e: list[float]) -> None:
    x, y = np.array(a, np.float32), np.array(e[: len(a)], np.float32)
    m = measure_pair(x, y)
    d = x.astype(np.float64) - y.astype(np.float64)
    assert m.mismatched == np.count_nonzero(x != y)
    assert m.max_abs == pytest.approx(np.abs(d).max(), rel=1e-6)
    assert m.euclidean == pytest.approx(np.linalg.norm(d), rel=1e-4)
