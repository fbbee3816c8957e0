"""What a tensor can look like: the dtypes of torch, and shapes and strides that there can be."""

from __future__ import annotations

from collections.abc import Sequence

# Bytes an element takes. A closed list: a name that is not here stands for nothing in any library.
ITEMSIZES = {
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 9)},
    **dict.fromkeys(("bool", "bits1x8", "bits2x4", "bits4x2", "bits8"), 1),
    **dict.fromkeys(("qint8", "quint8", "quint4x2", "quint2x4", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu",), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
MAX_DIMENSIONS = 64
_LIMIT = 1 << 63


def itemsize_of(dtype: str) -> int:
    """Bytes an element takes; ValueError for what is no dtype."""
    nbytes = ITEMSIZES.get(dtype)
    if nbytes is None:
        raise ValueError(f"{dtype[:40]!r} is no dtype of torch")
    return nbytes


def check_layout(dtype: str, shape: Sequence[int], stride: Sequence[int] | None = None) -> None:
    """ValueError for a tensor that cannot be."""
    nbytes = itemsize_of(dtype)
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a shape of {len(shape)} dimensions")
    for length in shape:
        nbytes *= max(length, 1)
        if length < -1 or nbytes >= _LIMIT:  # -1: rows of a nested tensor, each of its own length
            raise ValueError(f"{_short(shape)} is no shape of a tensor")
    if stride is None:
        return
    if len(stride) != len(shape):
        raise ValueError(f"{len(stride)} strides for {len(shape)} dimensions")
    if not all(0 <= step < _LIMIT for step in stride):
        raise ValueError(f"{_short(stride)} are no strides of a tensor")


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these elements fill a stretch of memory without holes, in whatever order."""
    expected = 1
    for step, length in sorted(zip(strides, shape, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def _short(numbers: Sequence[int]) -> str:
    return f"{[*numbers]}"[:80]
