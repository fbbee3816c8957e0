"""Element types: whole tables, against ml_dtypes where it knows the type."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from tensorprobe.ascend.element_types import (
    GE_DTYPES,
    PROTO_DTYPES,
    decode,
    dtype_of_name,
    ge_dtype,
    hifloat8_table,
    kind_of,
    proto_dtype,
    widened,
)

CODES = np.arange(256, dtype=np.uint8)


def test_the_two_numberings() -> None:
    assert [proto_dtype(n) for n in (0, 1, 2, 7, 27, 28, 33, 36, 42)] == [
        "undefined", "float32", "float16", "int32", "bfloat16", "int4", "hifloat8", "float8_e8m0",
        "hifloat4_scale",
    ]  # fmt: skip
    assert [ge_dtype(n) for n in (0, 1, 3, 9, 12, 27, 28, 29, 34, 36, 42)] == [
        "float32", "float16", "int32", "int64", "bool", "bfloat16", "undefined", "int4", "hifloat8",
        "float8_e4m3fn", "hifloat4",
    ]  # fmt: skip
    assert proto_dtype(999) == "unknown_999"
    assert set(GE_DTYPES.values()) <= set(PROTO_DTYPES)
    assert [dtype_of_name(n) for n in ("DT_FLOAT", "DT_BF16", "DT_DOUBLE", "float16")] == [
        "float32", "bfloat16", "float64", "float16"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "theirs", "bits"),
    [
        ("float8_e5m2", "float8_e5m2", 8),
        ("float8_e4m3fn", "float8_e4m3fn", 8),
        ("float8_e8m0", "float8_e8m0fnu", 8),
        ("float4_e2m1", "float4_e2m1fn", 4),
        ("float6_e3m2", "float6_e3m2fn", 6),
        ("float6_e2m3", "float6_e2m3fn", 6),
        ("int4", "int4", 4),
        ("int2", "int2", 2),
        ("uint2", "uint2", 2),
    ],
)
def test_every_code_as_ml_dtypes_has_it(name: str, theirs: str, bits: int) -> None:
    if not hasattr(ml_dtypes, theirs):
        pytest.skip(f"this ml_dtypes has no {theirs}")
    codes = np.arange(1 << bits, dtype=np.uint8)
    spread = (codes[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    raw = np.packbits(spread.reshape(-1).astype(np.uint8), bitorder="little")
    expected = codes.view(getattr(ml_dtypes, theirs)).astype(np.float64)
    if name.startswith("int"):  # a byte of ml_dtypes' int4 carries its sign in the high bits
        expected = np.where(codes < 1 << (bits - 1), codes, codes.astype(int) - (1 << bits))
    actual = widened(decode(raw, name, len(codes))).astype(np.float64)
    np.testing.assert_array_equal(actual, expected)
    assert np.array_equal(np.signbit(actual), np.signbit(expected))


def test_what_the_peer_has_wrong_about_fp8() -> None:
    e4m3 = widened(decode(CODES, "float8_e4m3fn", 256))
    assert math.isnan(e4m3[0x7F])
    assert math.isnan(e4m3[0xFF])
    e5m2 = widened(decode(CODES, "float8_e5m2", 256))
    assert e5m2[0xFC] == -np.inf
    assert e5m2[0x7C] == np.inf


def test_hifloat8() -> None:
    table = hifloat8_table()
    known = {
        0x00: 0.0, 0x08: 1.0, 0x10: 2.0, 0x6E: 32768.0, 0x01: 2.0**-22, 0x07: 2.0**-16,
        0x6F: np.inf, 0xEF: -np.inf, 0x88: -1.0, 0x09: 1.125, 0x0F: 1.875, 0x18: 0.5, 0x90: -2.0,
        0x20: 4.0, 0x7E: 2.0**-15,
    }  # fmt: skip
    assert {code: table[code] for code in known} == known
    assert math.isnan(table[0x80])
    finite = table[np.isfinite(table)]
    positive = finite[finite > 0]
    assert len(set(positive.tolist())) == len(positive) == 126
    assert (positive.min(), positive.max()) == (2.0**-22, 32768.0)
    np.testing.assert_array_equal(table[0x81:0xEF], -table[0x01:0x6F])


def test_plain_and_wide_types() -> None:
    rng = np.random.default_rng(0)
    for name in ("float32", "float16", "float64", "int64", "uint32", "bool", "complex64"):
        want = rng.integers(0, 2, 10).astype(name)
        got = decode(np.frombuffer(want.tobytes(), np.uint8), name, 10)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    bf16 = np.array([1.5, -0.0, np.nan, np.inf, 3e38], ml_dtypes.bfloat16)
    got = decode(bf16.view(np.uint8), "bfloat16", 5)
    np.testing.assert_array_equal(widened(got), bf16.astype(np.float32))
    assert widened(got).dtype == np.float32
    halves = np.array([1, 2, -3, 0.5], np.float16)
    np.testing.assert_array_equal(
        decode(halves.view(np.uint8), "complex32", 2), np.array([1 + 2j, -3 + 0.5j], np.complex64)
    )


def test_packed_types_are_cut_to_the_count() -> None:
    np.testing.assert_array_equal(
        decode(np.array([0x21, 0xF3], np.uint8), "int4", 3), np.array([1, 2, 3], np.int8)
    )
    assert decode(np.array([0xF3], np.uint8), "int4", 2)[1] == -1
    bits = decode(np.array([0b10100000, 0xFF], np.uint8), "uint1", 10)
    np.testing.assert_array_equal(bits, [1, 0, 1, 0, 0, 0, 0, 0, 1, 1])
    e1m2 = decode(np.array([0x74, 0xF1], np.uint8), "float4_e1m2", 4)
    np.testing.assert_array_equal(e1m2, np.array([1.0, 1.75, 0.25, -1.75], np.float32))
    assert decode(np.zeros(1, np.uint8), "float32", 4).size == 0


def test_every_type_has_a_kind() -> None:
    for name in PROTO_DTYPES:
        kind = kind_of(name)
        assert kind.wide.isbuiltin == 1
        values = decode(CODES, name, 4)
        assert values.astype(kind.wide).size == 4
