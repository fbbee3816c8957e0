"""Ascend's element types: their two numberings, and raw bytes to exact arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

Array = np.ndarray[Any, Any]

# The numbering of DumpData and of `dtype` in GE graphs: position = number.
_PROTO_NAMES = (
    "undefined float32 float16 int8 uint8 int16 uint16 int32 int64 uint32 uint64 bool float64 "
    "string dual_sub_int8 dual_sub_uint8 complex64 complex128 qint8 qint16 qint32 quint8 quint16 "
    "resource string_ref dual variant bfloat16 int4 uint1 int2 uint2 complex32 hifloat8 "
    "float8_e5m2 float8_e4m3fn float8_e8m0 float6_e3m2 float6_e2m3 float4_e2m1 float4_e1m2 "
    "hifloat4 hifloat4_scale"
)
PROTO_DTYPES = tuple(_PROTO_NAMES.split())

# The numbering of ge::DataType and aclDataType: attributes `dt`, ATB files, nano dumps.
_GE_NAMES = (
    "float32 float16 int8 int32 uint8 - int16 uint16 uint32 int64 uint64 float64 bool string "
    "dual_sub_int8 dual_sub_uint8 complex64 complex128 qint8 qint16 qint32 quint8 quint16 "
    "resource string_ref dual variant bfloat16 undefined int4 uint1 int2 uint2 complex32 hifloat8 "
    "float8_e5m2 float8_e4m3fn float8_e8m0 float6_e3m2 float6_e2m3 float4_e2m1 float4_e1m2 "
    "hifloat4"
)
GE_DTYPES = {n: name for n, name in enumerate(_GE_NAMES.split()) if name != "-"}

# DT_ names that are not simply our name in capitals.
_DT_NAMES = {"float": "float32", "double": "float64", "bf16": "bfloat16"}


def proto_dtype(number: int) -> str:
    """The name of a DumpData or graph dtype number."""
    return PROTO_DTYPES[number] if 0 <= number < len(PROTO_DTYPES) else f"unknown_{number}"


def ge_dtype(number: int) -> str:
    """The name of a ge::DataType number."""
    return GE_DTYPES.get(number, f"unknown_{number}")


def dtype_of_name(name: str) -> str:
    """`DT_FLOAT`, `float`, `DT_BF16` or `float32` as the one name used here."""
    lower = name.strip().lower().removeprefix("dt_")
    return _DT_NAMES.get(lower, lower)


class ElementType(msgspec.Struct, frozen=True):
    """How one element type lies in memory.

    `decode` makes the exact one-dimensional array out of raw bytes, `wide` is the numpy dtype in
    which every value of it is representable and which any npy reader knows.
    """

    bits: int
    decode: Callable[[Array], Array]
    wide: np.dtype[Any]
    is_plain: bool = False  # raw bytes are already the npy content
    is_view: bool = False  # decoding takes no memory


def _plain(code: str) -> ElementType:
    dtype = np.dtype(code)
    return ElementType(dtype.itemsize * 8, lambda raw: raw.view(dtype), dtype, True, True)


def _exotic(scalar: type[Any], wide: str) -> ElementType:
    dtype = np.dtype(scalar)
    return ElementType(
        8 * dtype.itemsize, lambda raw: raw.view(dtype), np.dtype(wide), is_view=True
    )


def _unpacked(raw: Array, bits: int) -> Array:
    """Elements of 1, 2 or 4 bits, the lowest bits of each byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts: Array = (raw[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(-1)


def _packed(bits: int, table: Array) -> ElementType:
    return ElementType(
        bits, lambda raw: table.take(_unpacked(raw, bits)), np.dtype(_npy_dtype(table.dtype))
    )


def _npy_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Where ml_dtypes knows a type and npy does not: the smallest numpy type that holds it."""
    if dtype.isbuiltin == 1:
        return dtype
    name = dtype.name
    return np.dtype("u1" if name.startswith("uint") else "i1" if name[0] == "i" else "f4")


def _minifloat_table(exponent_bits: int, mantissa_bits: int, bias: int) -> Array:
    """All codes of a small float without infinities: older ml_dtypes know none of these."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values = fraction * 2.0 ** (np.maximum(exponent, 1) - bias)
    return np.concatenate([values, -values]).astype(np.float32)


def _float6(exponent_bits: int, mantissa_bits: int, bias: int) -> ElementType:
    table = _minifloat_table(exponent_bits, mantissa_bits, bias)

    def decode(raw: Array) -> Array:
        bits = np.unpackbits(raw, bitorder="little")
        groups = bits[: len(bits) // 6 * 6].reshape(-1, 6)
        return table.take(np.packbits(groups, axis=1, bitorder="little").reshape(-1))

    return ElementType(6, decode, np.dtype("f4"))


def _scale_table() -> Array:
    """float8_e8m0: powers of two from 2**-127, no sign, no zero, the last code NaN."""
    values = 2.0 ** (np.arange(256) - 127.0)
    values[255] = np.nan
    return values.astype(np.float32)


def _hifloat8_value(code: int) -> float:
    """One HiFloat8 code: sign, a prefix that says how long exponent and mantissa are, both."""
    if code in (0x00, 0x80):
        return float("nan") if code else 0.0
    sign = -1.0 if code & 0x80 else 1.0
    body = code & 0x7F
    if body == 0x6F:
        return sign * float("inf")
    if body < 0b1000:  # no exponent field: the mantissa counts powers of two
        return sign * 2.0 ** (body - 23)
    prefix_bits, exponent_bits = next(
        (prefix, width)
        for prefix, width, lowest in (
            (2, 4, 0b1100000),
            (2, 3, 0b1000000),
            (2, 2, 0b0100000),
            (3, 1, 0b0010000),
            (4, 0, 0b0001000),
        )
        if body >= lowest
    )
    mantissa_bits = 7 - prefix_bits - exponent_bits
    mantissa = body & ((1 << mantissa_bits) - 1)
    field = (body >> mantissa_bits) & ((1 << exponent_bits) - 1)
    exponent = 0
    if exponent_bits:
        top = 1 << (exponent_bits - 1)
        magnitude = top | (field & (top - 1))
        exponent = -magnitude if field & top else magnitude
    return float(sign * 2.0**exponent * (1 + mantissa / (1 << mantissa_bits)))


@cache
def hifloat8_table() -> Array:
    """The value of each of the 256 HiFloat8 codes, exact in float32."""
    return np.array([_hifloat8_value(code) for code in range(256)], np.float32)


def _signed_table(bits: int) -> Array:
    codes = np.arange(1 << bits)
    values = np.where(codes < 1 << (bits - 1), codes, codes - (1 << bits))
    return values.astype(np.int8)


@cache
def _kinds() -> dict[str, ElementType]:
    half = np.dtype("<f2")
    scales = _scale_table()
    plain = {
        "float32": "<f4", "float16": "<f2", "float64": "<f8", "bool": "?",
        "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8",
        "uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
        "complex64": "<c8", "complex128": "<c16", "resource": "<i8",
        "qint8": "i1", "qint16": "<i2", "qint32": "<i4", "quint8": "u1", "quint16": "<u2",
        "dual_sub_int8": "i1", "dual_sub_uint8": "u1",
    }  # fmt: skip
    return {
        **{name: _plain(code) for name, code in plain.items()},
        "bfloat16": _exotic(ml_dtypes.bfloat16, "<f4"),
        "float8_e5m2": _exotic(ml_dtypes.float8_e5m2, "<f4"),
        "float8_e4m3fn": _exotic(ml_dtypes.float8_e4m3fn, "<f4"),
        "float8_e8m0": ElementType(8, scales.take, np.dtype("<f4")),
        "float6_e3m2": _float6(3, 2, 3),
        "float6_e2m3": _float6(2, 3, 1),
        "float4_e2m1": _packed(4, _minifloat_table(2, 1, 1)),
        "float4_e1m2": _packed(4, _minifloat_table(1, 2, 1)),
        "int4": _packed(4, _signed_table(4)),
        "int2": _packed(2, _signed_table(2)),
        "uint2": _packed(2, np.arange(4, dtype=np.uint8)),
        # Unlike the others, the highest bit first: numpy's own order, which the vendor's tool uses.
        "uint1": ElementType(1, np.unpackbits, np.dtype("u1")),
        "hifloat8": ElementType(8, lambda raw: hifloat8_table().take(raw), np.dtype("<f4")),
        "complex32": ElementType(
            32,
            lambda raw: raw.view(half).astype(np.float32).view(np.complex64),
            np.dtype("<c8"),
        ),
    }


# What a type without elements that numpy could hold (strings, unknown numbers) is read as.
_BYTES = ElementType(8, lambda raw: raw.view(np.int8), np.dtype("i1"), True, True)


def kind_of(dtype: str) -> ElementType:
    """How elements of this name are stored; types without values of their own are bytes."""
    return _kinds().get(dtype, _BYTES)


def has_values(dtype: str) -> bool:
    """Whether elements of this type are numbers, and not opaque bytes."""
    return dtype in _kinds()


def decode(raw: Array, dtype: str, count: int) -> Array:
    """The first `count` elements in `raw` bytes (fewer when there are not enough), exact."""
    kind = kind_of(dtype)
    count = min(count, raw.size * 8 // kind.bits)
    nbytes = -(-count * kind.bits // 8)
    return kind.decode(np.ascontiguousarray(raw[:nbytes]))[:count]


def widened(array: Array) -> Array:
    """An exact array in a dtype that every npy reader knows; unchanged when it already is."""
    return array.astype(_npy_dtype(array.dtype), copy=False)
