"""Blocked formats and back: each against a blocking written out as loops would do it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.ascend.memory_formats import FORMATS, format_name, to_plain
from tensorprobe.errors import BadUsage


def padded(array: np.ndarray, multiples: dict[int, int]) -> np.ndarray:
    width = [(0, -size % multiples.get(axis, 1)) for axis, size in enumerate(array.shape)]
    return np.pad(array, width)


def to_nz(x: np.ndarray, block: int) -> np.ndarray:
    x = padded(x, {x.ndim - 2: 16, x.ndim - 1: block})
    *lead, rows, columns = x.shape
    blocks = x.reshape(*lead, rows // 16, 16, columns // block, block)
    n = len(lead)
    return blocks.transpose(*range(n), n + 2, n, n + 1, n + 3)


def to_5hd(x: np.ndarray, block: int) -> np.ndarray:
    x = padded(x, {1: block})
    n, c, h, w = x.shape
    return x.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2)


def to_fractal_z(x: np.ndarray, block: int) -> np.ndarray:
    x = padded(x, {0: 16, 1: block})
    n, c, h, w = x.shape
    blocks = x.reshape(n // 16, 16, c // block, block, h, w).transpose(2, 4, 5, 0, 1, 3)
    return blocks.reshape(c // block * h * w, n // 16, 16, block)


sizes = st.integers(1, 40)


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(sizes, min_size=2, max_size=3), block=st.sampled_from([8, 16, 32]))
def test_fractal_nz(shape: list[int], block: int) -> None:
    x = np.arange(np.prod(shape)).reshape(shape)
    blocked = to_nz(x, block)
    np.testing.assert_array_equal(to_plain(blocked, "FRACTAL_NZ", original_shape=shape), x)


def test_fractal_nz_without_a_shape_keeps_the_padding() -> None:
    x = np.arange(62 * 62).reshape(62, 62)
    plain = to_plain(to_nz(x, 16), "FRACTAL_NZ")
    assert plain.shape == (64, 64)
    np.testing.assert_array_equal(plain[:62, :62], x)
    vector = np.arange(20).reshape(1, 20)
    np.testing.assert_array_equal(
        to_plain(to_nz(vector, 16), "FRACTAL_NZ", original_shape=(20,)), vector[0]
    )
    with pytest.raises(BadUsage, match="a shape that fits"):
        to_plain(to_nz(x, 16), "FRACTAL_NZ", original_shape=(10, 62))


def test_nc1hwc0_in_the_original_order_of_axes() -> None:
    x = np.arange(2 * 20 * 5 * 7).reshape(2, 20, 5, 7)
    blocked = to_5hd(x, 16)
    nhwc = x.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(to_plain(blocked, "NC1HWC0", original_shape=x.shape), x)
    np.testing.assert_array_equal(to_plain(blocked, "NC1HWC0", original_shape=nhwc.shape), nhwc)
    np.testing.assert_array_equal(
        to_plain(blocked, "NC1HWC0", "NHWC", original_shape=x.shape), nhwc
    )
    assert to_plain(blocked, "NC1HWC0").shape == (2, 32, 5, 7)
    assert to_plain(blocked, "NC1HWC0", "NHWC").shape == (2, 5, 7, 32)


def test_the_origin_format_decides_where_shapes_do_not() -> None:
    x = np.arange(1 * 4 * 4 * 4).reshape(1, 4, 4, 4)
    blocked = to_5hd(x, 16)
    np.testing.assert_array_equal(
        to_plain(blocked, "NC1HWC0", original_shape=(1, 4, 4, 4), origin_format="NHWC"),
        x.transpose(0, 2, 3, 1),
    )


@settings(max_examples=40, deadline=None)
@given(n=sizes, c=sizes, h=st.integers(1, 5), w=st.integers(1, 5))
def test_fractal_z(n: int, c: int, h: int, w: int) -> None:
    x = np.arange(n * c * h * w).reshape(n, c, h, w)
    blocked = to_fractal_z(x, 16)
    np.testing.assert_array_equal(
        to_plain(blocked, "FRACTAL_Z", original_shape=x.shape, origin_format="NCHW"), x
    )
    hwcn = x.transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(
        to_plain(blocked, "FRACTAL_Z", original_shape=hwcn.shape, origin_format="HWCN"), hwcn
    )
    np.testing.assert_array_equal(
        to_plain(blocked, "FRACTAL_Z", "HWCN", original_shape=hwcn.shape), hwcn
    )


def test_fractal_z_needs_the_shape() -> None:
    with pytest.raises(BadUsage, match="--shape"):
        to_plain(np.zeros((9, 1, 16, 16)), "FRACTAL_Z")


def test_five_dimensional_formats() -> None:
    x = np.arange(2 * 20 * 3 * 4 * 5).reshape(2, 20, 3, 4, 5)
    full = padded(x, {1: 16})
    blocked = full.reshape(2, 2, 16, 3, 4, 5).transpose(0, 3, 1, 4, 5, 2)
    np.testing.assert_array_equal(to_plain(blocked, "NDC1HWC0", original_shape=x.shape), x)
    weights = padded(x, {0: 16, 1: 16}).reshape(1, 16, 2, 16, 3, 4, 5)
    fractal = weights.transpose(4, 2, 5, 6, 0, 1, 3).reshape(3 * 2 * 4 * 5, 1, 16, 16)
    np.testing.assert_array_equal(to_plain(fractal, "FRACTAL_Z_3D", original_shape=x.shape), x)


def test_plain_axes_and_what_has_no_way() -> None:
    x = np.arange(24).reshape(1, 2, 3, 4)
    np.testing.assert_array_equal(to_plain(x, "NCHW", "NHWC"), x.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(to_plain(x, "ND", "ND"), x)
    with pytest.raises(BadUsage, match="no way from FRACTAL_Z_WINO"):
        to_plain(x, "FRACTAL_Z_WINO")
    with pytest.raises(BadUsage, match="has 5 axes"):
        to_plain(x, "NC1HWC0")


def test_numbers_of_formats() -> None:
    wanted = {0: "NCHW", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 27: "NDHWC", 29: "FRACTAL_NZ"}
    wanted |= {32: "NDC1HWC0", 33: "FRACTAL_Z_3D", 47: "NCL", 54: "FRACTAL_NZ_C0_8"}
    assert {n: format_name(n) for n in wanted} == wanted
    assert format_name(255) == "FORMAT_255"
    assert len(FORMATS) == 55
