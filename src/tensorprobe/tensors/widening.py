"""Dtypes that numpy files cannot hold, as float32 and back, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tensorprobe.tensors.dtypes import numpy_dtype

Array = np.ndarray[Any, Any]

# A NaN of an 8-bit float is carried in the payload of a quiet float32 NaN, with this mark.
_NAN_MARK = 0x7FD0_0000


def is_widened(dtype: str) -> bool:
    """Whether numpy has no dtype of its own for torch's `dtype`, so that .npy files widen it."""
    return dtype == "bfloat16" or dtype.startswith("float8")


def widen(array: Array, dtype: str) -> Array:
    """The values as float32; NaNs keep what tells them apart."""
    if dtype == "bfloat16":
        bits = array.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    return _codes(dtype)[array.view(np.uint8)]


def narrow(array: Array, dtype: str) -> Array:
    """The values in the dtype they had before they were widened, rounded where they never were."""
    target = numpy_dtype(dtype)
    shape = array.shape
    array = np.ascontiguousarray(array).reshape(shape)  # it makes one dimension of none
    if array.dtype == np.float32 and dtype == "bfloat16":
        bits = array.view(np.uint32)
        if not (bits & 0xFFFF).any():
            return (bits >> 16).astype(np.uint16).view(target).reshape(shape)
    if array.dtype == np.float32 and dtype.startswith("float8"):
        codes = _codes(dtype).view(np.uint32)
        order = np.argsort(codes)
        bits = array.view(np.uint32)
        place = np.searchsorted(codes, bits, sorter=order).clip(max=255)
        found = order[place]
        if (codes[found] == bits).all():
            exact: Array = found.astype(np.uint8).view(target)
            return exact.reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: Array = array.astype(target)
    return rounded


@functools.cache
def _codes(dtype: str) -> Array:
    """The float32 of each of the 256 values of an 8-bit float, no two alike in bits."""
    values = np.arange(256, dtype=np.uint8)
    wide = values.view(numpy_dtype(dtype)).astype(np.float32)
    bits = wide.view(np.uint32)
    nan = np.isnan(wide)
    bits[nan] = _NAN_MARK | (values[nan].astype(np.uint32) & 0x7F)
    bits[nan] |= (values[nan].astype(np.uint32) & 0x80) << 24
    return wide
