"""torch's dtypes by name, as numpy has them: no torch is needed to read stored bytes."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

# torch's dtype names to numpy's; everything not named here is spelt the same in both.
_ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype for torch's name of it, little-endian."""
    dtype: np.dtype[Any]
    if name in _ML_DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name))
        return dtype
    if name == "complex32":  # numpy has none: pairs of halves
        return np.dtype([("real", "<f2"), ("imag", "<f2")])
    if name in ("float4_e2m1fn_x2", "bits8", "quint8", "quint4x2", "quint2x4"):
        return np.dtype(np.uint8)
    if name in ("bits16", "qint32", "qint8"):
        return np.dtype({"bits16": "<u2", "qint32": "<i4", "qint8": "i1"}[name])
    dtype = np.dtype(name).newbyteorder("<")
    return dtype


def part_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What complex numbers are pairs of; other numbers are themselves."""
    if dtype.names:  # complex32 is a pair of halves
        return np.dtype(np.float16)
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype


def itemsize_of(name: str) -> int:
    """Bytes an element takes; TypeError for what is no dtype."""
    return numpy_dtype(name).itemsize
