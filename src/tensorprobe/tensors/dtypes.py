"""torch's dtypes by name, as numpy has them: no torch is needed to read stored bytes."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from tensorprobe.tensors.layouts import itemsize_of

_NAMES = "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
# ml_dtypes 0.4, which TensorFlow keeps, has no e8m0.
ML_DTYPES: dict[str, Any] = {
    name: getattr(ml_dtypes, name) for name in _NAMES.split() if hasattr(ml_dtypes, name)
}
_NUMPY_DTYPES = (
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype for torch's name of it, little-endian; ValueError for what is no dtype."""
    itemsize = itemsize_of(name)
    dtype: np.dtype[Any]
    if name in ML_DTYPES:
        dtype = np.dtype(ML_DTYPES[name])
        return dtype
    if name in _NUMPY_DTYPES:
        dtype = np.dtype(name).newbyteorder("<")
        return dtype
    if name == "complex32":  # numpy has none: pairs of halves
        return np.dtype([("real", "<f2"), ("imag", "<f2")])
    signed = name.startswith(("int", "qint"))
    return np.dtype(f"<{'i' if signed else 'u'}{itemsize}")  # its bits


def part_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What complex numbers are pairs of; other numbers are themselves."""
    if dtype.names:  # complex32 is a pair of halves
        return np.dtype(np.float16)
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
